"""Trains a classifier of pictures: labels and caption words, of photos, and of photos that the tokenizer reconstructs.

python recipes/nature/classifier.py --data photos --model my-model --minutes 20
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save as serialise
from torch import Tensor, nn

from autoencoders import redraw
from common import (
    ClassifierTraining,
    Data,
    Limit,
    Model,
    check_training,
    fraction,
    script,
    tokenizer_of,
)
from lanternpp.api.picture import Panel, comparison
from lanternpp.cli.options import verb
from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import (
    CLASSIFIER,
    REFERENCE,
    Classifier,
    ClassifierConfig,
    fingerprint,
)
from lanternpp.evaluation.features import ClassifierFeatures, extract
from lanternpp.evaluation.pictures import Gallery, Item
from lanternpp.models.vq.autoencoder import Autoencoder, channels_last, read_tokenizer
from lanternpp.models.vq.codes import hashes
from lanternpp.nn import checkpoints
from lanternpp.nn.checkpoints import SCALE, Store, dequantised, is_quantised, pack
from lanternpp.training.codes import Done, Sampler, Shard, build_shards, evenly_spaced, generator, read_file
from lanternpp.training.loop import Task, averaged, descend, run
from lanternpp.training.options import Decay, Rate, Seed, Warmup
from lanternpp.training.pictures import read_rows
from lanternpp.training.team import autocast, compute_dtype, team
from lanternpp.util import files
from lanternpp.util.options import Option
from pictures import Pictures, describe, to_bytes
from words import split_words

SMALL_SIDE = 0.75  # of the side: half the work, so more pictures are seen in the same time
SAMPLE_PICTURES = 8  # pictures of a sample sheet
COMMON = 0.01  # a word is learned where at least this share of the captions says it
PART, BATCH = 512, 32  # pictures drawn again that a file has, and that are drawn at once


@dataclass(frozen=True)
class ClassifierSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine."""

    batch_size: Annotated[int, Option("Pictures a step.", ge=2)] = 64
    lr: Rate = 3e-3
    redrawn: Annotated[
        int, Option("Training pictures that it also sees as the tokenizer draws them.", ge=0)
    ] = 4096
    share: Annotated[float, fraction("Share of a step's pictures that are redrawn.")] = 0.33
    words: Annotated[float, Option("Weight of the caption words beside the label.", ge=0)] = 1.0
    small: Annotated[float, fraction("Share of the budget that trains on smaller pictures.")] = 0.6
    weight_decay: Annotated[float, Option("Weight decay of the matrices.", ge=0)] = 0.05
    decay: Decay = 0.998
    warmup: Warmup = 100
    seed: Seed = 0


class LabelledPictures(NamedTuple):
    """Pictures [M, 3, H, W], their labels [M] and words [M, W] (0 or 1)."""

    pictures: Pictures
    labels: Tensor
    words: Tensor


def vocabulary(texts: list[str], labels: list[str]) -> tuple[str, ...]:
    """The words of captions that many say and no label does."""
    said = Counter(word for text in texts for word in set(split_words(text)))
    label_words = {word for label in labels for word in split_words(label)}
    return tuple(sorted(w for w, n in said.items() if n >= COMMON * len(texts) and w not in label_words))


def label_pictures(pictures: Pictures, config: ClassifierConfig) -> LabelledPictures:
    """Pictures with the words of their captions and their labels. Raises InputError where a label is not known."""
    texts, labels = pictures.texts, pictures.labels
    unknown = sorted(set(labels) - set(config.labels))
    if unknown:
        raise InputError(
            f"val/ has labels that train/ lacks: {', '.join(unknown[:10])}; add pictures of them to train/, or take them out of val/."
        )
    numbers = torch.tensor([config.labels.index(label) for label in labels])
    words = [[float(w in said) for w in config.words] for said in map(split_words, texts)]
    return LabelledPictures(pictures, numbers, torch.tensor(words).view(len(texts), len(config.words)))


def augment(images: Tensor, generator: torch.Generator, side: int) -> Tensor:
    """Images [B, 3, H, H] in [-1, 1], each zoomed in, mirrored, recoloured and blurred a little, at random.

    Returns [B, 3, side, side]. Blur and recolouring are mild: a classifier that ignores them
    entirely could not tell good pictures from bad.
    """
    device, count = images.device, len(images)
    draw = torch.rand(8, count, generator=generator).to(device)
    zoom = 1 - 0.3 * draw[0]  # the side of the crop
    turn = torch.where(draw[1] < 0.5, -zoom, zoom)
    zero = torch.zeros_like(zoom)
    shift = (2 * draw[2:4] - 1) * (1 - zoom)
    theta = torch.stack((turn, zero, shift[0], zero, zoom, shift[1]), -1).view(count, 2, 3)
    grid = F.affine_grid(theta, [count, 3, side, side], align_corners=False)
    images = F.grid_sample(images, grid, "bilinear", "reflection", align_corners=False)
    bright, contrast, colour, soft = ((2 * draw[i] - 1).view(-1, 1, 1, 1) for i in range(4, 8))
    grey = images.mean(1, keepdim=True)
    images = grey + (images - grey) * (1 + 0.3 * colour)
    middle = images.mean((1, 2, 3), keepdim=True)
    images = middle + (images - middle) * (1 + 0.25 * contrast) + 0.2 * bright
    kernel = torch.tensor([1.0, 2.0, 1.0], device=device) / 4
    blurred = F.conv2d(images, (kernel[:, None] * kernel).expand(3, 1, 3, 3), padding=1, groups=3)
    return images.lerp(blurred, soft.clamp_min(0)).clamp(-1, 1)


def redrawn(
    model: Path, pictures: Mapping[str, Pictures], split: str, index: Tensor, device: torch.device
) -> Pictures:
    """Pictures index [M] of a split, random crops (train) or centres (val), as the tokenizer of `model` draws them again.

    They are kept in `model/codes` for the next run. index: evenly over the pictures.
    """
    vq = channels_last(read_tokenizer(tokenizer_of(model), compute_dtype(device), kind=Autoencoder))
    on, size = pictures[split].to(device), vq.config.size
    vq.to(device)

    def compute(parts: Sequence[range], done: Done) -> Iterator[Shard]:
        num_done = 0
        for part in parts:
            pixels = list[Tensor]()
            for which in index[part.start : part.stop].split(BATCH):
                first = part.start + BATCH * len(pixels)
                crops = on.random(generator(0, first), which) if split == "train" else on.centre(which)
                pixels.append(to_bytes(redraw(vq, vq.encode(crops))).permute(0, 3, 1, 2).cpu())
                num_done += len(which)
                done(num_done)
            yield {"pixels": torch.cat(pixels)}, {}

    key = files.digest([*hashes(vq), *(pictures[name].key for name in ("train", "val")), str(len(index))])
    what = f"{split} pictures drawn again with the tokenizer"
    paths = build_shards(model / "codes" / f"redrawn-{split}-{key}", len(index), PART, compute, what)
    empty = torch.empty(0, 3, size, size, dtype=torch.uint8)
    pixels = torch.cat([empty, *(read_file(path, "pixels")[0]["pixels"] for path in paths)])
    return Pictures(pixels, torch.tensor([size, size]).expand(len(pixels), 2), size, key)


class ClassifierTask(Task):
    """A classifier on photos and redrawn photos."""

    name = "classifier"
    keep = "loss"

    def __init__(
        self,
        config: ClassifierConfig,
        settings: ClassifierSettings,
        splits: dict[str, LabelledPictures],  # train, val, and both again as the tokenizer draws them
        data: dict[str, Any],
        device: torch.device,
        store: Store,
    ):
        torch.manual_seed(settings.seed)
        self.config, self.hparams, self.device = config, settings, device
        self.splits = {
            name: LabelledPictures(pictures.to(device), labels.to(device), words.to(device))
            for name, (pictures, labels, words) in splits.items()
        }
        self.data, self.store = data, store
        known = {"data": data["hash"], "redrawn_data": data["redrawn"]}
        self.settings = {**asdict(config), **asdict(settings), **known}
        self.model: Classifier = channels_last(Classifier(config).to(device)).train()
        self.average: Classifier = averaged(self.model)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups: Any = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others}]
        self.optimizers = {"adamw": torch.optim.AdamW(groups, settings.lr, (0.9, 0.99), weight_decay=0.0)}
        num_train, num_redrawn = (len(splits[name].labels) for name in ("train", "redrawn"))
        again = min(round(settings.share * settings.batch_size), settings.batch_size - 1, num_redrawn)
        self.samplers = {"train": Sampler(num_train, 1, settings.batch_size - again, settings.seed)}
        if again:
            self.samplers["redrawn"] = Sampler(num_redrawn, 1, again, settings.seed + 1)

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        side = self.config.size if progress >= self.hparams.small else round(self.config.size * SMALL_SIDE)
        parts, labels, words = [], [], []
        for name, sampler in self.samplers.items():
            index, _, generator = sampler(step)
            split = self.splits[name]
            parts.append(augment(split.pictures.random(generator, index), generator, side))
            labels.append(split.labels[index])
            words.append(split.words[index])
        with autocast(self.device):
            scores, word_logits = self.model(torch.cat(parts))
        loss = F.cross_entropy(scores.float(), torch.cat(labels))
        naming = binary(word_logits.float(), torch.cat(words))
        descend(self.optimizers.values(), loss + self.hparams.words * naming, self.model.parameters())
        return {"loss": loss, "words": naming}

    @torch.no_grad()
    def predict(self, classifier: Classifier, split: LabelledPictures) -> tuple[Tensor, Tensor]:
        """Logits of labels [M, L] and words [M, W] at the centres of all pictures."""
        with autocast(self.device):
            seen = [classifier(images) for images in split.pictures.centres(64)]
        scores, words = (torch.cat(parts).float() for parts in zip(*seen, strict=True))
        return scores, words

    def figures(self, classifier: Classifier) -> dict[str, float]:
        """Loss and accuracy of a classifier on the validation pictures, as photos and as redrawn by the tokenizer."""
        found: dict[str, float] = {}
        losses = []
        for name, prefix in (("val", ""), ("redrawn val", "redrawn_")):
            split = self.splits[name]
            scores, words = self.predict(classifier, split)
            if name == "val" or self.hparams.redrawn:  # what it is trained on
                losses.append(F.cross_entropy(scores, split.labels).item())
            found[f"{prefix}accuracy"] = (scores.argmax(-1) == split.labels).double().mean().item()
            if self.config.words:
                found[f"{prefix}words"] = ((words > 0) == (split.words > 0)).double().mean().item()
        return {"loss": sum(losses) / len(losses), **found}

    def validate(self) -> dict[str, float]:
        """Loss and accuracy of the average."""
        return self.figures(self.average)

    def final(self) -> dict[str, Any]:
        """The figures of the weights as they will lie on disk, and how many pictures they come from."""
        stored = averaged(self.average)
        packed = pack(stored.state_dict(), self.store)
        for name, tensor in stored.state_dict().items():
            narrow = is_quantised(name, packed)
            tensor.copy_(dequantised(packed[name], packed[name + SCALE]) if narrow else packed[name])
        scores, _ = self.predict(stored, self.splits["val"])
        labels = self.splits["val"].labels
        right = (scores.argmax(-1) == labels).double()
        each = {self.config.labels[i]: right[labels == i].mean().item() for i in labels.unique().tolist()}
        return {
            **self.figures(stored),
            "accuracy_of_each_label": {name: round(value, 4) for name, value in each.items()},
            "validation_pictures": len(self.splits["val"].labels),
        }

    def sample(self, path: Path) -> None:
        """The validation pictures of the greatest loss, with the predicted and the true labels."""
        split = self.splits["val"]
        scores, _ = self.predict(self.average, split)
        losses = F.cross_entropy(scores, split.labels, reduction="none")
        worst = losses.argsort(descending=True)[:SAMPLE_PICTURES].cpu()
        images = to_bytes(split.pictures.centre(worst))
        sure = scores.softmax(-1).amax(-1)
        panels = []
        for i, pixels in zip(worst.tolist(), images, strict=True):
            taken, truth = (self.config.labels[int(x)] for x in (scores[i].argmax(), split.labels[i]))
            notes = [f"is {truth}", f"{100 * sure[i]:.0f} % sure"]
            panels.append(Panel([Image.fromarray(pixels.numpy())], taken, notes))
        with files.replacing(path) as temporary:
            comparison("Predicted labels, and the true ones", panels, 192).save(temporary, format="PNG")

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged classifier."""
        return {"kind": CLASSIFIER, **asdict(self.config)}, self.average.state_dict()


def binary(logits: Tensor, truth: Tensor) -> Tensor:
    """Mean binary cross-entropy of words; 0 where there are none."""
    return F.binary_cross_entropy_with_logits(logits, truth) if truth.shape[1] else logits.sum()


def write_reference(folder: Path, classifier: nn.Module, features: Tensor, texts: Sequence[str]) -> None:
    """`folder`/classifier/reference.safetensors: features in 16 bits, captions, and which classifier they are of."""
    note = {"classifier": fingerprint(classifier), "texts": json.dumps(list(texts))}
    with files.replacing(folder / CLASSIFIER / REFERENCE) as temporary:
        temporary.write_bytes(serialise({"features": features.half().cpu().contiguous()}, metadata=note))


@verb
def main(
    *,
    data: Data,
    model: Model,
    limit: Limit = None,
    settings: ClassifierSettings = ClassifierSettings(),
    training: ClassifierTraining = ClassifierTraining(),
) -> bool:
    """Train a classifier of drawn pictures: it names their labels and gives features to compare them by. Needs a tokenizer.

    It sees pictures of the tokenizer's size. At the end the features of the validation photos are written beside it: the
    default reference of Fréchet distances.
    """
    check_training(training, model / CLASSIFIER)
    folder, device = tokenizer_of(model), team().device(training.device)
    rows = {split: read_rows(data, split) for split in ("train", "val")}
    unlabelled = [part.files[i] for part in rows.values() for i, label in enumerate(part.labels) if not label]
    if unlabelled:
        raise InputError(
            f"a classifier learns labels and {len(unlabelled)} pictures have none, e.g. {unlabelled[0]}: "
            "add a label to each line of metadata.jsonl."
        )
    labels = sorted(set(rows["train"].labels))
    words = vocabulary(list(rows["train"].texts), labels)
    config = ClassifierConfig(tuple(labels), words, checkpoints.load_config(folder)["size"])
    pictures = {split: Pictures.read(data, split, config.size, limit) for split in rows}
    train, val = pictures["train"], pictures["val"]
    splits = {split: label_pictures(pictures[split], config) for split in rows}
    index = evenly_spaced(len(train), settings.redrawn) if settings.redrawn else torch.arange(0)
    again, labelled = redrawn(model, pictures, "train", index, device), splits["train"]
    splits["redrawn"] = LabelledPictures(again, labelled.labels[index], labelled.words[index])
    again_val = redrawn(model, pictures, "val", torch.arange(len(val)), device)
    splits["redrawn val"] = splits["val"]._replace(pictures=again_val)
    facts = describe(train, val, data) | {"redrawn": again.key}
    task = ClassifierTask(config, settings, splits, facts, device, training.store)
    finished = run(task, model / CLASSIFIER, training)
    if finished:
        features = ClassifierFeatures(model, torch.device("cpu"))
        photos = Gallery(model, [Item(path, None) for path in val.files])
        write_reference(model, features.classifier, extract(features, photos, batch=64), val.texts)
    return finished


if __name__ == "__main__":
    script(main)
