"""Models of the Hugging Face hub by id: fetched once, with a progress bar, and read from the cache after.

A line that breaks is taken up where it broke; a run that was stopped keeps the files it had whole.

The cache, tokens and proxies are huggingface_hub's own (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lanternpp.errors import InputError

SAFE, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".yaml")  # configs and tokenizers
VQ_FILE = re.compile(r"vq.*\.(safetensors|pt|pth|bin|ckpt)")
PATIENCE = 10.0  # seconds until the hub counts as unreachable
FORM = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubId:
    """OWNER/NAME, perhaps a file of it, perhaps a branch, tag or commit: "owner/name/file.pt@main"."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        """As it is written."""
        return (
            self.repo
            + (f"/{self.file}" if self.file else "")
            + (f"@{self.revision}" if self.revision else "")
        )


def hub_id(text: str) -> HubId | None:
    """The id that a text spells, or None where it cannot be one."""
    found = FORM.fullmatch(text)
    if not found or any(part in (".", "..") for part in text.split("/")):
        return None
    return HubId(found["repo"], found["file"], found["revision"])


def fetch(wanted: HubId) -> Path:
    """The folder, or the file, of a hub id on this machine; what is missing is fetched.

    Only weights of one format come, safetensors where there are any, with the configs and tokenizers
    beside them, and image tokenizers that lie apart from their targets: beside a file, the one most like it
    in name. Without a network, what was fetched before serves. Raises InputError.
    """
    quiet()
    try:
        files = choose(wanted, listing(wanted))
    except UnreachableError as error:
        return cached(wanted, error)
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(wanted.repo, revision=wanted.revision, allow_patterns=files))
    except Exception as error:  # as in `listing`, and a full disk
        raise InputError(
            f"{wanted} could not be fetched whole ({first_line(error)}); run it again to go on"
        ) from None
    return folder / wanted.file if wanted.file else folder


def quiet() -> None:
    """Progress bars on a terminal only, and no word of single attempts that failed."""
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()


class UnreachableError(Exception):
    """The hub did not answer."""


def listing(wanted: HubId) -> list[str]:
    """The files of a repository. Raises InputError where the hub has no such thing, UnreachableError without an answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(wanted.repo, revision=wanted.revision, timeout=PATIENCE)
        return [file.rfilename for file in info.siblings or []]
    except GatedRepoError:
        raise InputError(
            f"{wanted.repo} asks for its terms to be accepted; accept them on its page, then log in: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"model {str(wanted)!r} is neither here nor on the hub; check the id, or log in if it is private: hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise InputError(
            f"{wanted.repo} has no revision {wanted.revision!r}; name a branch, tag or commit"
        ) from None
    except HFValidationError as error:
        raise InputError(f"{wanted} is no id of the hub: {first_line(error)}") from None
    except Exception as error:  # the errors of whichever HTTP client the hub's library uses
        raise UnreachableError(first_line(error)) from None


def choose(wanted: HubId, files: Sequence[str]) -> list[str]:
    """What to fetch of a repository's files. Raises InputError where that is nothing, or not clear."""
    beside = [name for name in files if PurePosixPath(name).suffix in BESIDE]
    if wanted.file:
        if wanted.file not in files:
            held = ", ".join(name for name in files if PurePosixPath(name).suffix in SAFE + PICKLED)
            raise InputError(f"{wanted.repo} holds no {wanted.file}; its weights are: {held or 'none'}")
        folder = PurePosixPath(wanted.file).parent
        near = [name for name in beside if PurePosixPath(name).parent == folder]
        return [wanted.file, *tokenizer_of(wanted.file, files), *near]
    for suffixes in (SAFE, PICKLED):
        weights = [name for name in files if PurePosixPath(name).suffix in suffixes]
        if not weights:
            continue
        targets = [name for name in weights if not is_vq(name)] or weights
        indexed = any(name.endswith(".index.json") for name in files)
        if suffixes == PICKLED and len(targets) > 1 and not indexed:
            named = ", ".join(weights[:10])
            raise InputError(
                f"{wanted.repo} holds several checkpoints ({named}); name one: {wanted.repo}/{targets[0]}"
            )
        return [*weights, *(name for name in files if is_vq(name) and name not in weights), *beside]
    raise InputError(f"{wanted.repo} holds no weights (.safetensors, .pt, .pth or .bin)")


def tokenizer_of(file: str, files: Sequence[str]) -> list[str]:
    """The image tokenizer that lies beside a checkpoint: of those there, the one whose name is most like its own.

    Like names share words: of vq_ds16_c2i.pt and vq_ds16_t2i.pt the second goes with t2i_XL_stage1_256.pt.
    """
    path = PurePosixPath(file)
    beside = [name for name in sorted(files) if is_vq(name) and PurePosixPath(name).parent == path.parent]
    if file in beside or not beside:
        return []
    return [max(beside, key=lambda name: len(words(name) & words(file)))]


def is_vq(file: str) -> bool:
    """Whether a file is an image tokenizer apart from its target, by its name."""
    return VQ_FILE.fullmatch(PurePosixPath(file).name) is not None


def words(file: str) -> set[str]:
    """The words of a file's name."""
    return set(re.split(r"[\W_]+", PurePosixPath(file).stem))


def cached(wanted: HubId, why: UnreachableError) -> Path:
    """What an earlier run fetched whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    for suffixes in (SAFE, PICKLED):
        patterns = [wanted.file] if wanted.file else [f"*{suffix}" for suffix in suffixes + BESIDE]
        try:
            folder = Path(
                snapshot_download(
                    wanted.repo, revision=wanted.revision, allow_patterns=patterns, local_files_only=True
                )
            )
        except (LocalEntryNotFoundError, IncompleteSnapshotError):
            continue
        if wanted.file and (folder / wanted.file).is_file():
            return folder / wanted.file
        if not wanted.file and any(path.suffix in suffixes for path in folder.rglob("*")):
            return folder
    raise InputError(
        f"{wanted} is not on this machine (neither a path nor whole in {HF_HUB_CACHE}) and the hub did not answer: {why}"
    )


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
