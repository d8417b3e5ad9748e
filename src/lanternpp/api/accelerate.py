"""`accelerate`, `restore`, `custom_generate` and `generate`: drafts for the `generate` of a model loaded in transformers.

transformers prepares a call (`GenerationMixin.generate` with a callable as `custom_generate`): prompts, generation config,
logits processors, stopping criteria. `custom_generate` reads these, draws with an engine of ours, and answers in the types
that `generate` answers in.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.models.transformers import CLASSES
from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.call import (
    MODE,
    Call,
    Processors,
    check_config,
    reject_arguments,
    token_rows,
)
from lanternpp.models.transformers.format import Format
from lanternpp.models.transformers.opening import adapted
from lanternpp.util.registry import find, unknown

HELD = "_lanternpp"  # the attribute of a model that keeps its pipeline
HOLDING = threading.RLock()  # of whoever sets or removes it
EMBEDDED = ("inputs_embeds", "pixel_values", "image")  # prompts that are more than tokens
CACHES = ("cache", "past_key_values")  # since transformers 5.24, and before
NOT_READ = ("streamer", "assistant_model", "position_ids", *CACHES, *EMBEDDED)
M = TypeVar("M")


@contextmanager
def python_names() -> Iterator[None]:
    """InputErrors name options as Python has them, and not as the command line, except in a command."""
    try:
        yield
    except InputError as error:
        named = re.sub(r"`.*?`|--([a-z-]+)", lambda n: n[1].replace("-", "_") if n[1] else n[0], str(error))
        error.args = (named,)
        raise


class Held(Pipeline):
    """The pipeline of a model that is open in transformers, kept with it for later calls; copies of the model have none."""

    target: TransformersTarget

    def __init__(self, model: Any, drafter: str | None, kernels: str | None = None):
        target, name = adapter_of(model), type(model).__name__
        if kernels is not None:
            target.decoder.use_kernels(kernels)
        here = Path(str(getattr(model, "name_or_path", "") or "-"))
        other = model_folder(drafter, "drafter") if drafter else None
        super().__init__(Model.of(target, here if here.is_dir() else Path(name), other), name, tuned=False)
        self.of = made_for(model, drafter, kernels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have None in its place."""
        return NoneType, ()

    @python_names()
    def checked(self, method: str, dials: Mapping[str, Any], **sampling: Any) -> Settings:
        """The settings of a call; drafters that these need are read. InputError."""
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

    def codes(
        self,
        call: Call,
        guidance: Guidance,
        seeds: list[int],
        method: str,
        dials: Mapping[str, Any],
        callback: Callable[[Partial], None] | None = None,
    ) -> tuple[Result[Any], Format]:
        """What a call asks for, codes [B, length], and the format they are in."""
        with self._lock:
            target, processors = self.target, call.processors
            if target.prompts:  # of the same thread's call
                raise InputError("generate was called while it draws; call it again once it has returned")
            target.decoder.replicate()  # a `forward` may have been replaced since the last call
            format = target.format(call).without(processors.suppressed, target.codes)
            tokens = token_rows(call.ids, call.mask)
            if guidance.branches == 2:
                tokens += target.unconditional_rows(call)
            prompts, slots = target.encode(tokens, guidance.branches)
            if slots + format.length > target.most:
                raise InputError(
                    f"prompt and picture take {slots + format.length} positions and the model has {target.most}"
                )
            try:
                if target.arrange(format, slots, prompts):
                    self.release()
                target.decoder.prepare(slots + format.length)
                top_k = min(processors.top_k, target.vocab)
                sampling = {"temperature": processors.temperature, "top_k": top_k, "top_p": processors.top_p}
                checked = self.checked(method, dials, cfg=guidance.scale, batch_size=len(seeds), **sampling)
                # a call may draw less than the pictures that accelerate's dials are for
                checked = for_target(checked, target, self.name, {**dials, "window_rows": None})
                request = Request([str(row) for row in range(len(seeds))], seeds, self.fit(checked))
                with self._taken(request.settings) as engine:
                    return self.draw(engine, request, callback=callback, output_type="codes"), format
            finally:
                target.prompts = ()


def family_of(model: Any) -> Callable[[Any], TransformersTarget]:
    """What makes the adapter of a model. InputError where there is none."""
    name = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in CLASSES), None)
    if name is not None:
        return find("model family", name, CLASSES)
    called = type(model).__name__
    for inside in ("get_base_model()", "_orig_mod", "module"):
        if hasattr(model, inside.removesuffix("()")):
            raise InputError(f"{called} holds the model; use lanternpp.accelerate(model.{inside})")
    raise InputError(unknown("a transformers model of class", called, CLASSES))


def adapter_of(model: Any) -> TransformersTarget:
    """The adapter of a model. InputError where there is none, or the model lies on several devices."""
    make = family_of(model)
    places = {str(parameter.device) for parameter in model.parameters()}
    if len(places) > 1 or "meta" in places:
        raise InputError(f"the model lies on {', '.join(sorted(places))}; load it on one device")
    return adapted(make, model)


def made_for(model: Any, drafter: str | None, kernels: str | None) -> tuple[Any, ...]:
    """The options and the state of a model that a pipeline is made for: where these change, another is made."""
    places = {parameter.device for parameter in model.parameters()}
    return drafter, kernels, next(model.parameters()).dtype, places, list(model.modules())


def held(model: Any, drafter: str | Path | None, kernels: str | None = None) -> Held:
    """The pipeline of a model, made now or for an earlier call with the same drafter, kernels, dtype, devices and modules."""
    drafter = None if drafter is None else calls.text("drafter", drafter)
    kernels = None if kernels is None else calls.text("kernels", kernels)
    with HOLDING:
        if hasattr(model, "_hf_hook"):
            model._hf_hook.pre_forward(model)  # accelerate's, of `forward`: it may bring the weights to a GPU
        if getattr(getattr(model, HELD, None), "of", None) != made_for(model, drafter, kernels):
            vars(model).pop(HELD, None)  # freed before another one is made
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
    **more: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Draw pictures with drafts: `model.generate(..., custom_generate=lanternpp.custom_generate)`.

    transformers gives the first five arguments and those of the model. Yours may be `method` (a name of
    `lanternpp.METHODS`, or "auto"), `drafter` (a folder or hub id), `kernels` (as `accelerate` has it), `generator` (of the seeds; default: torch's own),
    `cfg` (in place of `guidance_scale`), `callback` (called with a `Partial` after every prompt and every pass; it has no
    pictures) and `MethodDials`. It returns what `generate` returns: token ids
    [B, prompt + new] (Janus: codes [B, n]), or a GenerateDecoderOnlyOutput of them. Raises InputError for what drafts do not
    support; `streamer` and `assistant_model` are ignored, as transformers does not pass them on.
    """
    check_config(generation_config, stopping_criteria)
    reject_arguments(EMBEDDED, {**more, **(more.get("mm_encoder_outputs") or {})})
    # transformers makes an empty one where the call has none
    filled = [name for name in CACHES if more.get(name) is not None and more[name].get_seq_length()]
    reject_arguments(filled, more)
    prepares_itself = getattr(model.prepare_inputs_for_generation, "__self__", None) is model
    if not prepares_itself:
        raise InputError(
            "prompts that another object prepares, as prompt and prefix tuning do, are not supported with drafts; "
            "use lanternpp.restore(model)"
        )
    if input_ids.shape[1] == 0:
        raise InputError("prompts must be given as input_ids, not as inputs_embeds")
    dials = {name: more.pop(name) for name in MethodDials.__annotations__ if more.get(name) is not None}
    processors = Processors.read(logits_processor).greedy(not generation_config.do_sample)
    state = held(model, drafter, kernels)
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    skipped = (
        model._forward_hooks or model._forward_pre_hooks or owner.__module__.split(".")[0] != "transformers"
    )
    if state.target.by_forward and skipped:
        raise InputError(
            "hooks on the model itself and the forward of a subclass would be skipped by drafts; move them to its lm_head, or use "
            "lanternpp.restore(model)"
        )
    ends = [t for each in stopping_criteria for t in getattr(each, "eos_token_id", torch.tensor([])).tolist()]
    call = Call(input_ids, more.pop("attention_mask", None), generation_config, processors, ends, more)
    configs = (generation_config, model.generation_config)
    scales = (cfg, processors.guidance, *(config.guidance_scale for config in configs))
    scale = next((float(scale) for scale in scales if scale is not None), state.target.guidance)
    guidance = Guidance(scale, name="guidance_scale" if cfg is None else "cfg")
    count = len(input_ids)
    seeds = [0] * count if processors.temperature == 0 else calls.random_seeds(count, generator)
    if state.target.decoder.ranks > 1:
        torch.distributed.broadcast_object_list(seeds)
    result, format = state.codes(call, guidance, seeds, method, dials, callback)
    sequences = state.target.sequences(result.codes, format, call)
    if isinstance(made := vars(model).get("generate"), Generate):
        made.codes_per_pass = result.stats.codes_per_pass
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences))
    return sequences


def generate(model: Any, *args: Any, usual: Callable[..., Any] | None = None, **given: Any) -> Any:
    """As `model.generate(...)`; a call that asks for a picture is drawn with drafts.

    given: the arguments of the model's own `generate`, and those of `custom_generate`. usual: the function for other calls;
    default: the `generate` of the model's class.
    """
    usual = usual or functools.partial(type(model).generate, model)
    bound = inspect.signature(type(model).generate).bind_partial(model, *args, **given).arguments
    named = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    named |= bound.get("kwargs", {})
    asks = getattr(family_of(model), "asks_for_picture", TransformersTarget.asks_for_picture)
    if named.get("custom_generate") is not None or not asks(named):
        for name in ("method", "drafter", "kernels", "callback", *MethodDials.__annotations__):
            given.pop(name, None)
        return usual(*args, **given)
    reject_arguments(NOT_READ, named)
    named.pop(MODE, None)
    named.pop("custom_generate", None)
    held(model, given.get("drafter"), given.get("kernels")).target.adjust(named)
    return GenerationMixin.generate(model, **named, custom_generate=custom_generate)


class Generate:
    """The `generate` of an accelerated model.

    codes_per_pass: codes decided by each pass of the model, the mean of the last call's pictures.
    """

    codes_per_pass: float | None = None

    def __init__(self, model: Any, **options: Any):
        self.model, self.usual, self.options = model, model.generate, options
        self.replaced = vars(model).get("generate")  # of the instance, not of its class
        # no more than signature, name and documentation: the rest cannot be pickled
        functools.update_wrapper(self, self.usual, ("__name__", "__qualname__", "__doc__"), ())

    def __call__(self, *args: Any, **given: Any) -> Any:
        return generate(self.model, *args, usual=self.usual, **{**self.options, **given})

    @property
    def packed_bytes(self) -> int:
        """Bytes that the copy of the layers' weights takes for the kernels; 0 without."""
        state: Held | None = getattr(self.model, HELD, None)
        return 0 if state is None else state.target.decoder.packed_bytes


def accelerate(
    model: M,
    method: str = AUTO,
    drafter: str | Path | None = None,
    kernels: Literal["bfloat16", "int8"] | None = None,
    **dials: Unpack[MethodDials],
) -> M:
    """Let a loaded transformers model draw with drafts; returns the model.

    `model.generate(...)` keeps its arguments and its results; pictures take fewer passes of the model, and calls that ask
    for no picture are as before. The weights stay where they are: memory grows by the KV cache and the drafter. Known are
    Janus, Emu3, Emu3.5, Chameleon, GLM-Image, Liquid and SimpleAR.
    method: a name of `lanternpp.METHODS`; "auto" takes the drafter's lossless method, or `jacobi-coupled` without one.
    drafter: a folder or hub id. How codes are sampled comes with each call of `generate`, as usual.
    kernels: compute the layers in C, from a copy of their weights in this dtype, of 2 bytes a weight or 1.13; for a model in
    bfloat16 on a CPU. `model.generate.packed_bytes` is the size of the copy.
    Raises InputError for a model that is not known, a method without its drafter, a wrong dial, and layers that the kernels
    do not compute; the model is then as before.
    """
    with HOLDING:
        vars(model).pop(HELD, None)
        try:
            state = held(model, drafter, kernels)
            state.checked(method, dials)
        except InputError:
            vars(model).pop(HELD, None)
            raise
        vars(restore(model))[HELD] = state
        made = Generate(model, method=method, drafter=drafter, kernels=kernels, **dials)
        setattr(model, "generate", made)  # noqa: B010
    return model


def restore(model: M) -> M:
    """Undo `accelerate`, and free the pipeline that was kept for the model; returns the model."""
    with HOLDING:
        made = vars(model).get("generate")
        if isinstance(made, Generate):
            delattr(model, "generate")
            if made.replaced is not None:
                setattr(model, "generate", made.replaced)  # noqa: B010
        vars(model).pop(HELD, None)
    return model
