"""What a drafter learns from: prompts, and a frozen target's features of cached codes."""

from __future__ import annotations

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.targets.base import Target
from lanternpp.training.codes import Split


class Captions:
    """The prompts of a split: made once per distinct caption; one the target cannot follow is the null prompt."""

    def __init__(self, target: Target, split: Split):
        numbers: dict[str | None, int] = {None: 0}
        made = [target.prompt([None], 1).embeds[0]]
        self.sayings: list[str] = []
        for text in dict.fromkeys(split.texts):
            try:
                made.append(target.prompt([text], 1).embeds[0])
            except InputError:
                numbers[text] = 0
                continue
            numbers[text] = len(made) - 1
            self.sayings.append(text)
        if not self.sayings:
            raise InputError("the target can follow none of the captions: was it trained on other data?")
        self.table = torch.stack(made)  # [U, T, D]; row 0 is the null prompt
        self.number = torch.tensor([numbers[text] for text in split.texts])

    def __call__(self, index: Tensor, branches: int, drop: Tensor | None = None) -> Tensor:
        """Prompts of pictures index [B] -> [branches * B, T, D]; null where drop [B], and in a second branch."""
        number = self.number[index]
        if drop is not None:
            number = number.masked_fill(drop, 0)
        if branches == 2:
            number = torch.cat((number, torch.zeros_like(number)))
        return self.table[number.to(self.table.device)]


def lessons(target: Target, prompts: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """prompts [R, T, D], codes [R, length] -> what a drafter reads and should say.

    ahead [R, S - 1, D], the inputs one ahead, and features [R, S, D], for S = T + length - 1 slots: from
    ahead[:, t] and features[:, t] follows features[:, t + 1].
    """
    inputs = torch.cat((prompts, target.embed(codes[:, :-1]).to(prompts.dtype)), 1)
    return inputs[:, 1:], target.decoder.teach(inputs)
