"""The decoders that are timed: their shapes, a file of weights for all engines, and the inputs of pictures of nature-128."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lanternpp import Pipeline
from lanternpp.nn.decoder import Decoder, DecoderConfig, line_table

FILLED = 256  # slots of the KV cache that hold keys and values of earlier positions
BRANCHES = 2  # of guidance; a pass of n rows has n / 2 nodes in each
MAX_NODES = 16  # of a branch in a pass
SHAPES = {
    "S": (DecoderConfig(384, 14, 6, 1024), 4096),
    "XL": (DecoderConfig(1280, 36, 20, 3584), 16384),
    "3B": (DecoderConfig(3200, 24, 32, 8704), 16384),
}
"""By shape: the decoder, and the number of codes. nature-128, LlamaGen-XL and LlamaGen-3B (arXiv 2406.06525)."""
PROMPTS = ("a photo of a red tulip", "a photo of a snow covered mountain", "a photo of the sea at sunset")


class UnavailableError(Exception):
    """An engine cannot run a decoder here; the message has the reason."""


def weights_file(shape: str, folder: Path) -> Path:
    """Return the path of a shape's weights, and write the file if it is missing: nature-128's (S), or random weights in bfloat16.

    The tensors are `Decoder`'s, "rotary_table" [positions, 2, d] and "head" [V, D].
    """
    path = folder / f"{shape}.safetensors"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    config, vocab = SHAPES[shape]
    if shape == "S":
        target = Pipeline.from_pretrained("nature-128", dtype="float32").target
        if target.decoder.config != config:
            raise UnavailableError("nature-128 has another shape than SHAPES says")
        tensors = {**target.decoder.state_dict(), "head": target.codes_out.weight}
        table = target.decoder.rotary_table
        # Timed passes have positions after nature-128's last one.
        further_rows = table[-1:].expand(2 * FILLED - len(table), -1, -1)
        tensors["rotary_table"] = torch.cat((table, further_rows))
    else:
        generator = torch.Generator().manual_seed(0)
        with torch.device("meta"):
            state = Decoder(config, line_table(1, config.head_dim)).state_dict()
        tensors = {name: torch.ones(weight.shape, dtype=torch.bfloat16) for name, weight in state.items()}
        tensors["head"] = torch.empty(vocab, config.dim, dtype=torch.bfloat16)
        for weight in tensors.values():
            if weight.dim() == 2:
                weight.normal_(0, 0.02, generator=generator)
        tensors["rotary_table"] = line_table(2 * FILLED, config.head_dim)
    part = path.with_suffix(".part")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, part)
    return part.rename(path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of `weights_file`, mapped into memory."""
    return load_file(path)


@torch.inference_mode()
def picture_inputs() -> Tensor:
    """Return inputs of nature-128's decoder for pictures of plain decoding, [pictures, 2, slots, D] in float32."""
    pipe = Pipeline.from_pretrained("nature-128", dtype="float32")
    pictures = []
    for seed, prompt in enumerate(PROMPTS):
        codes = pipe(prompt, method="ar", seed=seed).codes
        branches = [
            torch.cat((pipe.target.prompt([condition], 1).embeds, pipe.target.embed(codes)), 1)
            for condition in (prompt, None)
        ]
        pictures.append(torch.cat(branches))
    return torch.stack(pictures)
