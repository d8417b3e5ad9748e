"""The weights that a training of a target begins with: random, or those of another target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lanternpp.errors import InputError
from lanternpp.targets.prompted import PromptedTarget
from lanternpp.targets.words import WordsConfig, WordsTarget


def init_tables(model: WordsTarget) -> None:
    """First values: similar codes begin with similar vectors.

    The free tables start small beside the map of the codebook, so that what is learned of one code serves
    its neighbours from the first step; the logits start near zero.
    """
    for table, basis, free in ((model.codes_in, 0.3, 0.02), (model.codes_out, 0.02, 0.002)):
        nn.init.normal_(table.table, std=free)
        if table.basis is not None:
            nn.init.normal_(table.basis, std=basis)


def init_weights(model: PromptedTarget) -> None:
    """First values: every block begins as the identity."""
    for name in ("word_table", "slot_table", "null_prefix"):
        nn.init.normal_(getattr(model, name), std=0.2)
    for name, parameter in model.decoder.blocks.named_parameters():
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.zeros_(parameter)


@torch.no_grad()
def take_over(model: WordsTarget, start: WordsTarget) -> None:
    """Begin with the weights of `start`: its layers, the vectors of words that both know, and, where both have the same codebook, its
    code tables. Raises InputError where the layers differ in number or width."""
    if model.decoder.config != replace(start.decoder.config, dropout=model.decoder.config.dropout):
        raise InputError(
            f"the weights to begin with have the shape {shape_of(start.config)}; give the same shape"
        )
    model.decoder.load_state_dict(start.decoder.state_dict())
    ids = {word: i + 1 for i, word in enumerate(start.config.words)}
    for i, word in enumerate(model.config.words):
        if word in ids:
            model.word_table[i + 1] = start.word_table[ids[word]]
    model.word_table[0] = start.word_table[0]
    slots = min(model.slots, start.slots)
    model.slot_table[:slots], model.null_prefix[:slots] = start.slot_table[:slots], start.null_prefix[:slots]
    if model.codebook.shape == start.codebook.shape and torch.equal(model.codebook, start.codebook):
        for mine, theirs in ((model.codes_in, start.codes_in), (model.codes_out, start.codes_out)):
            mine.table.copy_(theirs.matrix(start.codebook))
            if mine.basis is not None:
                mine.basis.zero_()


def shape_of(config: WordsConfig) -> str:
    """The options that give a target this shape."""
    return " ".join(f"--{name} {getattr(config, name)}" for name in ("dim", "layers", "heads", "hidden"))
