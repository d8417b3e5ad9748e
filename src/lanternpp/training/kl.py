"""Training of a tokenizer of continuous latents: as that of codes, with a divergence in the place of a codebook."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lanternpp.models.vq.folder import KIND
from lanternpp.models.vq.kl import KL, KLConfig
from lanternpp.training.tokenizer import TokenizerTask


class KLTask(TokenizerTask):
    """A KL autoencoder on crops of pictures."""

    regulariser = "divergence"

    def make(self) -> KL:
        """The tokenizer, with first weights."""
        assert isinstance(self.config, KLConfig)
        return KL(self.config)

    def describe(self, codes: Tensor) -> dict[str, float]:
        """Standard deviations of moments [M, length, 2 C]: `spread`, of the means over places; `noise`, at a place."""
        mean, log_var = codes.float().chunk(2, -1)
        return {
            "spread": mean.flatten(0, 1).std(0).mean().item(),
            "noise": (log_var / 2).exp().mean().item(),
        }

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged tokenizer."""
        return {"kind": KIND, **vars(self.config)}, self.average.weights()
