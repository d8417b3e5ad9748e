"""Training of the tokenizer: reconstruction first; then, with the codes frozen, a sharper decoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import Classifier, fingerprint, has_classifier, read_classifier
from lanternpp.models.vq.folder import read_tokenizer, read_vq
from lanternpp.models.vq.model import VQ, Autoencoder, Stacks, VQConfig, channels_last, usage
from lanternpp.nn.checkpoints import checksum
from lanternpp.training import hardware, losses
from lanternpp.training.adversarial import Discriminator, adaptive_weight, feature_matching, hinge_loss
from lanternpp.training.data import BatchSampler, Pictures, describe
from lanternpp.training.first_weights import begin_tokenizer
from lanternpp.training.material.codes import tokenizer_of
from lanternpp.training.perceptual import Perceptual
from lanternpp.training.pictures import sheet
from lanternpp.training.run import Task, TrainingOptions, averaged, run
from lanternpp.training.task import check_rates
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import read_object

CHECK_PICTURES = 512  # validation pictures measured at a check
USAGE_PICTURES = 2048  # training pictures whose codes are counted at the end


@dataclass(frozen=True)
class TokenizerSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine."""

    batch_size: int = 32
    lr: float = 5e-4
    seed: int = 0
    adversarial: bool = False
    adversarial_start: float = 0.5  # share of the budget
    adversarial_weight: float = 0.3  # length of the adversarial gradient, in lengths of the reconstruction's
    matching: float = 10.0  # weight of feature matching inside the adversarial loss
    discriminator_lr: float = 2e-4
    perceptual: float = 0.0  # weight of the distance in a classifier's features
    classifier: str | None = None  # fingerprint of that classifier
    decay: float = 0.999
    warmup: int = 200
    cooldown: float | None = 0.2
    codes_of: str | None = None  # checksum of the codebook that it keeps; None: it learns its own
    weights_of: str | None = None  # what the weights began as, in a word; None: random

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch size {self.batch_size} must be at least 1.")
        check_rates(lr=self.lr)
        if self.perceptual < 0:
            raise InputError(f"perceptual {self.perceptual} is a weight: 0 or more.")


class TokenizerTask(Task):
    """A VQ autoencoder on crops of pictures."""

    name = "tokenizer"
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
    ):
        """start: with whose weights it begins. classifier: of the perceptual loss."""
        torch.manual_seed(settings.seed)
        self.config, self.hparams, self.device, self.data = config, settings, device, data
        self.train, self.val = train.to(device), val.to(device)
        self.settings = {**vars(config), **asdict(settings), "data": data["hash"]}
        self.model = channels_last(self.make().to(device)).train()
        if start is not None:
            self.first_weights = begin_tokenizer(self.model, start)
        self.average = averaged(self.model)  # type: ignore[assignment]
        self.decay, self.warmup, self.cooldown = settings.decay, settings.warmup, settings.cooldown
        self.distance = Perceptual(channels_last(classifier.to(device))) if classifier else None
        self.discriminator = channels_last(Discriminator().to(device))
        fused = device.type == "cuda"
        self.optimizers = {
            "model": torch.optim.AdamW(
                self.model.parameters(), settings.lr, (0.9, 0.99), weight_decay=1e-4, fused=fused
            ),
            "judge": torch.optim.AdamW(
                self.discriminator.parameters(),
                settings.discriminator_lr,
                (0.5, 0.9),
                weight_decay=1e-4,
                fused=fused,
            ),
        }
        self.sampler = BatchSampler(len(train), settings.batch_size, settings.seed)
        self.since: float | None = None  # progress at which the adversarial part began

    def make(self) -> Autoencoder:
        """The tokenizer, with first weights."""
        assert isinstance(self.config, VQConfig)
        return VQ(self.config)

    def modules(self) -> dict[str, torch.nn.Module]:
        """Model, average and discriminator."""
        return {**super().modules(), "judge": self.discriminator}

    def extra(self) -> dict[str, Any]:
        """The progress at which the adversarial part began."""
        return {"since": self.since}

    def restore(self, extra: dict[str, Any]) -> None:
        """The progress at which the adversarial part began."""
        self.since = extra["since"]

    def speed_up(self) -> None:
        """Compile the two convolutional stacks; the quantiser between them stays as it is."""
        self.model.encoder.compile(dynamic=False)
        self.model.decoder.compile(dynamic=False)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update, of everything or, in the adversarial part, of the decoder."""
        index, generator = self.sampler(step)
        images = self.train.random(generator, index)
        if not self.hparams.adversarial or progress < self.hparams.adversarial_start:
            return self.reconstruction_step(images)
        if self.since is None:
            self.since = progress
            self.model.load_state_dict(self.average.state_dict())  # its codes are final
        return self.adversarial_step(images, min((progress - self.since) / 0.05, 1.0))

    def reconstruction_step(self, images: Tensor) -> dict[str, Tensor]:
        """Encoder, codebook and decoder together; or the decoder alone, where the codes are kept."""
        with hardware.autocast(self.device):
            if self.hparams.codes_of:
                output, commitment = self.model.render(self.quantised(images)), images.new_zeros(())
            else:
                output, _, commitment = self.model(images)
        loss, figures = self.reconstruction_loss(output, images)
        self.update("model", self.model, loss + commitment)
        return {**figures, self.regulariser: commitment}

    def reconstruction_loss(self, output: Tensor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """How far output is from images, both [B, 3, H, W]: the loss, and its parts for the log."""
        loss = losses.reconstruction(output, images)
        if self.distance is None:
            return loss, {"loss": loss}
        with hardware.autocast(self.device):
            perceptual = self.distance(output, images)
        return loss + self.hparams.perceptual * perceptual, {"loss": loss, "perceptual": perceptual}

    def adversarial_step(self, images: Tensor, ramp: float) -> dict[str, Tensor]:
        """One update of decoder and discriminator; the two gradients are balanced by their norms on the pixels (2012.09841)."""
        with hardware.autocast(self.device):
            output = self.model.render(self.quantised(images))
            pixels = output.detach().requires_grad_()
            loss, figures = self.reconstruction_loss(pixels, images)
            (reconstruction_gradient,) = torch.autograd.grad(loss, pixels)
            with torch.no_grad():
                _, real_features = self.discriminator(images)
            scores, features = self.discriminator(pixels)
            fooling = -scores.mean() + self.hparams.matching * feature_matching(features, real_features)
            (adversarial_gradient,) = torch.autograd.grad(fooling, pixels)
        weight = (
            ramp
            * self.hparams.adversarial_weight
            * adaptive_weight(reconstruction_gradient, adversarial_gradient)
        )
        self.optimizers["model"].zero_grad()
        output.backward(reconstruction_gradient + weight * adversarial_gradient)
        torch.nn.utils.clip_grad_norm_(self.model.decoder.parameters(), 1.0)
        self.optimizers["model"].step()
        with hardware.autocast(self.device):
            discriminator_loss = hinge_loss(
                self.discriminator(images)[0], self.discriminator(pixels.detach())[0]
            )
        self.update("judge", self.discriminator, discriminator_loss)
        return {**figures, "judge": discriminator_loss, "fooling": fooling}

    @torch.no_grad()
    def quantised(self, images: Tensor) -> Tensor:
        """The decoder's input for images [B, 3, H, W]: [B, length, C]."""
        return self.model.decoder_input(self.model.encode(images))

    def update(self, name: str, module: torch.nn.Module, loss: Tensor) -> None:
        """Backward, clip, step."""
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """On the centres of some validation pictures: PSNR, how much fine detail is drawn, and how much of the codebook used.

        detail: contrast of the finest detail, as a share of the pictures'; blurred ones have less than 1.
        """
        ratios, codes, fine = [], [], torch.zeros(2)
        with hardware.autocast(self.device):
            for images in self.val.centres(64, CHECK_PICTURES):
                codes.append(self.average.encode(images))
                drawn = self.average.redraw(codes[-1])
                ratios.append(losses.psnr(drawn, images))
                fine += torch.stack([losses.detail(x.float()).sum().cpu() for x in (drawn, images)])
        contrast = (fine[0] / fine[1]).sqrt().item()
        figures = {"psnr": torch.cat(ratios).mean().item(), "detail": contrast}
        return {**figures, **self.describe(torch.cat(codes))}

    @torch.no_grad()
    def final(self) -> dict[str, Any]:
        """What `describe` says of some training pictures."""
        with hardware.autocast(self.device):
            codes = torch.cat(
                [self.average.encode(images) for images in self.train.centres(64, USAGE_PICTURES)]
            )
        return {f"train_{name}": value for name, value in self.describe(codes).items()}

    def describe(self, codes: Tensor) -> dict[str, float]:
        """The share of the codebook that codes [M, length] use, and their perplexity."""
        assert isinstance(self.config, VQConfig)
        share, perplexity = usage(codes, self.config.codes)
        return {"usage": share, "perplexity": perplexity}

    @torch.no_grad()
    def sample(self, path: Path) -> None:
        """Sixteen validation pictures in rows of eight, each row above its reconstruction."""
        index = torch.linspace(0, len(self.val) - 1, min(16, len(self.val))).long()
        rows = []
        for part in index.split(8):
            images = self.val.centre(part)
            with hardware.autocast(self.device):
                rows += [images, self.average.redraw(self.average.encode(images))]
        sheet(torch.cat(rows), min(8, len(index)), path)

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged tokenizer."""
        return {"kind": "vq", **vars(self.config)}, self.average.weights()


def train(
    data: Path,
    model: Path,
    config: Stacks,
    settings: TokenizerSettings,
    options: TrainingOptions,
    limit: int | None = None,
    codes_of: Path | None = None,
    weights_of: Path | None = None,
    classifier_of: Path | None = None,
    kind: type[TokenizerTask] | None = None,
) -> bool:
    """Train `model/tokenizer` on the pictures of `data`; False if interrupted.

    codes_of: a model of our layout. Its tokenizer's codes stay as they are, of which `config` only says the size of a picture,
    and its decoder is trained further: targets that were trained on these codes stay valid, for pictures of their size.
    weights_of: a model with whose tokenizer's weights it begins, where `codes_of` is left out; of codes or of latents.
    classifier_of: a model whose classifier's features the perceptual loss compares; needed where that has a weight.
    kind: what is trained; default: a `TokenizerTask`, of codes.
    """
    classifier = None
    if settings.perceptual:
        if classifier_of is None or not has_classifier(classifier_of):
            raise InputError("a perceptual loss compares a classifier's features; name a model that has one.")
        classifier = read_classifier(classifier_of)
        settings = replace(settings, classifier=fingerprint(classifier))
    start: Autoencoder | None = None
    if codes_of is not None:
        start = vq = read_vq(tokenizer_of(codes_of))
        config = replace(vq.config, size=config.size)
        settings = replace(settings, codes_of=checksum(vq.codebook))
    elif weights_of is not None:
        start = read_tokenizer(tokenizer_of(weights_of))
        settings = replace(settings, weights_of=digest(map(checksum, start.state_dict().values())))
    pictures, val = (Pictures.read(data, split, config.size, limit) for split in ("train", "val"))
    facts = describe(pictures, val, data)
    if codes_of is not None:
        facts["codes_of"] = short_provenance(codes_of / "tokenizer")
    task = kind or TokenizerTask
    return run(task(config, settings, pictures, val, facts, options.device, start, classifier), options)


def short_provenance(folder: Path) -> dict[str, Any]:
    """Command, date, commit and steps of a trained network; {} where they are not known."""
    file = folder / "provenance.json"
    provenance = read_object(file) if file.is_file() else {}
    return {name: provenance[name] for name in ("command", "date", "git", "steps") if name in provenance}
