"""The base of all adapters: a `Target` on the modules of a model of transformers, where its weights lie."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target, quoted
from lanternpp.models.hub import quiet
from lanternpp.models.transformers.call import MODE, Call, set_length, token_rows
from lanternpp.models.transformers.decoder import TransformersDecoder, replica
from lanternpp.models.transformers.format import Format, Raster
from lanternpp.models.transformers.opening import CORRECT, GENERATION, Text, adapted, opened
from lanternpp.models.vq.codes import Reader
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import Store
from lanternpp.nn.files import wrong_file
from lanternpp.nn.sources import Source
from lanternpp.types import Prompt

SLOTS = 512  # the longest prompt of `Pipeline`, unless the model's own positions end before
STRIDE = 32  # prompts are padded to a multiple of this, so that few shapes are compiled


class TransformersTarget(Target):
    """A model's decoder layers, embeddings and head, as they lie in memory; codes are tokens of it, unless a family says otherwise.

    codes: the token of every code, in the order of the image tokenizer. row_end: the token after a row, where there is one. Prompts are texts for a model that `read` opened, and the numbers of a call's prompts for one of the user's.
    """

    class_name: ClassVar[str]  # in transformers
    model_type: ClassVar[str]
    guidance: ClassVar[float] = 1.0  # of a call of `generate` that names none
    recommended: Mapping[str, Any] = {}  # settings that its authors draw with
    lacking: ClassVar[tuple[str, ...]] = ()  # beginnings of tensors' names that a checkpoint may lack
    pixels_per_code = 16  # of a code's side
    by_product: ClassVar[bool] = False  # how its tokenizer finds codes, as `nearest` has it
    unguided: ClassVar[str] = ""  # why it is drawn without guidance, for a message
    by_forward: ClassVar[bool] = True  # whether transformers' `generate` draws by the model's `forward`
    unit: ClassVar[bool] = False  # whether its codebook is looked up l2-normalised
    decoder: TransformersDecoder
    slots = 0
    # codes of a side of the squares that it draws, the usual one first; empty: it draws any size, as the next three say
    sides: Sequence[int] = ()
    usual: ClassVar[str]  # the size in pixels where none is given
    largest: ClassVar[int]  # codes of the largest picture
    step: ClassVar[int] = 1  # codes of a step of the size
    raster = Raster(0, 0)  # of no codes unless `read` opened the model
    fixed_size = False  # whether the user gave a size
    text: Text
    packing: str | None = None  # the dtype in which `pack` gives weights to the kernels
    stride = STRIDE  # prompts of texts are padded to a multiple of it

    def __init__(
        self, model: Any, body: Any, codes: Sequence[int], row_end: int | None = None, qk_norm: bool = False
    ):
        super().__init__()
        self.tokens: nn.Module = model.get_input_embeddings()  # first: `next(parameters())` is its weight
        self.model = model
        self.decoder = TransformersDecoder(body, qk_norm, self.positions)
        self.most = int(body.config.max_position_embeddings)
        self.codes, self.row_end = tuple(codes), row_end
        self.prompts: Sequence[Prompt] = ()
        self.length = 0
        # with the rows of codes alone, prepacked
        self._code_head: nn.ModuleList | None = None
        self.arrange(Format(1, 1, () if row_end is None else (row_end,)), 0)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """transformers' model type."""
        return cls.model_type in source.kinds

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The model in `source`, opened by its own class; its tokenizers lie beside it."""
        make: Callable[[Any], Self] = cls
        with wrong_file(f"{source.path} cannot be opened", CORRECT):
            target = adapted(make, cls.model_in(source, dtype, cls.lacking))
        target.read_vq(source, dtype)
        target.to(device)
        target.text = target.text_of(source.folder)
        size = source.given.get("size") or source.config.get("size")
        raster = target.raster_of(source, None if size is None else str(size))
        target.fixed_size = "size" in source.given
        target._lay_out(raster, target.room(raster))
        target.packing = source.packing
        return target.eval().requires_grad_(False)

    @classmethod
    def model_in(cls, source: Source, dtype: torch.dtype, lacking: tuple[str, ...]) -> Any:
        """The model of transformers in `source`."""
        return opened(source, cls.class_name, cls.fields_of(source), dtype, lacking)

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """Fields of a config, whatever the checkpoint's config.json says. InputError."""
        return {}

    def read_vq(self, source: Source, dtype: torch.dtype) -> None:
        """Read the tokenizer of pictures, where it is not a part of the model."""
        return

    @staticmethod
    def text_of(folder: Path) -> Text:
        """The tokenizer of prompts."""
        return Text(folder)

    def room(self, raster: Raster, shown: int = 0) -> int:
        """The prompt slots beside a picture, where `shown` tokens of a prompt are pictures. InputError where it does not fit."""
        room = self.most - raster.length - shown
        if room < 1:
            more = f" and {shown} of the pictures shown" if shown else ""
            raise InputError(
                f"{raster} codes{more} do not fit the model's {self.most} positions; choose a smaller size"
            )
        return shown + min(SLOTS, room)

    def _lay_out(self, raster: Raster, slots: int) -> None:
        """Draw pictures of a raster from now on, from prompts of at most so many slots."""
        self.raster = raster
        self.arrange(raster.format(self.codes, self.row_end), slots)
        self.decoder.prepare(slots + self.length)

    def shaped(self, shape: Hashable) -> Target:
        """A shape is the raster and the slots of a prompt."""
        if shape is None:
            return self
        made = replica(self)
        made.decoder = self.decoder.shared(made.positions)
        made._lay_out(*cast("tuple[Raster, int]", shape))
        return made

    def raster_of(self, source: Source, size: str | None) -> Raster:
        """The codes of a picture of a size in pixels, the user's or the checkpoint's; None: where neither says one. InputError."""
        if self.sides:
            return Raster.square(self.sides, self.pixels_per_code, size)
        return Raster.of(size or self.usual, self.pixels_per_code, True, self.largest, self.step)

    @abstractmethod
    def conditional(self, text: str) -> list[int]:
        """The tokens of a prompt, up to where the first code is drawn."""

    def unconditional(self, text: str | None) -> list[int]:
        """The tokens of the unconditional branch of guidance, for a prompt or None: an empty prompt."""
        return self.conditional("")

    @property
    def latents(self) -> Tensor | None:
        """[codes, C] the latent vector of every code of the image; None where the model comes without."""
        weight: Tensor = self.vq.quantize.embedding.weight
        return nn.functional.normalize(weight, dim=-1) if self.unit else weight

    def decoded(self, grid: Tensor) -> Tensor:
        """Codes [B, rows, columns] -> images [B, 3, H, W], by the model's own VQ decoder."""
        return self.vq.decode(grid)

    @property
    def defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The recommended settings; top-k is at most the number of codes."""
        top_k = min(self.recommended.get("top_k", 0), len(self.codes))
        return {**self.recommended, **({"top_k": top_k} if top_k else {})}

    @property
    def count(self) -> int:
        """Codes of the square that generation_mode="image" draws; 0: calls say how large it is."""
        return self.sides[0] ** 2 if self.sides else 0

    @property
    def vq(self) -> Any:
        """The image tokenizer."""
        return self.model.model.vqmodel

    def encoder(self) -> nn.Module | None:
        """Images [B, 3, H, W] -> latents [B, C, rows, columns]; None where the checkpoint has none."""
        return nn.Sequential(self.vq.encoder, self.vq.quant_conv)

    @property
    def device(self) -> torch.device:
        """The device of the embeddings."""
        return next(self.tokens.parameters()).device

    def arrange(self, format: Format, slots: int, prompts: Sequence[Prompt] = ()) -> bool:
        """Set what is drawn from now on; whether engines made before are of other sizes.

        prompts: those that conditions name, by their number. slots: the most slots of one.
        """
        ids = (*self.codes, *format.extras)
        before = (self.slots, self.length, getattr(self, "width", 0), getattr(self, "ids", ()))
        self.prompts, self.slots, self.ids = prompts, slots, ids
        self.length, self.width, self.vocab = format.length, format.width, len(ids)
        self._code_ids = torch.tensor(ids, device=self.device)
        self._span = slice(min(ids), max(ids) + 1)  # of their tokens
        self._allowed = self._kinds = None
        if format.kinds:
            sets = [sorted(tokens) for tokens in format.sets]
            rows = [torch.isin(self._code_ids, torch.tensor(s, device=self.device)) for s in sets]
            self._allowed = torch.stack(rows)  # [kinds, V]
            self._kinds = torch.tensor(format.kinds, device=self.device)
        return before != (slots, self.length, self.width, ids)

    def positions(self, slot: Tensor) -> Tensor:
        """Slots [R, N] -> the model's `position_ids`, of the same shape or [3, R, N]."""
        return slot

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Texts -> [branches * b, T, D], padded on the left; of a call, the prompt that one condition numbers.

        InputError where a text is too long, or guidance is asked of a model that has none.
        """
        if not self.raster.length:
            (condition,) = conditions
            return self.prompts[int(condition or 0)]
        if branches > 1 and self.unguided:
            raise InputError(f"cfg above 1 is not supported: {self.unguided}")
        rows = [self._tokens(condition) for condition in conditions]
        if branches == 2:
            rows += [self.unconditional(condition) for condition in conditions]
        return Prompt(
            *self._embedded(rows, min(-(-max(map(len, rows)) // self.stride) * self.stride, self.slots))
        )

    def encode(self, rows: Sequence[Sequence[int]], branches: int) -> tuple[list[Prompt], int]:
        """Rows of tokens, all conditional ones first, as a prompt per sample, all padded to the same number of slots."""
        embeds, start = self._embedded(rows, -(-max(map(len, rows)) // STRIDE) * STRIDE)
        count = len(rows) // branches
        picks = [torch.arange(branches, device=self.device) * count + sample for sample in range(count)]
        return [Prompt(embeds[pick], start[pick]) for pick in picks], embeds.shape[1]

    def _tokens(self, condition: str | None) -> list[int]:
        """The tokens of a text; InputError where there are too many, or the tokenizer is another model's."""
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
        return self.tokens(self.token_ids(codes))

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]; a plain linear layer computes the rows from the first code to the last."""
        if self._code_head is not None:
            return self._code_head[0](features)
        head, ids = self.model.lm_head, self._code_ids
        plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter  # not adapted, not quantised
        if not plain or "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks:
            return head(features)[..., ids]
        span, bias = self._span, None if head.bias is None else head.bias[self._span]
        return nn.functional.linear(features, head.weight[span], bias)[..., ids - span.start]

    @property
    def head_linear(self) -> nn.Module | None:
        """The head, once it is packed."""
        return None if self._code_head is None else self._code_head[0]

    def token_ids(self, codes: Tensor) -> Tensor:
        """The tokens of codes, of any shape."""
        return self._code_ids[codes]

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]; InputError where the model itself or another draws them."""
        if not self.raster.length:
            raise InputError("pixels are made by the transformers model, from what generate returns")
        if self.without_pixels:
            raise InputError(self.without_pixels)
        with torch.no_grad():
            return self.decoded(self.raster.grid(codes)).float().clamp(-1, 1)

    @property
    def codebook(self) -> Tensor | None:
        """[V, C] latents; the tokens that are no codes are placed far from all others, and from each other."""
        latents = self.latents
        if latents is None:
            return None
        latents = latents.detach()
        extras = self.vocab - len(latents)
        far = 10 * float(latents.abs().max()) + 1
        scale = torch.arange(1, extras + 1, device=latents.device, dtype=latents.dtype)[:, None] * far
        return torch.cat((latents, scale.expand(-1, latents.shape[1])))

    def reader(self) -> Reader:
        """The tokenizer reads square pictures. InputError for others, and where there is none."""
        raster, latents = self.raster, self.latents
        if self.without_pixels:
            return super().reader()
        if not raster.length or latents is None or raster.rows != raster.columns:
            raise InputError("only square pictures can be read for --data: use --self, or another size.")
        side = raster.rows * self.pixels_per_code
        lay = partial(raster.lay, end=len(self.codes))
        return Reader.of(self.encoder(), latents, side, self.length, lay, self.by_product)

    def pack(self) -> None:
        """Give the layers' weights to the kernels, and free them in the model, which nobody else has."""
        if self.packing is None:
            return
        try:
            self.decoder.use_kernels(self.packing, release=True)
        except InputError as error:
            warnings.warn(f"{error}; its weights stay as they are", stacklevel=2)
            return
        self.pack_head()

    def pack_head(self) -> None:
        """A head of the rows of codes alone; the whole one is freed."""
        head = self.model.lm_head
        layer = nn.Linear(head.in_features, self.vocab, bias=False, device="meta")
        layer.weight = nn.Parameter(head.weight.detach()[self._code_ids], requires_grad=False)
        self._code_head = nn.ModuleList([layer])
        self.model.lm_head = None
        backend().pack(self._code_head)

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write model and tokenizer in transformers' layout, into `target`. InputError where others make its pixels."""
        if self.without_pixels:
            return super().save(folder, store)
        if store not in ("float32", "bfloat16"):
            raise InputError(f"{type(self).__name__} is written in float32 or bfloat16, not {store}")
        if hasattr(self.model, "hf_quantizer"):
            raise InputError(
                "its weights are quantised, and are written in full alone; convert the model that they were made of"
            )
        place, side = folder / "target", self.pixels_per_code
        self.model.config.size = f"{self.raster.columns * side}x{self.raster.rows * side}"
        with wrong_file(f"its {GENERATION} cannot be written", "correct it"):
            self.model.generation_config.validate(strict=True)
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
        """Change arguments of `generate` before transformers prepares them: a whole picture where they name no length."""
        given = (arguments, vars(arguments.get("generation_config") or object))
        lengths = [one.get(name) for one in given for name in ("max_length", "max_new_tokens")]
        if self.count and all(length is None for length in lengths):
            set_length(arguments, self.count)

    def format(self, call: Call) -> Format:
        """The places of the pictures of a call: a square of codes, unless it says otherwise. InputError where it has to."""
        if call.processors.allowed is not None:
            return call.probed(set(self.codes))
        if not self.count:
            raise InputError(
                f"{type(self).__name__} needs prefix_allowed_tokens_fn, which says where codes and row ends stand"
            )
        return Format.plain(min(self.count, call.room))

    def unconditional_rows(self, call: Call) -> list[list[int]]:
        """The unconditional rows of guidance: `negative_prompt_ids`, or the last token of each prompt. InputError."""
        ids, count = call.processors.unconditional, len(call.ids)
        if ids is None:
            return [[row[-1]] for row in call.ids.tolist()]
        rows = token_rows(ids, call.processors.unconditional_mask)
        if count % len(rows):
            raise InputError(
                f"{len(rows)} negative prompts do not go with {count} prompts; give one for each"
            )
        return [row for row in rows for _ in range(count // len(rows))]

    def sequences(self, codes: Tensor, format: Format, call: Call) -> Tensor:
        """What `generate` returns for codes [B, length]: the prompts, and the tokens after them."""
        tokens = self.token_ids(codes).to(call.ids)
        if call.processors.allowed is not None:
            call.check(format, tokens)
        return call.finished(tokens, format.tail)
