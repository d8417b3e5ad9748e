"""LlamaGen's two conditions (arXiv 2406.06525, section 2.2): a class of ImageNet-1k in one slot, or a text in 120 slots.

The names of a class are the lemmas of its WordNet 3.0 synset; classes have their usual order. The encoder of flan-t5-xl computes
the features of a text, unless a file holds them.
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

from lanternpp.errors import InputError
from lanternpp.models.base import quoted, warn_of_prompt
from lanternpp.models.hub import quiet
from lanternpp.models.transformers.opening import TOKENIZER, check_loaded
from lanternpp.nn.checkpoints import CONFIG, read_safetensors
from lanternpp.nn.files import input_errors
from lanternpp.types import Prompt
from lanternpp.util.devices import inference
from lanternpp.util.jsonfile import read_object

CLASS_NAMES = Path(__file__).parent.parent / "assets" / "imagenet" / "classes.txt"
LEADING_WORDS = re.compile(r"^(?:(?:an?|the|photo|photograph|picture|image|of)\s+)+")
ENCODER = "google/flan-t5-xl"
FEATURES = "embeddings.safetensors"
MAX_TOKENS = 120  # of a text, that are read
MAX_CACHED_TEXTS = 64
ENCODER_DTYPES = {torch.float16: torch.bfloat16, torch.float64: torch.float32}  # T5 overflows in float16


@cache
def classes() -> dict[str, list[int]]:
    """Return the numbers of the classes by their lower-case names; some names are those of two classes."""
    numbers_by_name: dict[str, list[int]] = {}
    for number, line in enumerate(CLASS_NAMES.read_text(encoding="utf-8").splitlines()):
        for name in line.lower().split(", "):
            numbers_by_name.setdefault(name, []).append(number)
    return numbers_by_name


def class_of(prompt: str, num_classes: int = 1000) -> int:
    """Return the number of the class that a prompt names, by its number or one of its names ("golden retriever").

    Raise InputError for an unknown class, with similar names, and for a name of two classes.
    """
    words = " ".join(prompt.lower().split())
    if re.fullmatch(r"\d+", words):
        if int(words) >= num_classes:
            raise InputError(f"class {words} does not exist; this model knows 0 to {num_classes - 1}")
        return int(words)
    numbers_by_name = classes() if num_classes == 1000 else {}
    plain = LEADING_WORDS.sub("", words)
    for name in (words, plain, plain.removesuffix("s"), plain.removesuffix("es")):
        numbers = numbers_by_name.get(name, [])
        if len(numbers) == 1:
            return numbers[0]
        if numbers:
            listed = ", ".join(map(str, numbers))
            raise InputError(f"{name!r} names {len(numbers)} classes; give a number: {listed}")
    similar = difflib.get_close_matches(plain, numbers_by_name, 3)
    similar = similar or [name for name in numbers_by_name if plain and plain in name.split()][:3]
    hint = f"did you mean {' or '.join(map(repr, similar))}? " if similar else ""
    names = 'one of ImageNet\'s names, such as "golden retriever", or ' if numbers_by_name else ""
    raise InputError(
        f"class {quoted(prompt)} is unknown; {hint}this model draws {names}a number from 0 to {num_classes - 1}"
    )


class T5Text:
    """A source of the features of texts: the encoder of a T5 (arXiv 1910.10683), loaded with its tokenizer for the first text.

    encoder: a folder or a hub id. features_file: a safetensors file with the features [n, C] of texts, by
    text. The features of the last `max_cached` texts are cached.
    """

    def __init__(self, encoder: str | Path, features_file: Path | None = None):
        self.encoder_id, self.features_file = str(encoder), features_file
        self._encoder: Any = None
        self._tokenizer: Any = None
        self._cached: dict[str, Tensor] = {}
        self.max_cached = MAX_CACHED_TEXTS
        self._stored = {} if features_file is None else read_safetensors(features_file)

    def features(self, text: str, like: Tensor) -> Tensor:
        """Return [n, C], a row per token, on the device and in the dtype of `like`; raise InputError if no encoder can be loaded.

        The rows are those of the file, or the last hidden states of the cleaned text, at most `MAX_TOKENS`.
        """
        if text in self._stored:
            return self._stored[text].to(like)
        features = self._cached.pop(text, None)
        if features is None:
            features = self._encode(text, like)
        self._cached[text] = features
        if len(self._cached) > self.max_cached:
            del self._cached[next(iter(self._cached))]  # the least recently used
        return features.to(like)

    def _encode(self, text: str, like: Tensor) -> Tensor:
        self._load(like)
        text = clean(text)
        num_tokens = len(self._tokenizer(text, verbose=False).input_ids)
        if num_tokens > MAX_TOKENS:
            warn_of_prompt(f"the prompt has {num_tokens} tokens; this model reads the first {MAX_TOKENS}")
        inputs = self._tokenizer(text, max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
        with inference():
            states = self._encoder(input_ids=inputs.input_ids.to(like.device)).last_hidden_state[0]
        return states.clone()  # a clone made outside of inference mode is an ordinary tensor

    def release(self) -> None:
        """Free encoder and tokenizer; cached features stay."""
        self._encoder = self._tokenizer = None

    def save(self, folder: Path) -> list[str]:
        """Write the file of features, and the encoder if it is a folder; return the names of the written parts."""
        parts = []
        if self.features_file is not None:
            shutil.copyfile(self.features_file, folder / FEATURES)
            parts.append(FEATURES)
        if not Path(self.encoder_id).is_dir():
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

        folder = Path(self.encoder_id)
        if folder.is_dir() and not any((folder / name).is_file() for name in (TOKENIZER, "spiece.model")):
            raise InputError(
                f"the text encoder {self.encoder_id!r} has no {TOKENIZER} and no spiece.model: copy one there from {ENCODER}"
            )
        remedy = f"put the folder of {ENCODER} beside the model as text/, or the features of your prompts as {FEATURES}"
        with quiet(), input_errors(f"the text encoder {self.encoder_id!r} cannot be loaded", remedy):
            self._tokenizer = AutoTokenizer.from_pretrained(self.encoder_id, trust_remote_code=False)
            dtype = ENCODER_DTYPES.get(like.dtype, like.dtype)
            loaded: Any = T5EncoderModel.from_pretrained(
                self.encoder_id, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
        encoder, loading_info = loaded
        check_loaded(encoder, loading_info, self.encoder_id)
        self._encoder = encoder.eval().requires_grad_(False).to(like.device)


def find_text_encoder(folder: Path, config: Mapping[str, Any], encoder: Path | None = None) -> T5Text:
    """Return the source of a model's features of texts: `embeddings.safetensors` in its folder, and a text encoder.

    The encoder is the folder `encoder`, else that of a T5 in the model's folder, else the hub id `text` of the config, else
    flan-t5-xl. Raise InputError if the folder `encoder` holds no T5.
    """
    if encoder and not is_t5(encoder):
        raise InputError(f"{encoder} is no folder of a T5; name the one of {ENCODER}")
    encoders = [path for path in sorted(folder.iterdir()) if path.is_dir() and is_t5(path)]
    default = encoders[0] if encoders else str(config.get("text", ENCODER))
    features_file = folder / FEATURES
    return T5Text(encoder or default, features_file=features_file if features_file.is_file() else None)


def is_t5(folder: Path) -> bool:
    """Return whether a folder's config.json is that of a T5."""
    try:
        return read_object(folder / CONFIG).get("model_type") == "t5"
    except InputError:
        return False


def clean(text: str) -> str:
    """Return a text in the form of the captions in training: lower case, plain quotes and dashes, no markup."""
    text = html.unescape(html.unescape(unquote_plus(text))).lower()
    for pattern, replacement in CLEANING:
        text = re.sub(pattern, replacement, text)
    if len(re.findall(r"[-_]", text)) > 3:
        text = re.sub(r"[-_]", " ", text)
    return re.sub(r"^([\"'])(.+)\1$", r"\2", text.strip()).strip()


CLEANING = [
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
]


class ClassCondition(nn.Module):
    """A table of embeddings with a row per class; the last row is the null class."""

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.classes = classes
        self.table = nn.Embedding(classes + 1, dim)

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Return the embeddings of classes, given by name or number; raise InputError if a class does not exist."""
        ids = [self.classes if c is None else class_of(c, self.classes) for c in conditions]
        ids += [self.classes] * (len(ids) * (branches - 1))
        rows = torch.tensor(ids, device=self.table.weight.device)
        return Prompt(self.table(rows)[:, None], torch.zeros_like(rows))


class TextCondition(nn.Module):
    """The projected features of a text, padded on the left to all slots; a learned null prefix."""

    text: T5Text  # set by `LlamaGenTarget.read`

    def __init__(self, dim: int, caption_dim: int, slots: int):
        super().__init__()
        self.slots, self.caption_dim = slots, caption_dim
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.null = nn.Parameter(torch.empty(slots, caption_dim))

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Return the embeddings of texts. As in training, an unconditional row is padded like the text that it guides."""
        rows, start = [], []
        for condition in conditions:
            features = self.null if condition is None else self._features(condition)
            padding = self.slots - len(features)
            rows.append(F.pad(features, (0, 0, padding, 0)))
            start.append(padding)
        captions = torch.stack(rows)  # [b, slots, caption_dim]
        if branches == 2:
            captions = torch.cat((captions, self.null.expand_as(captions)))
            start *= 2
        embeds = self.fc2(F.gelu(self.fc1(captions), approximate="tanh"))
        return Prompt(embeds, torch.tensor(start, device=embeds.device))

    def _features(self, text: str) -> Tensor:
        """Return the features [n, caption_dim] of a text, n at most the slots; raise InputError if another encoder made them."""
        features = self.text.features(text, self.null)
        if features.shape[1:] != (self.caption_dim,) or not len(features):
            raise InputError(
                f"the features of {quoted(text)} have the shape {tuple(features.shape)}; this model reads "
                f"[1 to {self.slots}, {self.caption_dim}]: use those of the encoder it was trained with, {ENCODER}"
            )
        return features[: self.slots]
