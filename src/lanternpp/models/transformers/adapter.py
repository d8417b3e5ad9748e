"""The base of all adapters: a `Target` on the modules of a model of transformers, where its weights lie."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target, quoted
from lanternpp.models.text import quiet
from lanternpp.models.transformers.call import MODE, Call, token_rows
from lanternpp.models.transformers.decoder import TransformersDecoder
from lanternpp.models.transformers.format import Format, Raster
from lanternpp.models.transformers.opening import Text, config_of, folder_of, opened
from lanternpp.models.vq.reading import Reader
from lanternpp.nn.backend import backend
from lanternpp.nn.sources import Source
from lanternpp.nn.stores import Store
from lanternpp.types import Prompt

SLOTS = 512  # the longest prompt of `Pipeline`, unless the model's own positions end before
STRIDE = 32  # prompts are padded to a multiple of this, so that few shapes are compiled


class TransformersTarget(Target):
    """A model's decoder layers, embeddings and head, as they lie in memory.

    codes: the token of every code, in the order of the image tokenizer. extras: further tokens that pictures usually have, such
    as a row end. Prompts are texts for a model that `read` opened, and the numbers of a call's prompts for one of the user's.
    """

    class_name: ClassVar[str]  # in transformers
    model_type: ClassVar[str]
    guidance: ClassVar[float] = 1.0  # of a call of `generate` that names none
    lacking: ClassVar[tuple[str, ...]] = ()  # beginnings of tensors' names that a checkpoint may lack
    unused: ClassVar[tuple[str, ...]] = ()  # modules that no picture needs
    decoder: TransformersDecoder
    raster: Raster | None = None  # of a model that `read` opened
    text: Text
    packing: str | None = None  # the dtype in which `pack` gives weights to the kernels

    def __init__(
        self,
        model: Any,
        body: Any,
        codes: Sequence[int],
        extras: Sequence[int] = (),
        qk_norm: bool = False,
        positions: Callable[[Tensor], Tensor] = lambda position: position,
    ):
        super().__init__()
        self.tokens: nn.Module = model.get_input_embeddings()  # first: `next(parameters())` is its weight
        self.model = model
        self.decoder = TransformersDecoder(body, qk_norm, positions)
        self.most = int(body.config.max_position_embeddings)
        self.codes = tuple(codes)
        self.row_end = extras[0] if extras else -1
        self.prompts: Sequence[Prompt] = ()
        self._slots, self.length = 0, 0
        self.arrange(Format.plain(1), 0, (), extras)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """transformers' model type."""
        return cls.model_type in source.kinds

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The model in `source`, opened by its own class; its tokenizer lies beside it."""
        target = cls.opened(source, dtype)
        target.text = target.text_of(folder_of(source))
        target.draw_size(source, source.given.get("size"))
        target.packing = source.packing
        return target.to(device).eval().requires_grad_(False)

    @classmethod
    def opened(cls, source: Source, dtype: torch.dtype) -> Self:
        """The adapter of the model in `source`."""
        make: Callable[[Any], Self] = cls
        return make(opened(source, cls.class_name, config_of(source, cls.class_name), dtype, cls.lacking))

    @staticmethod
    def text_of(folder: Path) -> Text:
        """The tokenizer of prompts."""
        return Text(folder)

    def draw_size(self, source: Source, size: object) -> None:
        """Draw from texts, pictures of a size in pixels; None: that of the checkpoint. InputError where they do not fit."""
        self.raster = raster = self.raster_of(source, None if size is None else str(size))
        room = self.most - raster.length
        if room < 1:
            raise InputError(
                f"{raster.columns}x{raster.rows} codes do not fit the model's {self.most} positions; choose a smaller size"
            )
        self.arrange(raster.format(self.codes, self.row_end), min(SLOTS, room))
        self.decoder.prepare(self._slots + self.length)

    @abstractmethod
    def raster_of(self, source: Source, size: str | None) -> Raster:
        """The codes of a picture of so many pixels; None: of the size that the checkpoint says. InputError."""

    @abstractmethod
    def conditional(self, text: str) -> list[int]:
        """The tokens of a prompt, up to where the first code is drawn."""

    @abstractmethod
    def unconditional(self, text: str | None) -> list[int]:
        """The tokens of the unconditional branch of guidance, for a prompt or None."""

    @property
    @abstractmethod
    def latents(self) -> Tensor:
        """[codes, C] the latent vector of every code of the image."""

    @abstractmethod
    def decoded(self, grid: Tensor) -> Tensor:
        """Codes [B, rows, columns] -> images [B, 3, H, W], by the model's own VQ decoder."""

    @property
    def vq(self) -> Any:
        """The image tokenizer."""
        return self.model.model.vqmodel

    def encoder(self) -> nn.Module | None:
        """Images [B, 3, H, W] -> latents [B, C, rows, columns]; None where the checkpoint has none."""
        return nn.Sequential(self.vq.encoder, self.vq.quant_conv)

    @property
    def device(self) -> torch.device:
        """Where its embeddings are."""
        return next(self.tokens.parameters()).device

    def arrange(
        self,
        format: Format,
        slots: int,
        prompts: Sequence[Prompt] = (),
        extras: Sequence[int] | None = None,
    ) -> bool:
        """Set what is drawn from now on; whether engines made before are of other sizes.

        prompts: those that conditions name, by their number. slots: the most slots of one.
        """
        ids = (*self.codes, *(format.extras if extras is None else extras))
        before = (self._slots, self.length, getattr(self, "width", 0), getattr(self, "ids", ()))
        self.prompts, self._slots, self.ids = prompts, slots, ids
        self.length, self.width, self.vocab = format.length, format.width, len(ids)
        self._code_ids = torch.tensor(ids, device=self.device)
        self._allowed = self._kinds = None
        if format.kinds:
            sets = [sorted(tokens) for tokens in format.sets]
            rows = [torch.isin(self._code_ids, torch.tensor(s, device=self.device)) for s in sets]
            self._allowed = torch.stack(rows)  # [kinds, V]
            self._kinds = torch.tensor(format.kinds, device=self.device)
        return before != (slots, self.length, self.width, ids)

    @property
    def slots(self) -> int:
        """The most prompt slots T."""
        return self._slots

    @property
    def stride(self) -> int:
        """Prompts of texts are padded to a multiple of it."""
        return STRIDE

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Texts -> [branches * b, T, D], padded on the left; of a call, the prompt that one condition numbers.

        InputError where a text is too long.
        """
        if self.raster is None:
            (condition,) = conditions
            return self.prompts[int(condition or 0)]
        rows = [self._tokens(condition) for condition in conditions]
        if branches == 2:
            rows += [self.unconditional(condition) for condition in conditions]
        return Prompt(
            *self._embedded(rows, min(-(-max(map(len, rows)) // self.stride) * self.stride, self.slots))
        )

    def check(self, condition: str | None) -> None:
        """Its tokens alone."""
        self._tokens(condition)

    def encode(self, rows: Sequence[Sequence[int]], branches: int) -> tuple[list[Prompt], int]:
        """Rows of tokens, all conditional ones first, as a prompt per sample, all padded to the same number of slots."""
        embeds, start = self._embedded(rows, -(-max(map(len, rows)) // STRIDE) * STRIDE)
        count = len(rows) // branches
        picks = [torch.arange(branches, device=self.device) * count + sample for sample in range(count)]
        return [Prompt(embeds[pick], start[pick]) for pick in picks], embeds.shape[1]

    def _tokens(self, condition: str | None) -> list[int]:
        """Those of a text; InputError where they are too many, or of another model's tokenizer."""
        row = self.unconditional(None) if condition is None else self.conditional(condition)
        known = next(self.tokens.parameters()).shape[0]
        if max(row) >= known:
            raise InputError(
                f"{self.text.path} has token {max(row)} and its model knows {known}: it is another model's tokenizer."
            )
        if len(row) > self.slots:
            raise InputError(
                f"prompt {quoted(condition or '', 40)} takes {len(row)} slots and there are {self.slots}; shorten it"
            )
        return row

    def _embedded(self, rows: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
        """Tokens as ([R, width, D], start [R]); padding on the left is token 0, never attended to."""
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=self.device)
        return self.tokens(ids), torch.tensor([width - len(row) for row in rows], device=self.device)

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """-inf at codes that the format forbids at places `index` [B, N]."""
        if self._allowed is None or self._kinds is None:
            return logits
        return logits.masked_fill(~self._allowed[self._kinds[index]], float("-inf"))

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D], as tokens are embedded."""
        embedded: Tensor = self.tokens(self.token_ids(codes))
        return embedded

    def token_ids(self, codes: Tensor) -> Tensor:
        """The tokens of codes, of any shape."""
        return self._code_ids[codes]

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]; InputError where a call of `generate` draws."""
        if self.raster is None:
            raise InputError(
                "pixels are made by the transformers model, from the tokens that generate returns"
            )
        with torch.no_grad():
            return self.decoded(self.raster.grid(codes)).float().clamp(-1, 1)

    @property
    def codebook(self) -> Tensor:
        """[V, C] latents; the tokens that are no codes are placed far from all others, and from each other."""
        latents = self.latents.detach()
        extras = self.vocab - len(latents)
        far = 10 * float(latents.abs().max()) + 1
        scale = torch.arange(1, extras + 1, device=latents.device, dtype=latents.dtype)[:, None] * far
        return torch.cat((latents, scale.expand(-1, latents.shape[1])))

    def reader(self) -> Reader:
        """Its own tokenizer reads square pictures."""
        raster = self.raster
        if raster is None or raster.rows != raster.columns:
            raise InputError("only square pictures can be read for --data: use --self, or another size.")
        side = raster.rows * self.pixels_per_code
        return Reader.of(
            self.encoder(), self.latents, side, self.length, lambda grid: raster.lay(grid, len(self.codes))
        )

    @property
    def pixels_per_code(self) -> int:
        """Pixels of a code's side."""
        return 16

    def pack(self) -> None:
        """Give the layers' weights to the kernels, and free them in the model, which nobody else has."""
        for name in self.unused:
            setattr(self.model.model, name, None)
        if self.packing is None:
            return
        try:
            self.decoder.use_kernels(self.packing, release=True)
        except InputError as error:
            warnings.warn(f"{error}; its weights stay as they are", stacklevel=2)
            return
        self.pack_head()

    @abstractmethod
    def pack_head(self) -> None:
        """Prepack what is around the layers."""

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write model and tokenizer in transformers' layout, into `target`."""
        if store not in ("float32", "bfloat16"):
            raise InputError(f"a {type(self).__name__} is written in float32 or bfloat16, not {store}")
        assert self.raster is not None
        place, side = folder / "target", self.pixels_per_code
        self.model.config.size = f"{self.raster.columns * side}x{self.raster.rows * side}"
        with quiet():
            self.model.save_pretrained(place)
        self.text.save(place)
        return ["target"]

    # What follows reads and answers calls of the model's `generate`.

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """Whether these arguments of `generate` ask for a picture; other calls are the model's own."""
        return arguments.get("prefix_allowed_tokens_fn") is not None or arguments.get(MODE) == "image"

    def adjust(self, arguments: dict[str, Any]) -> None:
        """Change arguments of `generate` before transformers prepares them."""

    def format(self, call: Call) -> Format:
        """The places of the pictures of a call. InputError where it does not say."""
        read = call.processors
        if read.allowed is None:
            raise InputError(
                f"{type(self).__name__} needs prefix_allowed_tokens_fn, which says where codes and row ends stand"
            )
        return Format.probed(read.allowed, read.suppressed, call.ids, call.room, set(self.codes), call.ends)

    def unconditional_rows(self, call: Call) -> list[list[int]]:
        """The unconditional rows of guidance: `negative_prompt_ids`, or the last token of each prompt."""
        ids = call.processors.unconditional
        if ids is None:
            return [[row[-1]] for row in call.ids.tolist()]
        rows = token_rows(ids, call.processors.unconditional_mask)
        if len(call.ids) % len(rows):
            raise InputError(
                f"{len(rows)} negative prompts do not go with {len(call.ids)} prompts; give one for each"
            )
        return [row for row in rows for _ in range(len(call.ids) // len(rows))]

    def sequences(self, codes: Tensor, format: Format, call: Call) -> Tensor:
        """What `generate` returns for codes [B, length]: the prompts, and the tokens after them."""
        tokens, read = self.token_ids(codes).to(call.ids), call.processors
        if read.allowed is not None:
            whole = torch.cat((call.ids, tokens), 1)
            format.check(read.allowed, read.suppressed, whole, call.ids.shape[1])
        return call.finished(tokens, format.tail)


class OneVocabulary(TransformersTarget):
    """Codes are tokens of the language model, whose head is cut to them."""

    _cut: nn.ModuleList | None  # with the rows of codes alone, prepacked

    def __init__(self, model: Any, body: Any, codes: Sequence[int], **more: Any):
        super().__init__(model, body, codes, **more)
        self._cut = None

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]; a plain linear layer computes only what lies between the codes."""
        if self._cut is not None:
            found: Tensor = self._cut[0](features)
            return found
        head, ids = self.model.lm_head, self._code_ids
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:  # adapted or quantised
            found = head(features)
            return found[..., ids]
        low, high = int(ids.min()), int(ids.max()) + 1
        bias = None if head.bias is None else head.bias[low:high]
        return nn.functional.linear(features, head.weight[low:high], bias)[..., ids - low]

    @property
    def head_linear(self) -> nn.Module | None:
        """The head, once it is packed."""
        return None if self._cut is None else self._cut[0]

    def pack_head(self) -> None:
        """A head of the rows of codes alone; the whole one is freed."""
        head = self.model.lm_head
        layer = nn.Linear(head.in_features, self.vocab, bias=False, device="meta")
        layer.weight = nn.Parameter(head.weight.detach()[self._code_ids], requires_grad=False)
        self._cut = nn.ModuleList([layer])
        self.model.lm_head = None
        backend().pack(self._cut)
