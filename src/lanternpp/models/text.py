"""Features of texts for targets that were trained on them: flan-t5-xl's encoder, or a file of its features."""

from __future__ import annotations

import html
import pickle
import re
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.base import warn_of_prompt
from lanternpp.nn.checkpoints import CONFIG, read_safetensors
from lanternpp.util.jsonfile import read_object

ENCODER = "google/flan-t5-xl"
FEATURES = "embeddings.safetensors"
KEPT = 64  # texts whose features are remembered
RUNS_IN = {torch.float16: torch.bfloat16, torch.float64: torch.float32}  # T5 overflows in float16


class T5Text:
    """The features of texts: the encoder of a T5 (arXiv 1910.10683), loaded with its tokenizer when the first text arrives.

    where: a folder or a hub id. stored: a safetensors file with the features [n, C] of some texts, by their texts. The last
    features are remembered.
    """

    def __init__(self, where: str | Path, tokens: int = 120, stored: Path | None = None):
        self.where, self.tokens, self.stored = str(where), tokens, stored
        self._encoder: Any = None
        self._tokenizer: Any = None
        self._known: OrderedDict[str, Tensor] = OrderedDict()
        self._kept = KEPT
        self._rows = {} if stored is None else read_safetensors(stored)
        for text, rows in self._rows.items():
            if rows.ndim != 2 or not rows.is_floating_point():
                raise InputError(
                    f"{stored}: the features of {text[:40]!r} are no rows of numbers, one for each token"
                )

    def features(self, text: str, like: Tensor) -> Tensor:
        """[n, C], one row per token, on the device and in the dtype of `like`; InputError where there are none.

        Those of the file, or the last hidden states of the cleaned text, at most `tokens` of them.
        """
        if text in self._rows:
            return self._rows[text].to(like)
        if text in self._known:
            self._known.move_to_end(text)
        else:
            self._load(like)
            self._known[text] = self._encoded(text, like)
            if len(self._known) > self._kept:
                # the least recently used one
                self._known.popitem(last=False)
        return self._known[text].to(like)

    def _encoded(self, text: str, like: Tensor) -> Tensor:
        plain = clean(text)
        count = len(self._tokenizer(plain, verbose=False).input_ids)
        if count > self.tokens:
            warn_of_prompt(f"the prompt has {count} tokens; this model reads the first {self.tokens}")
        ids = self._tokenizer(plain, max_length=self.tokens, truncation=True, return_tensors="pt").input_ids
        with torch.inference_mode():
            states = self._encoder(input_ids=ids.to(like.device)).last_hidden_state[0]
        return states.clone()

    def release(self) -> None:
        """Free encoder and tokenizer; cached features stay."""
        self._encoder = self._tokenizer = None

    def cache_texts(self, texts: int) -> None:
        """Cache so many more than `KEPT`."""
        self._kept += texts

    def save(self, folder: Path) -> list[str]:
        """Write the file of features, and the encoder, without a T5's decoder, where it lies on this machine; the parts written."""
        parts = []
        if self.stored is not None:
            shutil.copyfile(self.stored, folder / FEATURES)
            parts.append(FEATURES)
        if not Path(self.where).is_dir():
            return parts
        self._load(torch.empty(0, dtype=torch.bfloat16))
        with quiet():
            self._encoder.save_pretrained(folder / "text")
            self._tokenizer.save_pretrained(folder / "text")
        return [*parts, "text"]

    def _load(self, like: Tensor) -> None:
        if self._encoder is not None:
            return
        from transformers import AutoTokenizer, T5EncoderModel

        try:
            with quiet():
                self._tokenizer = AutoTokenizer.from_pretrained(self.where, trust_remote_code=False)
                encoder = T5EncoderModel.from_pretrained(
                    self.where, dtype=RUNS_IN.get(like.dtype, like.dtype), trust_remote_code=False
                )
        except Exception as error:  # a damaged file makes the library raise anything
            raise InputError(
                f"the text encoder {self.where!r} cannot be loaded ({reason(error)}); put the folder of {ENCODER} "
                f"beside the model as text/, or the features of your prompts as {FEATURES}"
            ) from None
        self._encoder = encoder.eval().requires_grad_(False).to(like.device)


def reason(error: BaseException) -> str:
    """The first line of a library's error; advice to let a file run code is not repeated."""
    first = next(iter(str(error).strip().splitlines()), "")
    if (
        isinstance(error, pickle.UnpicklingError)
        or "weights_only" in str(error)
        or "trust_remote_code" in str(error)
    ):
        return "a file of it is damaged, or would run code"
    return first or type(error).__name__


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


def text_of(folder: Path, config: Mapping[str, Any], given: Path | None = None) -> T5Text:
    """Where a model's features of texts come from.

    `embeddings.safetensors` in its folder, then the folder of a T5 that is given or lies in it, then the hub
    id that its config gives as `text`, then flan-t5-xl. InputError where what is given is no T5.
    """
    if given and not is_t5(given):
        raise InputError(f"{given} is no folder of a T5; name the one of {ENCODER}")
    here = [path for path in sorted(folder.iterdir()) if path.is_dir() and is_t5(path)]
    stored = folder / FEATURES
    where = given or (here[0] if here else str(config.get("text", ENCODER)))
    return T5Text(where, stored=stored if stored.is_file() else None)


def is_t5(folder: Path) -> bool:
    """Whether a folder's config.json is a T5's."""
    try:
        return read_object(folder / CONFIG).get("model_type") == "t5"
    except InputError:
        return False


def clean(text: str) -> str:
    """A text in the form that the captions of training had: lower case, plain quotes and dashes, no markup."""
    text = html.unescape(html.unescape(unquote_plus(text))).lower()
    for pattern, plain in CLEANING:
        text = pattern.sub(plain, text)
    if len(re.findall(r"[-_]", text)) > 3:
        text = re.sub(r"[-_]", " ", text)
    return re.sub(r"^([\"'])(.+)\1$", r"\2", text.strip()).strip()


CLEANING = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"<person>", "person"),
        (r"https?:\S+|www\.\S+", ""),  # addresses
        (r"<[^<>]+>", ""),  # markup
        (r"@\w+", ""),  # names of accounts
        (r"\S+\.(?:png|jpe?g|bmp|webp|eps|pdf|apk|mp4)\b", ""),  # names of files
        (r"\b\d+\.?\d*[x\u00d7]\d+\.?\d*\b", ""),  # sizes
        (r"[\u2010-\u2015\u2212]", "-"),
        (r"[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
        (r"[\u2018\u2019]", "'"),
        (r'["\']{2,}', '"'),
        (r"\.{2,}", " "),
        (r"[#\u00ae\u2022\u00a9\u2122&\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()\[\]{}|\\/*]+", " "),
        (r"([^\d\W][,.])(?=\w)", r"\1 "),  # a space behind a comma or a stop within words
        (r"\s+", " "),
    )
]
