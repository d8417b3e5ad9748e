"""Models of the Hugging Face hub by id: fetched once, with a progress bar, then read from the cache.

A download that breaks is resumed; a run that is stopped keeps the files that were complete.

The cache, tokens and proxies are huggingface_hub's own (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lanternpp.errors import InputError, reason

SAFE, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".yaml")  # configs and tokenizers
VQ_FILE = re.compile(r"vq.*\.(safetensors|pt|pth|bin|ckpt)")
# Folders of a pipeline of diffusers: the model that draws codes, and its tokenizer.
STAGE, PROCESSOR = "vision_language_encoder", "processor"
TIMEOUT = 10.0  # seconds without an answer after which the hub counts as unreachable
FORM = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubId:
    """OWNER/NAME, perhaps a file of it, perhaps a branch, tag or commit: "owner/name/file.pt@main"."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        """The text that `hub_id` reads."""
        return (
            self.repo + (f"/{self.file}" if self.file else "") + (f"@{self.revision}" * bool(self.revision))
        )


def hub_id(text: str) -> HubId | None:
    """The id that a text spells, or None where it cannot be one."""
    found = FORM.fullmatch(text)
    if not found or any(part in (".", "..") for part in text.split("/")):
        return None
    return HubId(found["repo"], found["file"], found["revision"])


def fetch(source: HubId) -> Path:
    """The folder, or the file, of a hub id on this machine; missing files are fetched.

    Weights are fetched in one format, safetensors if there are any, together with configs and tokenizers. Image tokenizers
    in files of their own are fetched too; for a single file, only the one with the most similar name. Without a network,
    files fetched earlier are used. Raises InputError.
    """
    from huggingface_hub import snapshot_download

    quiet_downloads()
    try:
        files = choose(source, listing(source))
    except UnreachableError as error:
        return cached(source, error)
    try:
        folder = Path(snapshot_download(source.repo, revision=source.revision, allow_patterns=files))
    except Exception as error:  # as in `listing`, and a full disk
        raise InputError(
            f"{source} could not be fetched completely ({reason(error)}); run it again to go on"
        ) from None
    return folder / source.file if source.file else folder


def quiet_downloads() -> None:
    """Progress bars on a terminal alone, and no messages about attempts that are repeated."""
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()


class UnreachableError(Exception):
    """The hub did not answer."""


def listing(source: HubId) -> list[str]:
    """The files of a repository. Raises InputError where there is no such repository, UnreachableError without an answer."""
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().model_info(source.repo, revision=source.revision, timeout=TIMEOUT)
        return [file.rfilename for file in info.siblings or []]
    except errors.HFValidationError as error:
        why = f"{source} is not an id of the hub: {reason(error)}"
    except errors.GatedRepoError:
        why = f"{source.repo} asks for its terms to be accepted; accept them on its page, then log in: hf auth login"
    except errors.RepositoryNotFoundError:
        why = f"model {str(source)!r} is neither here nor on the hub; check the id, or log in if it is private: hf auth login"
    except errors.RevisionNotFoundError:
        why = f"{source.repo} has no revision {source.revision!r}; name a branch, tag or commit"
    except Exception as error:  # the errors of whichever HTTP client the hub's library uses
        raise UnreachableError(reason(error)) from None
    raise InputError(why)


def choose(source: HubId, files: Sequence[str]) -> list[str]:
    """The files of a repository to fetch. Raises InputError where it has no weights, or several to choose from."""
    if not source.file and any(name.startswith(f"{STAGE}/") for name in files):
        files = [
            name for name in files if name.split("/")[0] in (STAGE, PROCESSOR)
        ]  # the rest is its decoder's
    beside = [name for name in files if PurePosixPath(name).suffix in BESIDE]
    if source.file:
        if source.file not in files:
            weights_here = ", ".join(name for name in files if PurePosixPath(name).suffix in SAFE + PICKLED)
            raise InputError(
                f"{source.repo} holds no {source.file}; its weights are: {weights_here or 'none'}"
            )
        folder = PurePosixPath(source.file).parent
        near = [name for name in beside if PurePosixPath(name).parent == folder]
        return [source.file, *tokenizer_of(source.file, files), *near]
    for suffixes in (SAFE, PICKLED):
        weights = [name for name in files if PurePosixPath(name).suffix in suffixes]
        if not weights:
            continue
        targets = [name for name in weights if not is_vq(name)] or weights
        indexed = any(name.endswith(".index.json") for name in files)
        if suffixes == PICKLED and len(targets) > 1 and not indexed:
            named = ", ".join(weights[:10])
            raise InputError(
                f"{source.repo} holds several checkpoints ({named}); name one: {source.repo}/{targets[0]}"
            )
        return [*weights, *(name for name in files if is_vq(name) and name not in weights), *beside]
    raise InputError(f"{source.repo} holds no weights (.safetensors, .pt, .pth or .bin)")


def tokenizer_of(file: str, files: Sequence[str]) -> list[str]:
    """The image tokenizer in the folder of a checkpoint: the one whose name is most similar to the checkpoint's.

    Similar names share words: of vq_ds16_c2i.pt and vq_ds16_t2i.pt the second goes with t2i_XL_stage1_256.pt.
    """
    path = PurePosixPath(file)
    beside = [name for name in sorted(files) if is_vq(name) and PurePosixPath(name).parent == path.parent]
    if file in beside or not beside:
        return []
    return [max(beside, key=lambda name: len(words(name) & words(file)))]


def is_vq(file: str) -> bool:
    """Whether a file is an image tokenizer in a file of its own, by its name."""
    return VQ_FILE.fullmatch(PurePosixPath(file).name) is not None


def words(file: str) -> set[str]:
    """The words of a file's name."""
    return set(re.split(r"[\W_]+", PurePosixPath(file).stem))


def cached(source: HubId, why: UnreachableError) -> Path:
    """The folder or file that an earlier run fetched completely. Raises InputError where there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    for suffixes in (SAFE, PICKLED):
        patterns = [source.file] if source.file else [f"*{suffix}" for suffix in suffixes + BESIDE]
        try:
            folder = Path(
                snapshot_download(
                    source.repo, revision=source.revision, allow_patterns=patterns, local_files_only=True
                )
            )
        except (LocalEntryNotFoundError, IncompleteSnapshotError):
            continue
        if source.file and (folder / source.file).is_file():
            return folder / source.file
        if not source.file and any(path.suffix in suffixes for path in folder.rglob("*")):
            return folder
    raise InputError(
        f"{source} is not on this machine (neither a path nor complete in {HF_HUB_CACHE}) and the hub did not answer: {why}"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers: no warnings, and no progress bars where stderr is not a terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Published:
    """A model of the hub that can be read. Sizes are computed from numbers of parameters: 2 bytes each, 2 to 4 in a .pt."""

    name: str
    model: str  # what --model takes
    download: str
    drafter: str | None = None  # what --drafter takes; None: none is published
    needs: str = ""  # what else has to be given


LIST = Path(__file__).parent.parent / "assets" / "published.json"
PUBLISHED = tuple(Published(**row) for row in json.loads(LIST.read_text(encoding="utf-8")))
