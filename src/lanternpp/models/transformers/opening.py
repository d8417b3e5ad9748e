"""Checkpoints in transformers' layout: a model opened by its own class, and the tokenizer of its prompts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lanternpp.errors import InputError, one_line
from lanternpp.models.text import quiet, reason
from lanternpp.nn.shards import check_finite
from lanternpp.nn.sources import Source, blank
from lanternpp.util.files import replacing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
MOST_LAYERS, MOST_SIZE, MOST_STAGES = 512, 1 << 24, 64  # in a config.json
SPARE = 1 << 24  # parameters that a model may have beyond those of its files, besides a quarter of them


class Text:
    """The tokenizer.json of a checkpoint folder, read when it is first used."""

    def __init__(self, folder: Path):
        self.path = folder / TOKENIZER

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        if not self.path.is_file():
            raise InputError(f"{self.path} is missing: copy it there from the model's repository.")
        try:
            return Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises no narrower one
            raise InputError(
                f"{self.path} is no tokenizer ({one_line(str(error), 200)}): fetch it again."
            ) from None

    def save(self, folder: Path) -> None:
        """Copy it into another folder."""
        with replacing(folder / TOKENIZER) as temporary:
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


def opened(source: Source, kind: str, config: Any, dtype: torch.dtype, lacking: tuple[str, ...] = ()) -> Any:
    """The model in a checkpoint, by the class of transformers called `kind`, on the CPU.

    lacking: patterns of the beginnings of tensors' names that a checkpoint may lack, or have in other shapes. Raises InputError for a
    config of which no network can be made, and for what is missing, misshaped or no finite number.
    """
    import transformers

    folder, made = folder_of(source), getattr(transformers, kind)
    check_sizes(source.config, source.path)
    with quiet(), blank(source.path):
        expected = count(attempt(source, lambda: made(config)))
    given = sum(meta.numel() for meta in source.metas.values())
    # of quantised weights several lie in one number
    each = 10.0 if "quantization_config" in source.config else 1.25
    if expected > each * given + SPARE:
        raise InputError(
            f"{source.path}: config.json asks for {expected:,} weights and the files hold {given:,}."
        )
    options = {"local_files_only": True, "trust_remote_code": False, "weights_only": True}
    with quiet():
        model, found = attempt(
            source,
            lambda: made.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            ),
        )
    wrong = {name: f"missing {name}" for name in sorted(found["missing_keys"])}
    for name, theirs, ours in sorted(found["mismatched_keys"]):
        wrong[name] = f"{name} is {tuple(theirs)} where {tuple(ours)} is expected"
    faults = [fault for name, fault in wrong.items() if not any(re.match(each, name) for each in lacking)]
    if faults:
        more = f", and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise InputError(f"{source.path} does not fit {kind}: {', '.join(faults[:10])}{more}.")
    for name, weight in model.named_parameters():
        if type(weight.data) is torch.Tensor:
            check_finite(name, weight, source.path)
    return model.eval().requires_grad_(False)


def attempt(source: Source, make: Any) -> Any:
    """What `make` returns. InputError for whatever a wrong file makes transformers raise."""
    try:
        return make()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{source.path} cannot be opened ({type(error).__name__}: {one_line(reason(error), 300)})."
        ) from None


def config_of(source: Source, kind: str, **fields: Any) -> Any:
    """config.json as the config of a class of transformers, with some fields set."""
    import transformers

    given = {name: value for name, value in source.config.items() if name != "dtype"}
    with quiet():
        return attempt(source, lambda: getattr(transformers, kind).config_class.from_dict(given | fields))


def folder_of(source: Source) -> Path:
    """The folder that a checkpoint lies in."""
    return source.path if source.path.is_dir() else source.path.parent


def count(module: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


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
