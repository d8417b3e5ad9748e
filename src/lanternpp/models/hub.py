"""Models of the Hugging Face hub by id: fetched once, with a progress bar, then read from the cache.

A broken download is resumed; a stopped run keeps its complete files. huggingface_hub's own variables set the cache, tokens and
proxies (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from lanternpp.errors import InputError, reason
from lanternpp.nn.files import STATES
from lanternpp.util.terminal import on_terminal

SAFE, PICKLED = (".safetensors",), (".pt", ".pth", ".bin", ".ckpt")
CONFIG_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".yaml")  # also of tokenizers
VQ_FILE = re.compile(r"vq.*\.(safetensors|pt|pth|bin|ckpt)")
# Folders of a diffusers pipeline: the model that draws codes, and its tokenizer.
STAGE, PROCESSOR = "vision_language_encoder", "processor"
# Repositories in layouts of their authors, which are not read, and the copies that are.
COPIES = {
    "deepseek-ai/Janus-Pro-1B": "deepseek-community/Janus-Pro-1B",
    "deepseek-ai/Janus-Pro-7B": "deepseek-community/Janus-Pro-7B",
    "BAAI/Emu3-Gen": "BAAI/Emu3-Gen-hf",
    "GAIR/Anole-7b-v0.1": "leloy/Anole-7b-v0.1-hf",
}
TIMEOUT = 10.0  # seconds without an answer after which the hub counts as unreachable
ID_PATTERN = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubId:
    """A repository OWNER/NAME, with or without a file and a branch, tag or commit: "owner/name/file.pt@main"."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        """Return the text from which `hub_id` makes this id."""
        file = f"/{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + file + revision


def hub_id(text: str) -> HubId | None:
    """Parse a hub id; return None if the text is no id."""
    match = ID_PATTERN.fullmatch(text)
    if not match or any(part in (".", "..") for part in text.split("/")):
        return None
    return HubId(match["repo"], match["file"], match["revision"])


def fetch(source: HubId) -> Path:
    """Fetch the missing files of a hub id and return its folder, or its file, on this machine.

    Weights are fetched in one format, safetensors if there are any, together with configs and tokenizers, and with all image
    tokenizers in separate files; for a single file, with the image tokenizer of the most similar name. Without a network,
    the files of an earlier run are returned. Raise InputError if neither is possible.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    if source.repo in COPIES and not source.file:
        raise InputError(f"{source.repo} has a layout that is not read: use {COPIES[source.repo]}")
    quiet_downloads()
    try:
        files = choose(source, list_files(source))
    except UnreachableError as error:
        if path := cached(source):
            return path
        raise InputError(
            f"{source} is not on this machine (neither a path nor complete in {HF_HUB_CACHE}) and the hub did not answer: {error}"
        ) from None
    try:
        folder = Path(snapshot_download(source.repo, revision=source.revision, allow_patterns=files))
    except Exception as error:  # also the error of a full disk
        raise InputError(
            f"{source} could not be fetched completely ({reason(error)}); run it again to go on"
        ) from None
    return folder / (source.file or "")


def quiet_downloads() -> None:
    """Show progress bars on a terminal alone, and no messages about repeated attempts."""
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not on_terminal():
        disable_progress_bars()


class UnreachableError(Exception):
    """The hub did not answer."""


def list_files(source: HubId) -> list[str]:
    """List a repository's files. Raise InputError if there is no such repository, UnreachableError if the hub does not answer."""
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().model_info(source.repo, revision=source.revision, timeout=TIMEOUT)
        return [file.rfilename for file in info.siblings or []]
    except errors.HFValidationError as error:
        message = f"{source} is not an id of the hub: {reason(error)}"
    except errors.GatedRepoError:
        message = f"{source.repo} asks for its terms to be accepted; accept them on its page, then log in: hf auth login"
    except errors.RepositoryNotFoundError:
        message = f"model {str(source)!r} is neither here nor on the hub; check the id, or log in if it is private: hf auth login"
    except errors.RevisionNotFoundError:
        message = f"{source.repo} has no revision {source.revision!r}; name a branch, tag or commit"
    except Exception as error:  # an error of any HTTP client that huggingface_hub may use
        raise UnreachableError(reason(error)) from None
    raise InputError(message)


def choose(source: HubId, files: Sequence[str]) -> list[str]:
    """Return the files of a repository to fetch. Raise InputError if it has no weights, or several checkpoints."""
    if not source.file and any(name.startswith(f"{STAGE}/") for name in files):
        # The other folders of a pipeline hold its diffusion decoder, which draws no codes.
        files = [name for name in files if name.split("/")[0] in (STAGE, PROCESSOR)]
    configs = [name for name in files if PurePosixPath(name).suffix in CONFIG_SUFFIXES]
    if source.file:
        if source.file not in files:
            weights = [name for name in files if PurePosixPath(name).suffix in SAFE + PICKLED]
            raise InputError(
                f"{source.repo} holds no {source.file}; its weights are: {', '.join(weights) or 'none'}"
            )
        folder = PurePosixPath(source.file).parent
        configs = [name for name in configs if PurePosixPath(name).parent == folder]
        return [source.file, *tokenizer_of(source.file, files), *configs]
    models = [path for path in map(PurePosixPath, files) if path.name not in STATES]
    for suffixes in (SAFE, PICKLED):
        weights = [str(path) for path in models if path.suffix in suffixes]
        if not weights:
            continue
        targets = [name for name in weights if not is_vq(name)] or weights
        indexed = any(name.endswith(".index.json") for name in files)
        if suffixes == PICKLED and len(targets) > 1 and not indexed:
            names = ", ".join(weights[:10])
            raise InputError(
                f"{source.repo} holds several checkpoints ({names}); name one: {source.repo}/{targets[0]}"
            )
        tokenizers = [name for name in files if is_vq(name) and name not in weights]
        return [*weights, *tokenizers, *configs]
    raise InputError(f"{source.repo} holds no weights (.safetensors, .pt, .pth, .bin or .ckpt)")


def tokenizer_of(file: str, files: Sequence[str]) -> list[str]:
    """Return the image tokenizer in a checkpoint's folder whose name shares the most words with the checkpoint's, as a list.

    For t2i_XL_stage1_256.pt this is vq_ds16_t2i.pt, not vq_ds16_c2i.pt. A checkpoint that is a tokenizer itself needs none: [].
    """
    folder = PurePosixPath(file).parent
    tokenizers = [name for name in sorted(files) if is_vq(name) and PurePosixPath(name).parent == folder]
    if file in tokenizers or not tokenizers:
        return []
    return [max(tokenizers, key=lambda name: len(words(name) & words(file)))]


def is_vq(file: str) -> bool:
    """Return whether a file holds an image tokenizer alone, by its name."""
    return VQ_FILE.fullmatch(PurePosixPath(file).name) is not None


def words(file: str) -> set[str]:
    """Return the words of a file's name."""
    return set(re.split(r"[\W_]+", PurePosixPath(file).stem))


def cached(source: HubId) -> Path | None:
    """Return the folder or file that an earlier run fetched completely, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    find = partial(snapshot_download, source.repo, revision=source.revision, local_files_only=True)
    for suffixes in (SAFE, PICKLED):
        patterns = [source.file] if source.file else [f"*{suffix}" for suffix in suffixes + CONFIG_SUFFIXES]
        with suppress(LocalEntryNotFoundError, IncompleteSnapshotError):
            folder = Path(find(allow_patterns=patterns))
            path = folder / (source.file or "")
            if path.is_file() or any(p.suffix in suffixes for p in path.rglob("*")):
                return path
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers: no warnings, and no progress bars unless stderr is a terminal."""
    from transformers.utils import logging

    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not on_terminal():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()
