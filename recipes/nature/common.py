"""Shared parts of the scripts: options, codes of pictures, and how a script ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App

from lanternpp.cli import main
from lanternpp.cli.options import writable_folder
from lanternpp.errors import InputError
from lanternpp.models.vq.autoencoder import Autoencoder, read_tokenizer
from lanternpp.nn.checkpoints import CONFIG
from lanternpp.training.codes import Codes
from lanternpp.training.options import Stored, TrainingOptions
from lanternpp.training.pictures import PictureCodes
from lanternpp.training.team import compute_dtype
from lanternpp.util.options import Option, declared

Data = Annotated[Path, Option("Imagefolder with train/ and val/, each with metadata.jsonl.", metavar="DIR")]
Model = Annotated[Path, Option("Model folder to write to.", metavar="DIR")]
Limit = Annotated[int | None, Option("Use only this many pictures of each split.", ge=1)]
Crops = Annotated[int, Option("Crops of each training picture, each also mirrored; encoded once.", ge=1)]
Cooldown = Annotated[float, Option("Last share of the budget, over which rates fall to zero.", gt=0, le=1)]


@dataclass(frozen=True)
class ClassifierTraining(TrainingOptions):
    """Its weights have 8 bits by default."""

    store: Annotated[Stored, declared(TrainingOptions)["store"]] = "int8"


def fraction(about: str, group: str = "") -> Option:
    """An option that is a share, below 1."""
    return Option(about, ge=0, le=0.999, group=group)


def tokenizer_of(model: Path) -> Path:
    """The tokenizer's folder; an error that names the script to run first where there is none yet."""
    folder = model / "tokenizer"
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder} holds no tokenizer: run recipes/nature/tokenizer.py --data DIR --model {model} first."
        )
    return folder


def read_codes(data: Path, model: Path, crops: int, device: torch.device, limit: int | None = None) -> Codes:
    """The codes of `data` under the tokenizer of `model`, from `model/codes` or encoded now into it."""
    dtype = compute_dtype(device)
    reader = read_tokenizer(tokenizer_of(model), dtype, kind=Autoencoder).to(device).reader()
    return PictureCodes(data, reader, model / "codes", crops, limit).build()


def script(stage: Callable[..., bool], args: list[str] | None = None) -> None:
    """Run a stage as a verb of lanternpp with the options on the command line, and exit; with 130 where it was stopped."""
    app = App(
        help=stage.__doc__,
        result_action="return_value",
        version_flags=[],
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
    )
    app.default(stage)
    main(args, lambda given: 130 if app(given) is False else 0)


def check_training(training: TrainingOptions, folder: Path) -> None:
    """InputError where a training has no budget, or cannot write to its folder."""
    training.check()
    writable_folder(folder)
