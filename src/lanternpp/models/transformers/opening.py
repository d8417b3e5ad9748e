"""Checkpoints in transformers' layout: a model opened by its own class, and the tokenizers of prompts."""

from __future__ import annotations

import re
import shutil
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lanternpp.errors import InputError
from lanternpp.models.hub import quiet
from lanternpp.nn.files import INDEX, check_finite, files, listed, wrong_file
from lanternpp.nn.files import opened as contents
from lanternpp.nn.sources import Source, blank
from lanternpp.util.files import replacing, write_text
from lanternpp.util.jsonfile import read_object, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

A = TypeVar("A")
TOKENIZER, PROCESSOR = "tokenizer.json", "processor"
# Of these files transformers reads the first that a folder has.
USUAL = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX)]
GENERATION = "generation_config.json"
CORRECT = "correct its config.json"
MOST_LAYERS, MOST_SIZE, MOST_STAGES = 512, 1 << 24, 64  # in a config.json
# Qwen's: words, single digits, signs and spaces
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPARE = 1 << 24  # parameters that a model may have beyond those of its files, besides a quarter of them


class Text:
    """The tokenizer.json of a checkpoint, in its folder or in one called `processor`, read when it is first used."""

    def __init__(self, folder: Path):
        places = (folder, folder / PROCESSOR, folder.parent / PROCESSOR)
        self.path = next(
            (path for place in places if (path := place / TOKENIZER).is_file()), folder / TOKENIZER
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        if not self.path.is_file():
            raise InputError(f"{self.path} is missing: copy it there from the model's repository.")
        with wrong_file(f"{self.path} is no tokenizer"):
            return Tokenizer.from_file(str(self.path))

    def save(self, folder: Path) -> None:
        """Copy it into another folder."""
        with replacing(folder / self.path.name) as temporary:
            shutil.copyfile(self.path, temporary)

    def vocabulary(self) -> dict[str, int]:
        """Every token's id."""
        return self._tokenizer.get_vocab()

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, none added before or after it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def id(self, token: str) -> int:
        """The id of one token, which must be there."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise InputError(f"{self.path} has no token {token!r}: it is another model's tokenizer.")
        return found


class FirstToken(Text):
    """A tokenizer whose files name the first token of every text."""

    @property
    def config(self) -> Path:
        """The file that names it."""
        return self.path.with_name("tokenizer_config.json")

    @cached_property
    def begin(self) -> str:
        """The one that begins a text, or else the one that ends it, as its authors' tokenizer has it. InputError."""
        config = read_object(self.config)
        found = config.get("bos_token") or config.get("eos_token")
        found = found.get("content") if isinstance(found, Mapping) else found
        if not isinstance(found, str):
            raise InputError(f"{self.config} names no bos_token and no eos_token: fetch it again.")
        return found

    def save(self, folder: Path) -> None:
        """Both files."""
        super().save(folder)
        write_text(folder / self.config.name, read_text(self.config))


class Ranks(Text):
    """Pairs of bytes by their ranks, one in base64 a line; `special`: the tokens that come after them, in order."""

    def __init__(self, path: Path, special: Sequence[str]):
        self.path, self.special = path, special

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import normalizers
        from transformers.convert_slow_tokenizer import TikTokenConverter

        lines = read_text(self.path, "copy it there from its authors' repository").splitlines()

        class Converter(TikTokenConverter):
            """The base class reads the file by tiktoken, which is not installed."""

            @staticmethod
            def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
                """The bytes of every token, and its rank."""
                pairs = (line.split() for line in lines if line)
                return {b64decode(token, validate=True): int(rank) for token, rank in pairs}

        with wrong_file(f"{self.path} is no file of tiktoken"):
            made: Tokenizer = Converter(None, PATTERN, extra_special_tokens=list(self.special)).converted()
        made.normalizer = normalizers.NFC()
        return made


def opened(
    source: Source, kind: str, fields: Mapping[str, Any], dtype: torch.dtype, lacking: tuple[str, ...] = ()
) -> Any:
    """The model in a checkpoint, by the class of transformers called `kind`, on the CPU.

    fields: of its config, whatever config.json says. lacking: patterns of the beginnings of tensors' names that a checkpoint may lack, or
    have in other shapes. Raises InputError for a config of which no network can be made, and for what is missing, misshaped or no
    finite number.
    """
    import transformers
    from transformers.distributed import DistributedConfig
    from transformers.quantizers import AutoHfQuantizer

    made = getattr(transformers, kind)
    check_sizes(source.config, source.path)
    left_out = ("dtype", "transformers_weights")  # the second names another file
    given = {name: value for name, value in source.config.items() if name not in left_out} | dict(fields)
    with quiet():
        config = made.config_class.from_dict(given)
        with blank():
            expected = sum(x.numel() for x in made(config).parameters())
        quantised = source.config.get("quantization_config")
        unknown = quantised and not AutoHfQuantizer.supports_quant_method(quantised)
    held = sum(meta.numel() for meta in source.metas.values())
    if unknown:
        raise InputError(
            f"{source.path}: config.json: transformers knows no quantization_config such as {quantised}"
        )
    for name, meta in () if quantised else source.metas.items():
        scaled = source.metas.keys() & {f"{name}_scale", f"{name}_scale_inv"}
        if name.endswith((".weight", ".bias")) and (scaled or not meta.is_floating_point()):
            raise InputError(
                f"{source.path}: {name} holds {str(meta.dtype).removeprefix('torch.')} where weights are expected, and "
                "config.json names no quantization_config."
            )
    # of quantised weights several lie in one number
    most = 10.0 if quantised else 1.25
    if expected > most * held + SPARE:
        raise InputError(
            f"{source.path}: config.json asks for {expected:,} weights and the files hold {held:,}."
        )
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "weights_only": True}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    if source.given.get("tensor_parallel"):
        options["distributed_config"] = DistributedConfig(tp_plan="auto")
    if (path := source.folder / GENERATION).is_file():
        with quiet(), wrong_file(f"{path} cannot be read", "correct it"):
            options["generation_config"] = transformers.GenerationConfig.from_pretrained(source.folder)
    remedy = f"fetch it again, or {CORRECT}"
    with quiet(), wrong_file(f"{source.path} cannot be opened", remedy), ExitStack() as stack:
        first = next((path for name in USUAL if (path := source.folder / name).is_file()), None)
        place = source.folder if first and files(first) == source.files else None
        if place is None:  # in its folder transformers would read another file
            parts = [stack.enter_context(contents(file)) for file in source.files]
            options["state_dict"] = {name: get(name) for names, get in parts for name in names}
        model, found = made.from_pretrained(place, config=config, dtype=dtype, **options)
    check_loaded(model, found, source.path, lacking)
    body = model.get_decoder()
    inside = next(name for name, part in model.named_modules() if part is body)
    numbers = (re.match(rf"{re.escape(inside)}\.layers\.(\d+)\.", name) for name in found["unexpected_keys"])
    layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if layers > len(body.layers):
        raise InputError(
            f"{source.path}: config.json asks for {len(body.layers)} layers and the files hold {layers}."
        )
    return model.eval().requires_grad_(False)


def check_loaded(
    model: Any, found: Mapping[str, Any], where: str | Path, lacking: tuple[str, ...] = ()
) -> None:
    """InputError where a model lacks weights, has them in other shapes or as no finite numbers; found: transformers' loading info."""
    wrong = {name: f"missing {name}" for name in sorted(found["missing_keys"])}
    for name, theirs, ours in sorted(found["mismatched_keys"]):
        wrong[name] = f"{name} is {tuple(theirs)} where {tuple(ours)} is expected"
    faults = [
        fault for name, fault in wrong.items() if not any(re.match(pattern, name) for pattern in lacking)
    ]
    if faults:
        raise InputError(f"{where} does not fit {type(model).__name__}: {listed(faults)}.")
    kept = model.state_dict()  # with buffers such as the moving averages of a norm
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if name in kept and type(weight.data) is torch.Tensor:
            check_finite(name, weight, where)


def adapted(make: Callable[[Any], A], model: Any) -> A:
    """An adapter on a model. InputError where the model's modules have other names than the adapter reads."""
    try:
        return make(model)
    except AttributeError as error:
        raise InputError(
            f"{type(model).__name__} has other modules than its adapter reads ({error}); a body needs `layers` with "
            "`self_attn`, `norm` and `rotary_emb`, as Llama's has"
        ) from error


def check_sizes(config: Any, where: Path, name: str = "") -> None:
    """InputError where a number of a config.json is beyond every model, as making the network would take for ever."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key != "vocabulary_map":
                check_sizes(value, where, str(key))
    elif isinstance(config, list):
        if len(config) > MOST_STAGES and name != "layer_types":
            raise InputError(
                f"{where}: config.json: {name} has {len(config)} entries; at most {MOST_STAGES} are read"
            )
        for value in config:
            check_sizes(value, where, name)
    elif isinstance(config, int | float):
        repeated = "layers" in name or "blocks" in name or name in ("depth", "num_experts")
        most = MOST_LAYERS if repeated else MOST_SIZE
        if not abs(config) <= most and not ("theta" in name or "base" == name):
            raise InputError(f"{where}: config.json: {name} {config} is out of range; at most {most} is read")
