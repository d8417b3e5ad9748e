"""`accelerate`, `restore`, `custom_generate` and `generate`: drafts for the `generate` of a model loaded in transformers.

transformers prepares a call (`GenerationMixin.generate` with a callable as `custom_generate`): prompts, generation config,
logits processors, stopping criteria. `custom_generate` reads these, draws with an engine of ours, and returns the types
that `generate` returns.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, Unpack, cast

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

from lanternpp.api import calls
from lanternpp.api.calls import Request
from lanternpp.api.model import Model, model_folder
from lanternpp.api.options import AUTO, MethodDials, Settings, listing
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.results import Partial, Result
from lanternpp.api.settings import for_target, network_needed
from lanternpp.engine.compiled import GraphedParts, recorder_of
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.models.transformers import CLASSES
from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.call import (
    MODE,
    Call,
    Processors,
    check_config,
    padded,
    reject_arguments,
    token_rows,
)
from lanternpp.models.transformers.format import Format
from lanternpp.models.transformers.opening import adapted
from lanternpp.util.registry import find, unknown

HELD = "_lanternpp"  # the attribute of a model that keeps its pipeline
HELD_LOCK = threading.RLock()  # for setting and removing the attribute
EMBEDDED = ("inputs_embeds", "pixel_values", "image")  # prompts that are more than tokens
CACHES = ("cache", "past_key_values")  # since transformers 5.24, and before
UNSUPPORTED = ("streamer", "assistant_model", "position_ids", *CACHES, *EMBEDDED)
M = TypeVar("M")


class Held(Pipeline):
    """The pipeline of a model that is open in transformers. The model keeps it for later calls; copies of the model do not."""

    target: TransformersTarget

    def __init__(self, model: Any, drafter: str | None, kernels: str | None = None):
        target, name = adapter_of(model), type(model).__name__
        if kernels is not None:
            target.decoder.use_kernels(kernels)
        folder = Path(str(getattr(model, "name_or_path", "") or "-"))
        folder = folder if folder.is_dir() else Path(name)
        drafter_folder = model_folder(drafter, "drafter") if drafter else None
        super().__init__(Model.of(target, folder, drafter_folder), name, tuned=False)
        self.made_for = made_for(model, drafter, kernels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave None in copies and pickles of the model."""
        return NoneType, ()

    def checked(self, method: str, dials: Mapping[str, Any], **sampling: Any) -> Settings:
        """Check and return the settings of a call, and read the drafter that they need; raise InputError."""
        try:
            for name in dials.keys() - MethodDials.__annotations__:
                raise InputError(unknown("option", name, MethodDials.__annotations__))
            settings = self.settings(method, **dials, **sampling)
            kind = network_needed(settings)
            if kind == "independent":
                raise InputError(
                    "the method independent needs prompts as text, which generate does not have; use another"
                )
            if kind is not None:
                self.model.network(kind)
            return settings
        except InputError as error:
            # Options get Python's names in place of the command line's, except within commands.
            option = r"`.*?`|--([a-z-]+)"
            message = re.sub(option, lambda m: m[1].replace("-", "_") if m[1] else m[0], str(error))
            error.args = (message,)
            raise

    def codes(
        self,
        call: Call,
        guidance: Guidance,
        seeds: list[int],
        method: str,
        dials: Mapping[str, Any],
        callback: Callable[[Partial], None] | None = None,
    ) -> tuple[Result[Any], Format]:
        """Draw the pictures of a call; return the result, with codes [B, length], and the format of the codes."""
        with self._lock:
            target, processors = self.target, call.processors
            # The lock is reentrant, so a call within a call of the same thread comes here.
            if target.calls:
                raise InputError("generate was called while it draws; call it again once it has returned")
            target.decoder.replicate()  # a `forward` may have been replaced since the last call
            format = target.format(call).without(processors.suppressed, target.codes)
            branches = [token_rows(call.ids, call.mask)]
            if guidance.branches == 2:
                branches.append(target.unconditional_rows(call))
            slots = padded(row for rows in branches for row in rows)
            if slots + format.length > target.most:
                raise InputError(
                    f"prompt and picture take {slots + format.length} positions and the model has {target.most}"
                )
            try:
                if target.arrange(format, slots, list(zip(*branches, strict=True))):
                    self.release()
                # As transformers does: a top-k above the number of codes keeps all.
                top_k = min(processors.top_k, target.vocab)
                sampling = {"temperature": processors.temperature, "top_k": top_k, "top_p": processors.top_p}
                settings = self.checked(method, dials, cfg=guidance.scale, batch_size=len(seeds), **sampling)
                # The picture of a call may have fewer rows than the pictures that accelerate's dials are for.
                settings = for_target(settings, target, self.name, {**dials, "window_rows": None})
                request = Request([str(row) for row in range(len(seeds))], seeds, self.fit(settings))
                with self._engine_in_use(request.settings) as engine:
                    if isinstance(engine.run, GraphedParts):
                        engine.run.forget(recorder_of(engine))
                    return self.draw(engine, request, callback=callback, output_type="codes"), format
            finally:
                target.calls = ()


def family_of(model: Any) -> Callable[[Any], TransformersTarget]:
    """Return the function that makes a model's adapter; raise InputError for a class that no family reads."""
    name = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in CLASSES), None)
    if name is not None:
        return find("model family", name, CLASSES)
    class_name = type(model).__name__
    for inner in ("get_base_model()", "_orig_mod", "module"):
        if hasattr(model, inner.removesuffix("()")):
            raise InputError(f"{class_name} holds the model; use lanternpp.accelerate(model.{inner})")
    raise InputError(unknown("a transformers model of class", class_name, CLASSES))


def adapter_of(model: Any) -> TransformersTarget:
    """Return the adapter of a model; raise InputError for an unknown class, and for a model on several devices."""
    adapter_class = family_of(model)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise InputError(f"the model lies on {', '.join(sorted(devices))}; load it on one device")
    return adapted(adapter_class, model)


def made_for(model: Any, drafter: str | None, kernels: str | None) -> tuple[Any, ...]:
    """Return the options and the state of a model that a pipeline is made for: after a change another pipeline is made."""
    devices = {parameter.device for parameter in model.parameters()}
    return drafter, kernels, next(model.parameters()).dtype, devices, list(model.modules())


def held(model: Any, drafter: str | Path | None, kernels: str | None = None) -> Held:
    """Return a model's pipeline, made now or by an earlier call with the same drafter, kernels, dtype, devices and modules."""
    drafter = None if drafter is None else calls.text("drafter", drafter)
    kernels = None if kernels is None else calls.text("kernels", kernels)
    with HELD_LOCK:
        # A hook of Hugging Face's accelerate may move the weights to a GPU before `forward`.
        if hasattr(model, "_hf_hook"):
            model._hf_hook.pre_forward(model)
        if getattr(getattr(model, HELD, None), "made_for", None) != made_for(model, drafter, kernels):
            vars(model).pop(HELD, None)  # frees the memory before another pipeline takes it
            vars(model)[HELD] = Held(model, drafter, kernels)
        return getattr(model, HELD)


@listing(MethodDials)
def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    method: str = AUTO,
    drafter: str | Path | None = None,
    kernels: str | None = None,
    generator: torch.Generator | None = None,
    cfg: float | None = None,
    callback: Callable[[Partial], None] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Draw pictures with drafts: `model.generate(..., custom_generate=lanternpp.custom_generate)`.

    transformers gives the first five arguments and the model's. The caller's are `method` (a name of `lanternpp.METHODS`, or
    "auto"), `drafter` (a folder or hub id), `kernels` (as `accelerate` has it), `generator` (of the seeds; default: torch's own),
    `cfg` (in place of `guidance_scale`), `callback` (called with a `Partial` without pictures after every prompt and every pass)
    and `MethodDials`. Returns the type that `generate` returns: token ids [B, prompt + new] (Janus: codes [B, n]), or a
    GenerateDecoderOnlyOutput of them. Raises InputError for arguments that drafts do not support; `streamer` and
    `assistant_model` are ignored, as transformers does not pass them on.
    """
    check_config(generation_config, stopping_criteria)
    reject_arguments(EMBEDDED, {**model_kwargs, **(model_kwargs.get("mm_encoder_outputs") or {})})
    # transformers makes an empty cache where the call has none.
    caches = {name: model_kwargs[name] for name in CACHES if model_kwargs.get(name) is not None}
    reject_arguments([name for name, cache in caches.items() if cache.get_seq_length()], model_kwargs)
    prepares_itself = getattr(model.prepare_inputs_for_generation, "__self__", None) is model
    if not prepares_itself:
        raise InputError(
            "prompts that another object prepares, as prompt and prefix tuning do, are not supported with drafts; "
            "use lanternpp.restore(model)"
        )
    if input_ids.shape[1] == 0:
        raise InputError("prompts must be given as input_ids, not as inputs_embeds")
    dial_names = [name for name in MethodDials.__annotations__ if model_kwargs.get(name) is not None]
    dials = {name: model_kwargs.pop(name) for name in dial_names}
    processors = Processors.read(logits_processor, greedy=not generation_config.do_sample)
    pipeline = held(model, drafter, kernels)
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    own_forward = owner.__module__.split(".")[0] != "transformers"
    if pipeline.target.by_forward and (model._forward_hooks or model._forward_pre_hooks or own_forward):
        raise InputError(
            "hooks on the model itself and the forward of a subclass would be skipped by drafts; move them to its lm_head, or use "
            "lanternpp.restore(model)"
        )
    end_tokens: list[int] = []
    for criterion in stopping_criteria:
        end_tokens += getattr(criterion, "eos_token_id", input_ids[:0]).tolist()
    mask = model_kwargs.pop("attention_mask", None)
    call = Call(input_ids, mask, generation_config, processors, end_tokens, model_kwargs)
    configs = (generation_config, model.generation_config)
    scales = (cfg, processors.guidance, *(config.guidance_scale for config in configs))
    scale = next((float(scale) for scale in scales if scale is not None), pipeline.target.guidance)
    guidance = Guidance(scale, name="guidance_scale" if cfg is None else "cfg")
    batch = len(input_ids)
    seeds = [0] * batch if processors.temperature == 0 else calls.random_seeds(batch, generator)
    if pipeline.target.decoder.ranks > 1:
        torch.distributed.broadcast_object_list(seeds)
    result, format = pipeline.codes(call, guidance, seeds, method, dials, callback)
    sequences = pipeline.target.sequences(result.codes, format, call)
    if isinstance(wrapper := vars(model).get("generate"), Generate):
        wrapper.codes_per_pass = result.stats.codes_per_pass
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences))
    return sequences


def generate(model: Any, *args: Any, usual: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Draw with drafts where a call asks for a picture; pass other calls on to `model.generate`.

    kwargs: the arguments of the model's own `generate`, and those of `custom_generate`. usual: the function for other calls;
    default: the `generate` of the model's class.
    """
    asks_for_picture = getattr(family_of(model), "asks_for_picture", TransformersTarget.asks_for_picture)
    usual = usual or functools.partial(type(model).generate, model)
    bound = inspect.signature(type(model).generate).bind_partial(model, *args, **kwargs).arguments
    arguments = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    arguments |= bound.get("kwargs", {})
    if arguments.get("custom_generate") is not None or not asks_for_picture(arguments):
        for name in ("method", "drafter", "kernels", "callback", *MethodDials.__annotations__):
            kwargs.pop(name, None)
        return usual(*args, **kwargs)
    reject_arguments(UNSUPPORTED, arguments)
    arguments.pop(MODE, None)
    arguments.pop("custom_generate", None)
    held(model, kwargs.get("drafter"), kwargs.get("kernels")).target.adjust(arguments)
    return GenerationMixin.generate(model, **arguments, custom_generate=custom_generate)


class Generate:
    """The `generate` of an accelerated model.

    codes_per_pass: codes decided by each pass of the model, the mean of the last call's pictures.
    """

    codes_per_pass: float | None = None

    def __init__(self, model: Any, **options: Any):
        self.model, self.usual, self.options = model, model.generate, options
        self.replaced = vars(model).get("generate")  # an attribute of the instance, not of its class
        # Only the signature, name and documentation are copied, as other attributes cannot be pickled.
        functools.update_wrapper(self, self.usual, ("__name__", "__qualname__", "__doc__"), ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = self.options
        # The parts and dials belong to their own method.
        if options["method"] not in (AUTO, kwargs.get("method") or options["method"]):
            options = {name: x for name, x in options.items() if name not in MethodDials.__annotations__}
        return generate(self.model, *args, usual=self.usual, **{**options, **kwargs})

    @property
    def packed_bytes(self) -> int:
        """Bytes of the kernels' copy of the layers' weights; 0 without a copy."""
        pipeline: Held | None = getattr(self.model, HELD, None)
        return 0 if pipeline is None else pipeline.target.decoder.packed_bytes


def accelerate(
    model: M,
    method: str = AUTO,
    drafter: str | Path | None = None,
    kernels: Literal["bfloat16", "int8", "int4"] | None = None,
    **dials: Unpack[MethodDials],
) -> M:
    """Let a loaded transformers model draw with drafts; return the model.

    `model.generate(...)` keeps its arguments and its results; pictures take fewer passes of the model, and calls that ask
    for no picture are as before. The weights stay where they are: memory grows by the KV cache and the drafter. The families are
    Janus, Emu3, Emu3.5, Chameleon, GLM-Image, Liquid and SimpleAR.
    method: a name of `lanternpp.METHODS`; "auto" takes the drafter's lossless method, or `jacobi-coupled` without a drafter.
    drafter: a folder or hub id. Each call of `generate` says how codes are sampled, as usual.
    kernels: compute the layers in C, from a copy of their weights in this dtype, of 2, 1.01 or 0.54 bytes a weight; for
    a model in bfloat16 on a CPU. `model.generate.packed_bytes` is the size of the copy.
    Raises InputError for a model of another family, a method without its drafter, a wrong dial, and layers that the kernels
    do not compute; the model is then as before.
    """
    family_of(model)  # raises InputError where the argument is not a model
    with HELD_LOCK:
        vars(model).pop(HELD, None)
        try:
            pipeline = held(model, drafter, kernels)
            pipeline.check(pipeline.checked(method, dials))
        except InputError:
            vars(model).pop(HELD, None)
            raise
        vars(restore(model))[HELD] = pipeline
        vars(model)["generate"] = Generate(model, method=method, drafter=drafter, kernels=kernels, **dials)
    return model


def restore(model: M) -> M:
    """Undo `accelerate`, and free the pipeline that was kept for the model; return the model."""
    with HELD_LOCK:
        wrapper = vars(model).get("generate")
        if isinstance(wrapper, Generate):
            delattr(model, "generate")
            if wrapper.replaced is not None:
                setattr(model, "generate", wrapper.replaced)  # noqa: B010
        vars(model).pop(HELD, None)
    return model
