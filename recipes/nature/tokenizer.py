"""Trains a tokenizer, of codes or of latents: reconstruction first; then, with the codes frozen, a sharper decoder.

python recipes/nature/tokenizer.py --data photos --model my-model --minutes 60
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from autoencoders import MOVING, TrainedKL, TrainedVQ, latents_of, redraw
from common import (
    Cooldown,
    Data,
    Limit,
    Model,
    check_training,
    fraction,
    script,
    tokenizer_of,
)
from lanternpp.api.model import model_folder
from lanternpp.cli.options import verb
from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import Classifier, fingerprint, has_classifier, read_classifier
from lanternpp.models.vq.autoencoder import (
    KIND,
    Autoencoder,
    KLConfig,
    Stacks,
    VQConfig,
    channels_last,
    read_tokenizer,
    read_vq,
)
from lanternpp.training.codes import Sampler
from lanternpp.training.loop import Task, averaged, descend, run
from lanternpp.training.options import Batch, Decay, Rate, Seed, TrainingOptions, Warmup
from lanternpp.training.team import autocast, team
from lanternpp.util.options import Option
from losses import (
    Discriminator,
    Perceptual,
    adaptive_weight,
    detail,
    feature_matching,
    hinge_loss,
    psnr,
    reconstruction,
)
from pictures import Pictures, describe, sheet
from weights import begin_tokenizer

# Fields of `Stacks`, by the pixels of an image's side per code.
STAGES: dict[int, dict[str, Any]] = {
    4: {"channels": (32, 128), "encoder_blocks": (1, 2), "decoder_blocks": (2, 3)},
    8: {"channels": (32, 128, 256), "encoder_blocks": (1, 1, 2), "decoder_blocks": (1, 2, 3)},
    16: {"channels": (32, 128, 256, 256), "encoder_blocks": (1, 1, 1, 2), "decoder_blocks": (1, 1, 2, 3)},
}
CHECK_PICTURES = 512  # validation pictures measured at a check
USAGE_PICTURES = 2048  # training pictures whose codes are counted at the end


@dataclass(frozen=True)
class TokenizerSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine."""

    batch_size: Batch = 32
    lr: Rate = 5e-4
    adversarial: Annotated[bool, Option("Sharpen the decoder against a discriminator.", negative=True)] = True
    adversarial_start: Annotated[float, fraction("Share of the budget before that.")] = 0.5
    adversarial_weight: Annotated[
        float, Option("Its gradient, in lengths of the reconstruction's.", ge=0)
    ] = 0.3
    matching: Annotated[float, Option("Weight of feature matching inside the adversarial loss.", ge=0)] = 10.0
    discriminator_lr: Rate = 2e-4
    perceptual: Annotated[float, Option("Weight of the distance in a classifier's features.", ge=0)] = 0.1
    decay: Decay = 0.999
    warmup: Warmup = 200
    cooldown: Cooldown = 0.2
    seed: Seed = 0


class TokenizerTask(Task):
    """A VQ autoencoder on crops of pictures."""

    name = "tokenizer"
    kind = "vq"  # in the config
    modules = ("model", "average", "discriminator")
    autoencoder: type[Autoencoder] = TrainedVQ
    regulariser = "commitment"  # the loss beside the reconstruction's, in the log
    model: Autoencoder
    average: Autoencoder

    def __init__(
        self,
        config: Stacks,
        settings: TokenizerSettings,
        train: Pictures,
        val: Pictures,
        data: dict[str, Any],
        device: torch.device,
        start: Autoencoder | None = None,
        classifier: Classifier | None = None,
        keep_codes: bool = False,
    ):
        """start: with whose weights it begins; keep_codes: and whose codes stay. classifier: of the perceptual loss."""
        torch.manual_seed(settings.seed)
        self.config, self.hparams, self.device, self.data = config, settings, device, data
        self.train, self.val = train.to(device), val.to(device)
        self.keep_codes = keep_codes
        known = {"start": start and fingerprint(start), "classifier": classifier and fingerprint(classifier)}
        self.settings = {**vars(config), **asdict(settings), **known, "data": data["hash"]}
        self.model = channels_last(self.autoencoder(config).to(device)).train()
        if start is not None:
            self.first_weights = begin_tokenizer(self.model, start)
        self.average = averaged(self.model)
        self.distance = Perceptual(channels_last(classifier.to(device))) if classifier else None
        self.discriminator = channels_last(Discriminator().to(device))
        self.since = self.discriminator.since
        adamw = partial(torch.optim.AdamW, weight_decay=1e-4, fused=device.type == "cuda")
        self.optimizers = {
            "model": adamw(self.model.parameters(), settings.lr, (0.9, 0.99)),
            "discriminator": adamw(self.discriminator.parameters(), settings.discriminator_lr, (0.5, 0.9)),
        }
        self.sampler = Sampler(len(train), 1, settings.batch_size, settings.seed)

    def speed_up(self) -> None:
        """Compile the two convolutional stacks; the quantiser between them stays as it is."""
        self.model.encoder.compile(dynamic=False)
        self.model.decoder.compile(dynamic=False)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update, of everything or, in the adversarial part, of the decoder."""
        index, _, generator = self.sampler(step)
        images = self.train.random(generator, index)
        if not self.hparams.adversarial or progress < self.hparams.adversarial_start:
            return self.reconstruction_step(images)
        if self.since.isnan():
            self.since.fill_(progress)
            self.model.load_state_dict(self.average.state_dict())  # its codes are final
        return self.adversarial_step(images, min((progress - self.since.item()) / 0.05, 1.0))

    def reconstruction_step(self, images: Tensor) -> dict[str, Tensor]:
        """Encoder, codebook and decoder together; or the decoder alone, where the codes are kept."""
        with autocast(self.device):
            if self.keep_codes:
                output, commitment = self.model.render(self.quantised(images)), images.new_zeros(())
            else:
                output, _, commitment = self.model(images)
        loss, figures = self.reconstruction_loss(output, images)
        descend([self.optimizers["model"]], loss + commitment, self.model.parameters())
        return {**figures, self.regulariser: commitment}

    def reconstruction_loss(self, output: Tensor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """How far output is from images, both [B, 3, H, W]: the loss, and its parts for the log."""
        loss = reconstruction(output, images)
        if self.distance is None:
            return loss, {"loss": loss}
        with autocast(self.device):
            perceptual = self.distance(output, images)
        return loss + self.hparams.perceptual * perceptual, {"loss": loss, "perceptual": perceptual}

    def adversarial_step(self, images: Tensor, ramp: float) -> dict[str, Tensor]:
        """One update of decoder and discriminator; the two gradients are balanced by their norms on the pixels (2012.09841)."""
        with autocast(self.device):
            output = self.model.render(self.quantised(images))
            pixels = output.detach().requires_grad_()
            loss, figures = self.reconstruction_loss(pixels, images)
            (reconstruction_gradient,) = torch.autograd.grad(loss, pixels)
            with torch.no_grad():
                _, real_features = self.discriminator(images)
            scores, features = self.discriminator(pixels)
            fooling = -scores.mean() + self.hparams.matching * feature_matching(features, real_features)
            (adversarial_gradient,) = torch.autograd.grad(fooling, pixels)
        balance = adaptive_weight(reconstruction_gradient, adversarial_gradient)
        weight = ramp * self.hparams.adversarial_weight * balance
        gradient = reconstruction_gradient + weight * adversarial_gradient
        # The sum has this gradient on the pixels.
        descend([self.optimizers["model"]], (output * gradient).sum(), self.model.decoder.parameters())
        with autocast(self.device):
            real, fake = (self.discriminator(x)[0] for x in (images, pixels.detach()))
            discriminator_loss = hinge_loss(real, fake)
        descend([self.optimizers["discriminator"]], discriminator_loss, self.discriminator.parameters())
        return {**figures, "discriminator": discriminator_loss, "fooling": fooling}

    @torch.no_grad()
    def quantised(self, images: Tensor) -> Tensor:
        """The decoder's input for images [B, 3, H, W]: [B, length, C]."""
        return latents_of(self.model, self.model.encode(images))

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """On the centres of some validation pictures: PSNR, how much fine detail is drawn, and how much of the codebook used.

        detail: contrast of the finest detail, as a share of the pictures'; blurred ones have less than 1.
        """
        ratios, codes, fine = [], [], torch.zeros(2)
        with autocast(self.device):
            for images in self.val.centres(64, CHECK_PICTURES):
                codes.append(self.average.encode(images))
                drawn = redraw(self.average, codes[-1])
                ratios.append(psnr(drawn, images))
                fine += torch.stack([detail(x.float()).sum().cpu() for x in (drawn, images)])
        contrast = (fine[0] / fine[1]).sqrt().item()
        figures = {"psnr": torch.cat(ratios).mean().item(), "detail": contrast}
        return {**figures, **self.describe(torch.cat(codes))}

    @torch.no_grad()
    def final(self) -> dict[str, Any]:
        """The figures of `describe` for some training pictures."""
        with autocast(self.device):
            codes = [self.average.encode(images) for images in self.train.centres(64, USAGE_PICTURES)]
        return {f"train_{name}": value for name, value in self.describe(torch.cat(codes)).items()}

    def describe(self, codes: Tensor) -> dict[str, float]:
        """The share of the codebook that codes [M, length] use, and their perplexity, exp(entropy)."""
        assert isinstance(self.config, VQConfig)
        counts = torch.bincount(codes.flatten(), minlength=self.config.codes).double()
        perplexity = torch.special.entr(counts / counts.sum()).sum().exp()
        return {"usage": (counts > 0).double().mean().item(), "perplexity": perplexity.item()}

    @torch.no_grad()
    def sample(self, path: Path) -> None:
        """Sixteen validation pictures in rows of eight, each row above its reconstruction."""
        rows = []
        for images in self.val.centres(8, 16):
            with autocast(self.device):
                rows += [images, redraw(self.average, self.average.encode(images))]
        sheet(torch.cat(rows), min(8, len(self.val)), path)

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged tokenizer."""
        tensors = {name: tensor for name, tensor in self.average.state_dict().items() if name not in MOVING}
        return {"kind": self.kind, **vars(self.config)}, tensors


class KLTask(TokenizerTask):
    """A KL autoencoder: as one of codes, with a divergence in the place of a codebook."""

    kind = KIND
    autoencoder = TrainedKL
    regulariser = "divergence"

    def describe(self, codes: Tensor) -> dict[str, float]:
        """Standard deviations of moments [M, length, 2 C]: `spread`, of the means over places; `noise`, at a place."""
        mean, log_var = codes.float().chunk(2, -1)
        spread, noise = mean.flatten(0, 1).std(0).mean(), (log_var / 2).exp().mean()
        return {"spread": spread.item(), "noise": noise.item()}


@verb
def main(
    *,
    data: Data,
    model: Model,
    kind: Annotated[
        Literal["vq", "kl"],
        Option(
            "vq: codes of a codebook; kl: continuous latents, for a target with a mixture or diffusion head."
        ),
    ] = "vq",
    size: Annotated[
        int | None, Option("Pixels of a side. [default: 128, or that of --codes-of]", ge=1)
    ] = None,
    down: Annotated[int | None, Option("Pixels of a side per code: 4, 8 or 16. [default: 8]")] = None,
    codes: Annotated[int | None, Option("vq: entries of the codebook. [default: 4096]", ge=1)] = None,
    channels: Annotated[
        int | None, Option("kl: numbers of a latent. [default: 16]", ge=1, le=1 << 16)
    ] = None,
    codes_of: Annotated[
        str | None, Option("A model whose codes are kept: only its decoder is trained further.")
    ] = None,
    weights_of: Annotated[
        str | None,
        Option("A model with stages of the same shape, of either kind, whose weights it begins with."),
    ] = None,
    classifier_of: Annotated[
        str, Option("The model in whose classifier's features pictures are compared.")
    ] = "nature-128",
    limit: Limit = None,
    settings: TokenizerSettings = TokenizerSettings(),
    training: TrainingOptions = TrainingOptions(),
) -> bool:
    """Train a tokenizer: pictures <-> codes, or latents."""
    others = (down, codes, weights_of)
    if codes_of is not None and (kind != "vq" or any(value is not None for value in others)):
        raise InputError(
            "--codes-of keeps a model's codes, and all of its weights but the decoder's: leave --kind, --down, --codes and "
            "--weights-of out."
        )
    for option, value, owner in (("codes", codes, "vq"), ("channels", channels, "kl")):
        if value is not None and kind != owner:
            raise InputError(f"--{option} {value} is of tokenizers of --kind {owner}: leave it out.")
    if down not in (None, *STAGES):
        raise InputError(f"--down {down} is none of {', '.join(map(str, STAGES))}.")
    check_training(training, model / "tokenizer")
    config: Stacks
    start: Autoencoder | None = None
    if codes_of is not None:
        start = vq = read_vq(tokenizer_of(model_folder(codes_of)))
        config = replace(vq.config, size=size or vq.config.size)
    elif kind == "vq":
        config = VQConfig(size or 128, codes=codes or 4096, **STAGES[down or 8])
    else:
        config = KLConfig(size or 128, channels or 16, **STAGES[down or 8])
    if weights_of is not None:
        start = read_tokenizer(tokenizer_of(model_folder(weights_of)), kind=Autoencoder)
    classifier = None
    if settings.perceptual:
        measured_by = model_folder(classifier_of)
        if not has_classifier(measured_by):
            raise InputError(f"{classifier_of} has no classifier, whose features a perceptual loss compares.")
        classifier = read_classifier(measured_by)
    train, val = (Pictures.read(data, split, config.size, limit) for split in ("train", "val"))
    facts, device = describe(train, val, data), team().device(training.device)
    task = KLTask if kind == "kl" else TokenizerTask
    kept = codes_of is not None
    made = task(config, settings, train, val, facts, device, start, classifier, kept)
    return run(made, model / "tokenizer", training)


if __name__ == "__main__":
    script(main)
