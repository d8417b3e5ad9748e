"""The weights that a training begins with: random, or those of another model, whose codes or latents may be others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from autoencoders import TrainedVQ
from lanternpp.errors import InputError
from lanternpp.models.vq.autoencoder import VQ, Autoencoder
from lanternpp.models.words import PromptedTarget

STACKS = ("channels", "encoder_blocks", "decoder_blocks", "thin")
SHAPE = ("dim", "layers", "heads", "hidden")  # the options that give a target its shape
PROMPTS = ("word_table", "slot_table", "null_prefix")


def init_weights(model: PromptedTarget) -> None:
    """First values: every block begins as the identity."""
    for name in PROMPTS:
        nn.init.normal_(getattr(model, name), std=0.2)
    for name, parameter in model.decoder.blocks.named_parameters():
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.zeros_(parameter)


@torch.no_grad()
def take_over(model: nn.Module, tensors: Mapping[str, Tensor], *more: str) -> str:
    """Give a model those of the tensors that have the name and the shape of one of its own -> a sentence on the parts taken.

    more: other parts that were taken, for that sentence. InputError where nothing fits.
    """
    own = model.state_dict()
    taken = {name: x for name, x in tensors.items() if name in own and own[name].shape == x.shape}
    if not taken:
        raise InputError("no weights of the model to begin with have the names and shapes of this one's.")
    model.load_state_dict(taken, strict=False)
    parts = dict.fromkeys(name.split(".")[0] for name in taken)
    modules, known = ([name.rpartition(".")[0] or name for name in names] for names in (own, taken))
    new = [name for name in dict.fromkeys(modules) if name not in (*known, *PROMPTS)]
    return f"taken from another model: {', '.join((*parts, *more))}; new: {', '.join(new) or 'nothing'}"


def begin_tokenizer(model: Autoencoder, start: Autoencoder) -> str:
    """Begin with the weights of another tokenizer; the sentence of `take_over`.

    The two convolutions at the latent are new where one of the tokenizers has codes and the other one latents, or their latents
    have another width. InputError where the stages differ.
    """
    mine, theirs = ([getattr(x.config, name) for name in STACKS] for x in (model, start))
    if mine != theirs:
        raise InputError(
            f"the tokenizer to begin with has {start.config.down} pixels a code or latent and stages of {theirs[0]} channels, "
            f"this one {model.config.down} and {mine[0]}: give --down {start.config.down}"
        )
    alike = isinstance(model, VQ) == isinstance(start, VQ) and model.config.dim == start.config.dim
    latent = () if alike else (f"encoder.{len(start.encoder) - 1}.", "decoder.0.")
    tensors = {name: x for name, x in start.state_dict().items() if not name.startswith(latent)}
    said = take_over(model, tensors)
    if isinstance(model, TrainedVQ):
        model.quantiser.restart()
    return said


@torch.no_grad()
def begin_target(model: PromptedTarget, start: PromptedTarget) -> str:
    """Begin with the weights of another target: its layers, the vectors of words that both know, and, where both have the same codes
    or latents, its tables or its head. The sentence of `take_over`; InputError where the layers differ in number or width."""
    if model.decoder.config != replace(start.decoder.config, dropout=model.decoder.config.dropout):
        shape = " ".join(f"--{name} {getattr(start.config, name)}" for name in SHAPE)
        raise InputError(f"the weights to begin with have the shape {shape}; give the same shape")
    same = same_codes(model, start)
    tensors = start.state_dict()
    fits = [name for name in tensors if name.startswith("decoder.") or (same and name not in PROMPTS)]
    ids = {word: i + 1 for i, word in enumerate(start.config.words)}
    known = [(i + 1, ids[word]) for i, word in enumerate(model.config.words) if word in ids]
    for mine, theirs in [(0, 0), *known]:
        model.word_table[mine] = start.word_table[theirs]
    slots = min(model.slots, start.slots)
    model.slot_table[:slots], model.null_prefix[:slots] = start.slot_table[:slots], start.null_prefix[:slots]
    for name, parameter in model.named_parameters():
        # the vectors of codes are those of the other model alone
        if same and name.endswith(".basis"):
            parameter.zero_()
    words = f"{len(known)} of {len(model.config.words)} words"
    return take_over(model, {name: tensors[name] for name in fits}, words)


def same_codes(model: PromptedTarget, start: PromptedTarget) -> bool:
    """Whether two targets have the same codebook or, without one, latents of the same tokenizer."""
    mine, theirs = model.codebook, start.codebook
    if mine is None or theirs is None:
        return mine is theirs and model.reader().key == start.reader().key
    return torch.equal(mine.cpu(), theirs.cpu())
