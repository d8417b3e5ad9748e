"""LlamaGen's two conditions (arXiv 2406.06525, section 2.2): one slot of a class of ImageNet-1k, or 120 of a text.

Classes have the lemmas of their WordNet 3.0 synsets as names, in the usual order. Features of a text are those of flan-t5-xl's
encoder, or of a file.
"""

from __future__ import annotations

import difflib
import html
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError, reason
from lanternpp.models.base import quoted, warn_of_prompt
from lanternpp.models.hub import quiet
from lanternpp.models.transformers.opening import TOKENIZER, check_loaded
from lanternpp.nn.checkpoints import CONFIG, read_safetensors
from lanternpp.types import Prompt
from lanternpp.util.devices import inference
from lanternpp.util.jsonfile import read_object

NAMES = Path(__file__).parent.parent / "assets" / "imagenet" / "classes.txt"
FILLING = re.compile(r"^(?:(?:an?|the|photo|photograph|picture|image|of)\s+)+")
ENCODER = "google/flan-t5-xl"
FEATURES = "embeddings.safetensors"
KEPT = 64  # texts whose features are remembered
RUNS_IN = {torch.float16: torch.bfloat16, torch.float64: torch.float32}  # T5 overflows in float16


@cache
def classes() -> dict[str, list[int]]:
    """Lower-case names -> the classes of that name, sometimes two."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(NAMES.read_text(encoding="utf-8").splitlines()):
        for name in line.lower().split(", "):
            found.setdefault(name, []).append(number)
    return found


def class_of(prompt: str, count: int = 1000) -> int:
    """The class of a prompt: its number below `count`, or one of its names ("golden retriever").

    Raises InputError for an unknown class, naming near ones, and for a name that two classes share.
    """
    words = " ".join(prompt.lower().split())
    if re.fullmatch(r"\d+", words):
        if int(words) >= count:
            raise InputError(f"class {words} does not exist; this model knows 0 to {count - 1}")
        return int(words)
    names = classes() if count == 1000 else {}
    plain = FILLING.sub("", words)
    for name in (words, plain, plain.removesuffix("s"), plain.removesuffix("es")):
        if len(names.get(name, ())) == 1:
            return names[name][0]
        if name in names:
            raise InputError(
                f"{name!r} names {len(names[name])} classes; give a number: {', '.join(map(str, names[name]))}"
            )
    near = difflib.get_close_matches(plain, names, 3)
    near = near or [name for name in names if plain and plain in name.split()][:3]
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    known = 'one of ImageNet\'s names, such as "golden retriever", or ' if names else ""
    raise InputError(
        f"class {quoted(prompt)} is unknown; {hint}this model draws {known}a number from 0 to {count - 1}"
    )


class T5Text:
    """The features of texts: the encoder of a T5 (arXiv 1910.10683), loaded with its tokenizer when the first text arrives.

    where: a folder or a hub id. stored: a safetensors file with the features [n, C] of some texts, by their texts. The last
    features are remembered.
    """

    def __init__(self, where: str | Path, tokens: int = 120, stored: Path | None = None):
        self.where, self.tokens, self.stored = str(where), tokens, stored
        self._encoder: Any = None
        self._tokenizer: Any = None
        self._known: dict[str, Tensor] = {}
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
        found = self._known.pop(text, None)
        self._known[text] = found = self._encoded(text, like) if found is None else found
        # the least recently used one goes
        if len(self._known) > self._kept:
            del self._known[next(iter(self._known))]
        return found.to(like)

    def _encoded(self, text: str, like: Tensor) -> Tensor:
        self._load(like)
        plain = clean(text)
        count = len(self._tokenizer(plain, verbose=False).input_ids)
        if count > self.tokens:
            warn_of_prompt(f"the prompt has {count} tokens; this model reads the first {self.tokens}")
        ids = self._tokenizer(plain, max_length=self.tokens, truncation=True, return_tensors="pt").input_ids
        with inference():
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

        place = Path(self.where)
        if place.is_dir() and not any((place / name).is_file() for name in (TOKENIZER, "spiece.model")):
            raise InputError(
                f"the text encoder {self.where!r} has no {TOKENIZER} and no spiece.model: copy one there from {ENCODER}"
            )
        try:
            with quiet():
                self._tokenizer = AutoTokenizer.from_pretrained(self.where, trust_remote_code=False)
                kind = RUNS_IN.get(like.dtype, like.dtype)
                loaded: Any = T5EncoderModel.from_pretrained(
                    self.where, dtype=kind, trust_remote_code=False, output_loading_info=True
                )
        except Exception as error:  # a damaged file makes the library raise anything
            raise InputError(
                f"the text encoder {self.where!r} cannot be loaded ({reason(error)}); put the folder of {ENCODER} "
                f"beside the model as text/, or the features of your prompts as {FEATURES}"
            ) from None
        encoder, found = loaded
        check_loaded(encoder, found, self.where)
        self._encoder = encoder.eval().requires_grad_(False).to(like.device)


def text_of(folder: Path, config: Mapping[str, Any], given: Path | None = None) -> T5Text:
    """The source of a model's features of texts.

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
        (r"([^\d\W][,.])(?=\w)", r"\1 "),  # a space after a comma or a stop within words
        (r"\s+", " "),
    )
]


class ClassCondition(nn.Module):
    """A row of a table; the last is the null class."""

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.classes = classes
        self.table = nn.Embedding(classes + 1, dim)

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Classes by name or number; raises InputError for one that does not exist."""
        ids = [self.classes if c is None else class_of(c, self.classes) for c in conditions]
        ids += [self.classes] * (len(ids) * (branches - 1))
        rows = torch.tensor(ids, device=self.table.weight.device)
        return Prompt(self.table(rows)[:, None], torch.zeros_like(rows))


class TextCondition(nn.Module):
    """The features of a text, projected, after as much padding as the slots leave; a learned null prefix."""

    text: T5Text  # set where it is read

    def __init__(self, dim: int, caption_dim: int, slots: int):
        super().__init__()
        self.slots, self.caption_dim = slots, caption_dim
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.null = nn.Parameter(torch.empty(slots, caption_dim))

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Texts -> their slots. A null row is padded as its text is: so were the models trained to be guided."""
        rows, start = [], []
        for condition in conditions:
            features = self.null if condition is None else self._features(condition)
            start.append(self.slots - len(features))
            rows.append(F.pad(features, (0, 0, start[-1], 0)))
        given = torch.stack(rows)
        if branches == 2:
            given, start = torch.cat((given, self.null.expand_as(given))), start * 2
        embeds = self.fc2(F.gelu(self.fc1(given), approximate="tanh"))
        return Prompt(embeds, torch.tensor(start, device=embeds.device))

    def _features(self, text: str) -> Tensor:
        """[n, caption_dim] of a text; n at most the slots."""
        features = self.text.features(text, self.null)
        if features.shape[1] != self.caption_dim or not len(features):
            raise InputError(
                f"the text encoder gives features of shape {tuple(features.shape)}; this model reads "
                f"[1 to {self.slots}, {self.caption_dim}]: use the encoder it was trained with, google/flan-t5-xl"
            )
        return features[: self.slots]
