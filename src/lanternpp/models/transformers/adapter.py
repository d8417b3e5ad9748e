"""The base class of all adapters: a `Target` on the modules of a model of transformers, without a copy of its weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target, quoted
from lanternpp.models.hub import quiet
from lanternpp.models.transformers.call import MODE, Call, padded, set_length, token_rows
from lanternpp.models.transformers.decoder import TransformersDecoder, replica
from lanternpp.models.transformers.format import Format, Raster
from lanternpp.models.transformers.opening import CORRECT, GENERATION, Text, adapted, opened
from lanternpp.models.vq.codes import Reader
from lanternpp.models.vq.layouts import save_tokenizer
from lanternpp.models.vq.vqgan import VQGAN
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import Store
from lanternpp.nn.decoder import is_hooked
from lanternpp.nn.files import input_errors
from lanternpp.nn.sources import Source
from lanternpp.types import Prompt

SLOTS = 512  # the longest prompt of `Pipeline`, unless the model has fewer positions


class TransformersTarget(Target):
    """The decoder layers, embeddings and head of a model; codes are some of its tokens, unless a family says otherwise.

    codes: the token of every code, in the order of the image tokenizer. row_end: the token after a row, where there is one.
    Prompts are texts for a model that `read` opened, and the numbers of a call's prompts for a model of the user's.
    """

    class_name: ClassVar[str]  # in transformers
    model_type: ClassVar[str]
    # The parts of a prompt: tokens, by their names in angle brackets, and texts, with the fields of `filled` in braces.
    request: ClassVar[Sequence[str]]
    null_request: ClassVar[Sequence[str]] = ()  # of the unconditional branch; (): those of an empty prompt
    guidance: ClassVar[float] = 1.0  # of a call of `generate` that names none
    optional: ClassVar[tuple[str, ...]] = ()  # beginnings of the names of tensors that a checkpoint may lack
    pixels_per_code = 16  # of a code's side
    stores = ("float32", "bfloat16")
    by_product: ClassVar[bool] = False  # how its tokenizer finds codes, as `nearest` has it
    unguided: ClassVar[str] = ""  # why it is drawn without guidance, for a message
    by_forward: ClassVar[bool] = True  # whether transformers' `generate` draws by the model's `forward`
    unit: ClassVar[bool] = False  # whether its codebook is looked up l2-normalised
    decoder: TransformersDecoder
    # Codes of a side of the squares that it draws, the default first; empty: any size, as the next four attributes say.
    sides: Sequence[int] = ()
    default_size: ClassVar[str]  # in pixels
    max_codes: ClassVar[int]  # of the largest picture
    step: ClassVar[int] = 1  # codes of a step of the size
    raster = Raster(0, 0)  # without codes unless `read` opened the model
    fixed_size = False  # whether the user gave a size
    text_of: Callable[[Path], Text] = Text  # opens the tokenizer of prompts in a folder
    text: Text
    packing: str | None = None  # the dtype in which `pack` gives weights to the kernels
    slots = length = width = 0
    ids: Sequence[int] = ()  # the token of every code that is drawn: of the codes, then of a format's extras

    def __init__(self, model: Any, body: Any, codes: Sequence[int], row_end: int | None = None):
        super().__init__()
        self.tokens: nn.Module = model.get_input_embeddings()  # first: `next(parameters())` is its weight
        self.model = model
        self.decoder = TransformersDecoder(body)
        self.most = int(body.config.max_position_embeddings)
        self.codes, self.row_end = tuple(codes), row_end
        # In place of the model's own, `read_vq` may set a `VQGAN`, or a family's own decoder.
        vars(self)["vq"] = getattr(model.model, "vqmodel", None)
        self._code_head: nn.Sequential | None = None  # of the codes' rows alone, prepacked
        self.arrange(Format(1, 1, () if row_end is None else (row_end,)), 0)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Return whether a checkpoint has transformers' model type of the family."""
        return cls.model_type in source.kinds

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """Open the model in `source` by its own class, and the tokenizers beside it; return the target."""
        make: Callable[[Any], Self] = cls
        text = cls.text_of(source.folder)
        with input_errors(f"{source.path} cannot be opened", CORRECT):
            target = adapted(make, opened(source, cls.class_name, cls.fields_of(source), dtype, cls.optional))
        target.read_vq(source, dtype)
        target.to(device)
        if target.vq is not None:
            target.vq.to(device)
        target.text, target.fixed_size = text, "size" in source.given
        size = source.given.pop("size", None) or source.config.get("size")
        raster = target.raster_of(source, None if size is None else str(size))
        with input_errors(f"{source.path} cannot be opened", CORRECT):
            target._lay_out(raster, target.prompt_slots(raster))
            # A config may name tokens that the model lacks, or rotations of another width than its heads'.
            first = target._code_ids.new_zeros(1, 1)
            target.head(target.embed(first))
            target.decoder.rotations(first)
        target.packing = source.packing
        return target.eval().requires_grad_(False)

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """Return fields of the config that replace those of the checkpoint's config.json."""
        return {}

    def read_vq(self, source: Source, dtype: torch.dtype) -> None:
        """Read what the class of transformers does not: the tokenizer of pictures, where the model comes without one."""
        return

    def prompt_slots(self, raster: Raster, picture_tokens: int = 0) -> int:
        """Return the slots of a prompt: `picture_tokens` for pictures that it shows, and others for text; InputError if none is left."""
        num_free = self.most - raster.length - picture_tokens
        if num_free < 1:
            shown = f" and {picture_tokens} of the pictures shown" if picture_tokens else ""
            raise InputError(
                f"{raster} codes{shown} do not fit the model's {self.most} positions; choose a smaller size"
            )
        return picture_tokens + min(SLOTS, num_free)

    def _lay_out(self, raster: Raster, slots: int, format: Format | None = None) -> None:
        """Draw pictures of a raster from now on, from prompts of up to `slots` slots; format: None for the raster's own."""
        self.raster = raster
        self.arrange(format or raster.format(self.codes, self.row_end), slots)

    def shaped(self, shape: Hashable) -> Target:
        """Return the target of a shape: a raster, the slots of a prompt, and a format where it is not the raster's own."""
        if shape is None:
            return self
        target = replica(self)
        target.decoder = self.decoder.shared()
        target._lay_out(*cast("tuple[Raster, int]", shape))
        return target

    def raster_of(self, source: Source, size: str | None) -> Raster:
        """Return the codes of a picture of a size in pixels, which the user or the checkpoint gives; None: neither does."""
        if not self.sides:
            ends = self.row_end is not None
            return Raster.of(size or self.default_size, self.pixels_per_code, ends, self.max_codes, self.step)
        if min(self.sides) < 2:
            raise InputError(f"{source.path} has pictures of {min(self.sides)} codes a side: {CORRECT}.")
        sides = {side * self.pixels_per_code: side for side in self.sides}
        for width, side in sides.items():
            if size in (None, f"{width}", f"{width}x{width}"):
                return Raster(side, side)
        raise InputError(f"size {size} cannot be drawn; squares of {', '.join(map(str, sides))} pixels can")

    def conditional(self, text: str) -> list[int]:
        """Return the tokens of a prompt, up to where the first code is drawn."""
        return self.filled(self.request, text)

    def unconditional(self, text: str | None) -> list[int]:
        """Return the tokens of the unconditional branch of guidance, for a prompt or None."""
        return self.filled(self.null_request or self.request, "")

    def filled(self, parts: Sequence[str], prompt: str) -> list[int]:
        """Return the tokens of parts as `request` has them, for a prompt and the size of the picture, in codes and in pixels."""
        rows, columns, side = self.raster.rows, self.raster.columns, self.pixels_per_code
        size = f"{columns * side}x{rows * side}"
        return self.text.filled(parts, prompt=prompt, rows=rows, columns=columns, size=size)

    @property
    def latents(self) -> Tensor | None:
        """[codes, C] the latent vector of every code of the image; None where the model comes without."""
        if self.vq is None or isinstance(self.vq, VQGAN):
            return getattr(self.vq, "codebook", None)
        weight: Tensor = self.vq.quantize.embedding.weight
        return nn.functional.normalize(weight, dim=-1) if self.unit else weight

    def decoded(self, grid: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] to images [B, 3, H, W]."""
        return self.vq.decode(grid)

    @property
    def num_square_codes(self) -> int:
        """Codes of the square that generation_mode="image" draws; 0: calls say how large it is."""
        return self.sides[0] ** 2 if self.sides else 0

    def encoder(self) -> nn.Module:
        """Return the network from images [B, 3, H, W] to latents [B, C, rows, columns]; InputError where the checkpoint has none."""
        own = getattr(self.model.model, "vqmodel", None)
        if own is not None:
            return nn.Sequential(own.encoder, own.quant_conv)
        if not isinstance(self.vq, VQGAN):
            raise InputError("this model has no tokenizer that reads pictures: use --self, not --data")
        return self.vq.encoder().to(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the embeddings."""
        return next(self.tokens.parameters()).device

    def arrange(self, format: Format, slots: int, calls: Sequence[Sequence[list[int]]] = ()) -> bool:
        """Draw pictures of a format from now on; return whether engines made before have other sizes.

        calls: the tokens of the prompts that conditions name by their number, a row for each branch. slots: of the longest prompt.
        """
        ids = (*self.codes, *format.extras)
        changed = (self.slots, self.length, self.width, self.ids) != (slots, format.length, format.width, ids)
        self.calls, self.slots, self.ids = calls, slots, ids
        self.length, self.width, self.vocab = format.length, format.width, len(ids)
        self._code_ids = torch.tensor(ids, device=self.device)
        self._id_span = slice(min(ids), max(ids) + 1)
        self._allowed_codes = self._kinds = None
        if format.kinds:
            masks = [[token in tokens for token in ids] for tokens in format.sets]
            self._allowed_codes = torch.tensor(masks, device=self.device)  # [sets, V]
            self._kinds = torch.tensor(format.kinds, device=self.device)  # [length]
        self.decoder.position_table = None
        if format.positions:
            prompt_positions = format.prompt_positions or [(slot, slot, slot) for slot in range(-slots, 0)]
            table = torch.tensor([*prompt_positions, *format.positions], device=self.device)
            self.decoder.position_table = table + slots
        self.decoder.prepare(slots + format.length)
        return changed

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Encode b texts, or the prompt of a call that one condition numbers: [branches * b, T, D], padded on the left.

        Padding, token 0, is never attended to. InputError where a text is too long, or guidance is asked of a model that has none.
        """
        if self.raster.length:
            if branches > 1 and self.unguided:
                raise InputError(f"cfg above 1 is not supported: {self.unguided}")
            rows = [self._tokens(condition) for condition in conditions]
            if branches == 2:
                rows += [self.unconditional(condition) for condition in conditions]
        else:
            (condition,) = conditions
            rows = list(self.calls[int(condition or 0)])
        # Prompts of a call have one width, and positions on grids follow the last slot.
        fixed = not self.raster.length or self.decoder.position_table is not None
        width = self.slots if fixed else min(padded(rows), self.slots)
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=self.device)
        return Prompt(self.tokens(ids), torch.tensor([width - len(row) for row in rows], device=self.device))

    def _tokens(self, condition: str | None) -> list[int]:
        """Return the tokens of a text; InputError where there are too many, or the tokenizer is another model's."""
        row = self.unconditional(None) if condition is None else self.conditional(condition)
        vocab_size = next(self.tokens.parameters()).shape[0]
        if max(row) >= vocab_size:
            raise InputError(
                f"{self.text.path} has token {max(row)} and its model knows {vocab_size}: it is another model's tokenizer."
            )
        if len(row) > self.slots:
            raise InputError(
                f"prompt {quoted(condition or '', 40)} takes {len(row)} slots and there are {self.slots}; shorten it"
            )
        return row

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """Set the logits [B, N, V] of codes that the format forbids at places `index` [B, N] to -inf."""
        if self._allowed_codes is None or self._kinds is None:
            return logits
        return logits.masked_fill(~self._allowed_codes[self._kinds[index]], float("-inf"))

    def embed(self, codes: Tensor) -> Tensor:
        """Embed codes [R, N] as the tokens that they are: [R, N, D]."""
        return self.tokens(self.token_ids(codes))

    def head(self, features: Tensor) -> Tensor:
        """Return the logits [..., V] of features [..., D]."""
        if self._code_head is not None:
            return self._code_head(features)
        head, ids, span = self.model.lm_head, self._code_ids, self._id_span
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or is_hooked(head):
            return head(features)[..., ids]
        # Of a linear layer that nothing adapts or quantises, the rows from the first code to the last are enough.
        bias = None if head.bias is None else head.bias[span]
        return nn.functional.linear(features, head.weight[span], bias)[..., ids - span.start]

    @property
    def head_linear(self) -> nn.Module | None:
        """The head, once it is packed; None before."""
        return None if self._code_head is None else self._code_head[0]

    def token_ids(self, codes: Tensor) -> Tensor:
        """Return the tokens of codes, of any shape."""
        return self._code_ids[codes]

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes [B, length] to images [B, 3, H, W] in [-1, 1]; InputError where transformers or another program decodes them."""
        if not self.raster.length:
            raise InputError("pixels are made by the transformers model, from what generate returns")
        if self.without_pixels:
            raise InputError(self.without_pixels)
        return self.decoded(self.raster.grid(codes)).float().clamp(-1, 1)

    @property
    def codebook(self) -> Tensor | None:
        """[V, C] latents; the rows of tokens that are no codes are far from all codes, and from each other."""
        latents = self.latents
        if latents is None:
            return None
        latents = latents.detach()
        distance = 10 * float(latents.abs().max()) + 1
        numbers = torch.arange(1, self.vocab - len(latents) + 1, device=latents.device, dtype=latents.dtype)
        extras = (numbers * distance)[:, None].expand(-1, latents.shape[1])  # [V - codes, C]
        return torch.cat((latents, extras))

    def reader(self) -> Reader:
        """Return the reader of square pictures; InputError where the target draws others, or has no tokenizer of pictures."""
        if self.without_pixels:
            return super().reader()
        raster, latents = self.raster, self.latents
        if not raster.length or latents is None or raster.rows != raster.columns:
            raise InputError("only square pictures can be read for --data: use --self, or another size.")
        side = raster.rows * self.pixels_per_code
        lay = partial(raster.lay, end=len(self.codes))
        return Reader.of(self.encoder(), latents, side, self.length, lay, self.by_product)

    def pack(self) -> None:
        """Give the layers' weights to the kernels, and free them in the model, which nobody else uses."""
        if self.packing is None:
            return
        try:
            self.decoder.use_kernels(self.packing, release=True)
        except InputError as error:
            warnings.warn(f"{error}; its weights stay as they are", stacklevel=2)
            return
        self.pack_head()

    def pack_head(self) -> None:
        """Replace the model's head by one of the rows of codes alone."""
        head, self.model.lm_head = self.model.lm_head, None
        head.weight = nn.Parameter(head.weight.detach()[self._code_ids], requires_grad=False)
        self._code_head = nn.Sequential(head)
        backend().pack(self._code_head)

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write the model in transformers' layout, into `target`, and a tokenizer of its own; raise InputError if they cannot be."""
        if not isinstance(self.vq, VQGAN) and self.vq not in {*self.model.modules()}:
            raise InputError(
                f"the decoder of a {type(self).__name__} cannot be written; use its checkpoint as it is"
            )
        if hasattr(self.model, "hf_quantizer"):
            raise InputError(
                "its weights are quantised, and are written in full alone; convert the model that they were made of"
            )
        side = self.pixels_per_code
        self.model.config.size = f"{self.raster.columns * side}x{self.raster.rows * side}"
        with input_errors(f"its {GENERATION} cannot be written", "correct it"):
            self.model.generation_config.validate(strict=True)
        with quiet():
            self.model.save_pretrained(folder / "target")
        self.text.save(folder / "target")
        if not isinstance(self.vq, VQGAN):
            return ["target"]
        save_tokenizer(self.vq, folder / "tokenizer", store)
        return ["target", "tokenizer"]

    # The methods below read and answer calls of the model's `generate`.

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """Return whether these arguments of `generate` ask for a picture; other calls are the model's own."""
        return arguments.get("prefix_allowed_tokens_fn") is not None or arguments.get(MODE) == "image"

    def adjust(self, arguments: dict[str, Any]) -> None:
        """Ask for a whole picture where these arguments of `generate`, not yet prepared by transformers, give no length."""
        sources = (arguments, vars(arguments.get("generation_config") or object))
        lengths = [options.get(name) for options in sources for name in ("max_length", "max_new_tokens")]
        if self.num_square_codes and all(length is None for length in lengths):
            set_length(arguments, self.num_square_codes)

    def format(self, call: Call) -> Format:
        """Return the format of a call's pictures: what `prefix_allowed_tokens_fn` allows, or a square of codes."""
        if call.processors.allowed is not None:
            return call.probed(set(self.codes))
        if not self.num_square_codes:
            raise InputError(
                f"{type(self).__name__} needs prefix_allowed_tokens_fn, which says where codes and row ends stand"
            )
        return Format.plain(min(self.num_square_codes, call.max_new_tokens))

    def unconditional_rows(self, call: Call) -> list[list[int]]:
        """Return the unconditional rows of guidance: `negative_prompt_ids`, or the last token of each prompt. InputError."""
        ids, batch = call.processors.unconditional, len(call.ids)
        if ids is None:
            return [[row[-1]] for row in call.ids.tolist()]
        rows = token_rows(ids, call.processors.unconditional_mask)
        if batch % len(rows):
            raise InputError(f"{len(rows)} negative prompts do not go with {batch} prompts; give one each")
        return [row for row in rows for _ in range(batch // len(rows))]

    def sequences(self, codes: Tensor, format: Format, call: Call) -> Tensor:
        """Return what `generate` returns for codes [B, length]: the prompts, and the tokens after them."""
        tokens = self.token_ids(codes).to(call.ids)
        if call.processors.allowed is not None:
            call.check(format, tokens)
        return call.finished(tokens, format.tail)
