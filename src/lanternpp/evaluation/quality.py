"""Quality of pictures: their distance from a reference, and their agreement with their prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import CLASSIFIER, REFERENCE, Classifier, fingerprint, has_classifier
from lanternpp.evaluation.features import EXTRACTORS, ClassifierFeatures, Clip, Extractor, extract
from lanternpp.evaluation.pictures import Gallery, reference_folder
from lanternpp.nn.files import check_finite, wrong_file
from lanternpp.util.devices import pick_device
from lanternpp.util.registry import check_class, check_made, find, importable
from lanternpp.util.terminal import Progress

NEAREST = 3  # k of precision and recall
LEAST = NEAREST + 1  # pictures: precision and recall need that many neighbours of each, and itself
JACKKNIFE_PARTS = 16
CHUNK = 1024


@dataclass(frozen=True)
class Quality:
    """The figures that can be given of pictures, with everything they need already read.

    frechet          Fréchet distance to the reference (lower is nearer); depends on how many pictures there are
    frechet_spread   its standard error over the pictures, by a jackknife
    precision        share of the pictures that are like the reference
    recall           share of the reference that is like some picture
    prompt_accuracy  share of the pictures that the classifier gives the label that their prompt names
    clip             CLIP score, up to 100
    """

    features: str | None  # the name of the extractor
    extractor: Extractor | None
    reference: Tensor | None  # features [N, F] that are compared with
    reference_name: str | None
    classifier: ClassifierFeatures | None
    clip: Clip | None

    @classmethod
    def for_model(
        cls,
        folder: Path,
        reference: Path | None = None,
        features: str | None = None,
        clip: str | None = None,
        device: torch.device | str = "auto",
        progress: Progress | None = None,
    ) -> Quality:
        """The figures that can be measured of a model's pictures.

        reference: a folder of pictures; left out, the features that lie beside the model's classifier. features:
        a name of `EXTRACTORS` or "package.module:Class"; left out, the classifier. clip: a CLIP model's folder
        or hub id. A model without a classifier can still be measured by other features, or by CLIP alone.
        Raises InputError, before anything is drawn, where something is missing or wrong.
        """
        if reference is not None and not reference.is_dir():
            raise InputError(f"reference {reference} is no folder; name one that holds pictures")
        on = pick_device(device) if isinstance(device, str) else device
        classifier = ClassifierFeatures(folder, on) if has_classifier(folder) else None
        scorer = Clip.open(clip, on) if clip else None
        if classifier is None and features is None and reference is None and scorer is not None:
            return cls(None, None, None, None, None, scorer)
        name = features or "classifier"
        kind = find("features", importable(name), EXTRACTORS)
        check_class("features", name, kind, Extractor)
        extractor = classifier if classifier and kind is ClassifierFeatures else kind.open(folder, on)
        if kind not in EXTRACTORS.values():
            check_made("features", name, extractor, Extractor, "side")
            count, side = 3 * extractor.side**2, extractor.side
            found = extractor(torch.arange(count).remainder(251).byte().view(1, 3, side, side))
            if (
                not isinstance(found, Tensor)
                or found.dim() != 2
                or len(found) != 1
                or not found.isfinite().all()
            ):
                raise InputError(
                    f"features {name!r} of one picture are {found!r}; return a tensor [B, F] of finite numbers"
                )
        if reference is not None:
            gallery = Gallery.read(reference_folder(reference), LEAST)
            against, called = extract(extractor, gallery, progress), str(gallery.folder)
        elif classifier is not None and extractor is classifier:
            against, called = read_reference(folder, classifier.classifier), f"{folder.name}'s own"
        else:
            raise InputError(f"features {name} need --reference DIR, a folder of pictures to compare with")
        return cls(name, extractor, against, called, classifier, scorer)

    def measure(
        self,
        images: Sequence[Image.Image],
        prompts: Sequence[str | None] = (),
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """The figures of pictures and, where they are given, their prompts; see the class for their names.

        A figure of prompts is left out where no prompt serves it. Raises InputError below four pictures.
        """
        if len(images) < LEAST:
            raise InputError(f"{len(images)} pictures are too few to measure; at least {LEAST} are needed")
        figures: dict[str, float] = {}
        features: Tensor | None = None
        if self.extractor and self.reference is not None:
            features = extract(self.extractor, images, progress)
            against = gaussian(self.reference)
            figures["frechet"] = frechet(gaussian(features), against)
            figures["frechet_spread"] = standard_error(features, against)
            figures["precision"], figures["recall"] = precision_recall(features, self.reference)
        if self.classifier:
            labels = self.classifier.classifier.config.labels
            named = {i: label_of(prompt, labels) for i, prompt in enumerate(prompts) if prompt}
            named = {i: label for i, label in named.items() if label is not None}
            if named:
                if features is None or self.extractor is not self.classifier:
                    features = extract(self.classifier, images, progress)
                right = self.classifier.labels(features[list(named)]) == torch.tensor(list(named.values()))
                figures["prompt_accuracy"] = right.double().mean().item()
        score = self.clip.score(images, prompts, progress) if self.clip else None
        return figures | ({} if score is None else {"clip": score})


def label_of(prompt: str, labels: Sequence[str]) -> int | None:
    """The number of the label that the prompt names first, in the singular or plural; None where it names none.

    All words of a label must stand there together; where two begin at the same word, the longer one counts.
    """
    text, found = " ".join(words(prompt)), []
    for number, label in enumerate(map(words, labels)):
        pattern = " ".join(re.sub("y$", "(?:y|ie(?=s))", word) + "(?:e?s)?" for word in label)
        if label and (there := re.search(rf"\b{pattern}\b", text)):
            found.append((there.start(), -len(label), number))
    return min(found)[2] if found else None


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def read_reference(folder: Path, classifier: Classifier) -> Tensor:
    """The features [M, F] that lie beside a classifier. Raises InputError where they are missing, few or another classifier's."""
    path = folder / CLASSIFIER / REFERENCE
    if not path.is_file():
        raise InputError(f"{path} is missing; give --reference DIR, a folder of pictures to compare with")
    with wrong_file(f"{path} cannot be read", "give --reference DIR"):
        with safe_open(path, framework="pt") as file:
            note, features = file.metadata() or {}, file.get_tensor("features").float()
        check_finite("features", features, path)
    if note.get("classifier") != fingerprint(classifier):
        raise InputError(f"{path} was made by other weights than {path.parent}'s; give --reference DIR")
    if len(features) < LEAST:
        raise InputError(
            f"{path} describes {len(features)} pictures and at least {LEAST} are needed; give --reference DIR"
        )
    return features


@dataclass(frozen=True)
class Gaussian:
    """Mean [F] and covariance root^T root, root [R, F], of some features; float64."""

    mean: Tensor
    root: Tensor


def gaussian(features: Tensor) -> Gaussian:
    """The moments of features [M, F], M >= 2; R = min(M, F)."""
    features = features.double()
    mean = features.mean(0)
    centred = (features - mean) / math.sqrt(len(features) - 1)
    return Gaussian(mean, centred if len(features) <= len(mean) else torch.linalg.qr(centred, mode="r").R)


def frechet(one: Gaussian, other: Gaussian) -> float:
    """|m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)), at least 0 (FID, arXiv 1706.08500, section 3).

    With C = A^T A and C' = B^T B the product C C' has the eigenvalues of (A B^T)(A B^T)^T, so the trace of
    its square root is the sum of the singular values of A B^T. No matrix root is taken, and a singular
    covariance loses no digits.
    """
    means = (one.mean - other.mean).square().sum()
    shared = torch.linalg.svdvals(one.root @ other.root.T).sum()
    return max((means + one.root.square().sum() + other.root.square().sum() - 2 * shared).item(), 0.0)


def standard_error(features: Tensor, reference: Gaussian) -> float:
    """The standard error of the Fréchet distance of features [M, F] from a reference, by a jackknife over a few parts.

    The pictures are the random part, the reference is held fixed. The bias of few pictures, which makes
    every distance too long, is not in it.
    """
    parts = min(JACKKNIFE_PARTS, len(features) // 2)
    if parts < 2:
        return math.nan
    # shuffled, as pictures come prompt by prompt
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    group = (order % parts).to(features.device)
    left = [frechet(gaussian(features[group != part]), reference) for part in range(parts)]
    without = torch.tensor(left, dtype=torch.float64)
    return math.sqrt((parts - 1) * without.var(correction=0).item())


def precision_recall(generated: Tensor, reference: Tensor) -> tuple[float, float]:
    """Features [M, F] and [N, F], at least `LEAST` of each -> (precision, recall), each 0 to 1 (arXiv 1904.06991, equation 2).

    Precision is the share of generated pictures within the reference's manifold: closer to some reference
    picture than that one's third nearest other. Recall is the same the other way round.
    """
    generated, reference = generated.double(), reference.double()
    return share_within(generated, reference), share_within(reference, generated)


def share_within(points: Tensor, manifold: Tensor) -> float:
    """The share of points [M, F] that lie in a ball around one of manifold [N, F] (equation 1)."""
    # to the third nearest other; the nearest of all is the point itself
    radii = [torch.cdist(part, manifold).kthvalue(NEAREST + 1, 1).values for part in manifold.split(CHUNK)]
    radius = torch.cat(radii)
    inside = [(torch.cdist(part, manifold) <= radius).any(1) for part in points.split(CHUNK)]
    return torch.cat(inside).double().mean().item()
