"""Checkpoints in transformers' layout: a model opened by its own class, and the tokenizers of prompts."""

from __future__ import annotations

import re
import shutil
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from lanternpp.errors import InputError
from lanternpp.models.hub import quiet
from lanternpp.nn.files import INDEX, check_finite, files, input_errors, join_names
from lanternpp.nn.files import opened as contents
from lanternpp.nn.sources import Source, blank
from lanternpp.util.files import replacing
from lanternpp.util.jsonfile import read_object, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

A = TypeVar("A")
TOKENIZER, VOCABULARY, PROCESSOR = "tokenizer.json", "vocab.json", "processor"
# Of these files transformers reads the first that a folder has.
WEIGHTS = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX)]
GENERATION = "generation_config.json"
CORRECT = "correct its config.json"
MAX_LAYERS, MAX_SIZE, MAX_ENTRIES = 512, 1 << 24, 64  # in a config.json
# Qwen's division of texts into words, single digits, signs and spaces.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPARE = 1 << 24  # parameters that a model may have beyond 1.25 times those of its files


class Text:
    """The tokenizer.json of a checkpoint, in its folder or in one called `processor`, read when it is first used.

    Where there is none, transformers makes it of the vocab.json and merges.txt that its slow tokenizers wrote.
    """

    def __init__(self, folder: Path):
        paths = [parent / TOKENIZER for parent in (folder, folder / PROCESSOR, folder.parent / PROCESSOR)]
        self.path = next((path for path in paths if path.is_file()), paths[0])

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        folder = self.path.parent
        if self.path.is_file():
            with input_errors(f"{self.path} is no tokenizer"):
                return Tokenizer.from_file(str(self.path))
        if not (folder / VOCABULARY).is_file():
            raise InputError(f"{self.path} is missing: copy it there from the model's repository.")
        from transformers import AutoTokenizer

        with quiet(), input_errors(f"{folder / VOCABULARY} is of no tokenizer"):
            made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            return cast("Tokenizer", made.backend_tokenizer)

    @property
    def config(self) -> Path:
        """The path of tokenizer_config.json, which most tokenizers have."""
        return self.path.with_name("tokenizer_config.json")

    @cached_property
    def begin(self) -> str:
        """The first token of every text: the one that its config names for the begin of texts, or else for their end."""
        config = read_object(self.config)
        token = config.get("bos_token") or config.get("eos_token")
        if isinstance(token, Mapping):
            token = token.get("content")
        if not isinstance(token, str):
            raise InputError(f"{self.config} names no bos_token and no eos_token: fetch it again.")
        return token

    def save(self, folder: Path) -> None:
        """Copy the file, and its config if there is one, into another folder."""
        if not self.path.is_file() and (self.path.parent / VOCABULARY).is_file():
            self._tokenizer.save(str(folder / self.path.name))
        for path in filter(Path.is_file, (self.path, self.config)):
            with replacing(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token."""
        return self._tokenizer.get_vocab()

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without any before or after it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def filled(self, parts: Sequence[str], **fields: object) -> list[int]:
        """Return the tokens of parts: tokens, by their names in angle brackets, and texts, with fields in braces."""
        tokens: list[int] = []
        for part in parts:
            tokens += [self.id(part)] if part[0] + part[-1] == "<>" else self.ids(part.format(**fields))
        return tokens

    def id(self, token: str) -> int:
        """Return the id of a token; raise InputError where the tokenizer has no such token."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise InputError(f"{self.path} has no token {token!r}: it is another model's tokenizer.")
        return token_id

    def processor(self, class_name: str) -> Any:
        """Open the processor of a class of transformers whose tokenizer this is."""
        import transformers

        if not self.path.is_file():
            raise InputError(
                f"{self.path} is missing: copy the folder `{PROCESSOR}` of the model's repository there."
            )
        with quiet(), input_errors(f"{self.path} cannot be opened"):
            return getattr(transformers, class_name).from_pretrained(self.path.parent, local_files_only=True)


class Ranks(Text):
    """A file of tiktoken, with the bytes of a token in base64 and its rank a line, read at once; InputError where there is none.

    special: the tokens after these, in order. source: where the file is published.
    """

    def __init__(self, path: Path, special: Sequence[str], source: str):
        self.path, self.special = path, special
        self._lines = read_text(path, f"copy it there from {source}").splitlines()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import normalizers
        from transformers.convert_slow_tokenizer import TikTokenConverter

        class Converter(TikTokenConverter):
            """The base class with a reader of its own, as tiktoken may not be installed."""

            @staticmethod
            def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
                """Return the rank of every token, by its bytes."""
                pairs = (line.split() for line in self._lines if line)
                return {b64decode(token, validate=True): int(rank) for token, rank in pairs}

        with input_errors(f"{self.path} is no file of tiktoken"):
            converter = Converter(None, PATTERN, extra_special_tokens=list(self.special))
            tokenizer: Tokenizer = converter.converted()
        tokenizer.normalizer = normalizers.NFC()
        return tokenizer


def opened(
    source: Source, class_name: str, fields: Mapping[str, Any], dtype: torch.dtype, optional: tuple[str, ...]
) -> Any:
    """Open the model in a checkpoint by a class of transformers, on the CPU.

    fields: of its config, in place of those of config.json. optional: patterns of the beginnings of the names of tensors that a
    checkpoint may lack, or have in other shapes. Raises InputError for a config that makes no network, and for tensors
    that are missing, misshaped or no finite numbers.
    """
    import transformers
    from transformers.distributed import DistributedConfig
    from transformers.quantizers import AutoHfQuantizer

    model_class = getattr(transformers, class_name)
    check_sizes(source.config, source.path)
    left_out = ("dtype", "transformers_weights")  # the second names another file
    own_fields = {name: value for name, value in source.config.items() if name not in left_out}
    quantised = source.config.get("quantization_config")
    with quiet():
        config = model_class.config_class.from_dict(own_fields | dict(fields))
        with blank():
            num_expected = sum(x.numel() for x in model_class(config).parameters())
        unknown = quantised and not AutoHfQuantizer.supports_quant_method(quantised)
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
    num_held = sum(meta.numel() for meta in source.metas.values())
    max_ratio = 10.0 if quantised else 1.25  # as a number may hold several quantised weights
    if num_expected > max_ratio * num_held + SPARE:
        raise InputError(
            f"{source.path}: config.json asks for {num_expected:,} weights and the files hold {num_held:,}."
        )
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "weights_only": True}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    if source.given.get("tensor_parallel"):
        options["distributed_config"] = DistributedConfig(tp_plan="auto")
    if (path := source.folder / GENERATION).is_file():
        with quiet(), input_errors(f"{path} cannot be read", "correct it"):
            options["generation_config"] = transformers.GenerationConfig.from_pretrained(source.folder)
    remedy = f"fetch it again, or {CORRECT}"
    with quiet(), input_errors(f"{source.path} cannot be opened", remedy):
        default = next((path for name in WEIGHTS if (path := source.folder / name).is_file()), None)
        folder = source.folder if default and files(default) == source.files else None
        if folder is None:  # in its folder transformers would read another file
            contents_of = map(contents, source.files)
            options["state_dict"] = {name: get(name) for names, get in contents_of for name in names}
        model, loading_info = model_class.from_pretrained(folder, config=config, dtype=dtype, **options)
    check_loaded(model, loading_info, source.path, optional)
    body = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is body)
    pattern = re.compile(rf"{re.escape(prefix)}\.layers\.(\d+)\.")
    matches = [pattern.match(name) for name in loading_info["unexpected_keys"]]
    num_layers = 1 + max((int(match[1]) for match in matches if match), default=-1)
    if num_layers > len(body.layers):
        raise InputError(
            f"{source.path}: config.json asks for {len(body.layers)} layers and the files hold {num_layers}."
        )
    return model.eval().requires_grad_(False)


def check_loaded(
    model: Any, loading_info: Mapping[str, Any], path: str | Path, optional: tuple[str, ...] = ()
) -> None:
    """Check by transformers' loading info that a model has all weights, in their shapes and finite; raise InputError otherwise."""
    faults = {name: f"missing {name}" for name in sorted(loading_info["missing_keys"])}
    for name, shape, expected in sorted(loading_info["mismatched_keys"]):
        faults[name] = f"{name} is {tuple(shape)} where {tuple(expected)} is expected"
    required = [name for name in faults if not any(re.match(pattern, name) for pattern in optional)]
    if required:
        raise InputError(
            f"{path} does not fit {type(model).__name__}: {join_names([faults[name] for name in required])}."
        )
    saved = model.state_dict()  # with buffers such as the moving averages of a norm
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved and type(tensor.data) is torch.Tensor:
            check_finite(name, tensor, path)


def adapted(make: Callable[[Any], A], model: Any) -> A:
    """Make an adapter on a model; raise InputError where the model's modules have other names than the adapter reads."""
    try:
        return make(model)
    except AttributeError as error:
        raise InputError(
            f"{type(model).__name__} has other modules than its adapter reads ({error}); a body needs `layers` with "
            "`self_attn`, `norm` and `rotary_emb`, as Llama's has"
        ) from error


def check_sizes(config: Any, path: Path, name: str = "") -> None:
    """Check that a network of a config.json can be made in a short time; raise InputError for a number beyond those of all models."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key != "vocabulary_map":
                check_sizes(value, path, str(key))
    elif isinstance(config, list):
        if len(config) > MAX_ENTRIES and name != "layer_types":
            raise InputError(
                f"{path}: config.json: {name} has {len(config)} entries; at most {MAX_ENTRIES} are read"
            )
        for value in config:
            check_sizes(value, path, name)
    elif isinstance(config, int | float):
        repeated = "layers" in name or "blocks" in name or name in ("depth", "num_experts")
        limit = MAX_LAYERS if repeated else MAX_SIZE
        if not abs(config) <= limit and not ("theta" in name or "base" == name):
            raise InputError(f"{path}: config.json: {name} {config} is out of range; at most {limit} is read")
