"""Training of a continuous target: the next latent of a picture, given a caption's words and the latents so far."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.continuous.mixture import Mixture
from lanternpp.continuous.target import KIND, ContinuousConfig, ContinuousTarget
from lanternpp.errors import InputError
from lanternpp.training.first_weights import init_weights
from lanternpp.training.material.codes import read_codes, tokenizer_of
from lanternpp.training.run import TrainingOptions, run
from lanternpp.training.target import TargetSettings, TargetTask, check_shape, code_logits, vocabulary
from lanternpp.vq.folder import read_kl
from lanternpp.vq.kl import KL

MEASURED = 4096  # training pictures whose latents give the mean and the standard deviation


class ContinuousTask(TargetTask):
    """A continuous target on cached moments of latents, which are drawn anew in every step."""

    kind = KIND
    vq: KL
    model: ContinuousTarget

    def make(self) -> ContinuousTarget:
        """The target, with first weights; the components begin at random places."""
        assert isinstance(self.config, ContinuousConfig)
        model, config = ContinuousTarget(self.config, self.vq), self.config
        init_weights(model)
        nn.init.normal_(model.latent_out.weight, std=0.02)
        means = slice(config.components, config.components * (1 + config.channels))
        with torch.no_grad():
            model.latent_out.bias.zero_()[means].normal_()
        mean, log_var = self.codes.train.codes[:MEASURED, 0].float().flatten(0, 1).chunk(2, -1)
        model.latent_mean.copy_(mean.mean(0))
        model.latent_std.copy_((mean.var(0) + log_var.exp().mean(0)).sqrt())
        return model

    def simplest(self) -> dict[str, float]:
        """Nats per number under one Gaussian for all places: what context must beat."""
        return {"gaussian": (math.log(2 * math.pi) + 1) / 2}

    def loss(self, words: Tensor, null: Tensor, input_codes: Tensor, codes: Tensor) -> Tensor:
        """Mean nats per number: words [B, T], null [B] bool, latents twice [B, length, C]."""
        return self.nats(code_logits(self.model, words, null, input_codes, self.dtype), codes).mean()

    def nats(self, params: Tensor, latents: Tensor) -> Tensor:
        """Parameters [B, length, P], latents [B, length, C] -> nats per number, [B, length]."""
        channels = latents.shape[-1]
        return -Mixture.of(params.float(), channels).log_prob(latents.float()) / channels

    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Nats per number of the average on validation pictures [M], captions given, no guidance."""
        every = [self.nats(params, latents).flatten() for latents, params in self.predicted(index)]
        return {"nll": torch.cat(every).mean().item(), **self.baseline}


def train(
    data: Path,
    model: Path,
    shape: dict[str, Any],
    settings: TargetSettings,
    options: TrainingOptions,
    crops: int = 2,
    limit: int | None = None,
    components: int = 16,
) -> bool:
    """Train `model/target` on the latents of `data`; False if interrupted. As `target.train`. InputError."""
    check_shape(shape)
    if settings.corrupt:
        raise InputError(
            f"corrupt {settings.corrupt} replaces codes, and --head mixture reads latents: leave it out."
        )
    if components < 1:
        raise InputError(f"components {components} must be at least 1.")
    kl = read_kl(tokenizer_of(model))
    codes = read_codes(data, model, crops, options.device, limit)
    config = ContinuousConfig(
        **{"slots": 8, **shape, **vocabulary(codes, shape.get("slots", 8))},
        grid=kl.config.grid,
        channels=kl.config.dim,
        components=components,
    )
    return run(ContinuousTask(config, settings, codes, kl, options.device), options)
