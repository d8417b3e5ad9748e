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

from lanternpp.errors import InputError, counted
from lanternpp.evaluation.classifier import CLASSIFIER, REFERENCE, Classifier, fingerprint, has_classifier
from lanternpp.evaluation.features import EXTRACTORS, ClassifierFeatures, Clip, Extractor, extract
from lanternpp.evaluation.pictures import Gallery, reference_folder
from lanternpp.nn.files import check_finite, input_errors
from lanternpp.util.devices import pick_device
from lanternpp.util.registry import check_class, check_instance, find, given

NUM_NEIGHBOURS = 3  # k of precision and recall
MIN_PICTURES = NUM_NEIGHBOURS + 1  # precision and recall compare a picture with its neighbours
JACKKNIFE_PARTS = 16
CHUNK = 1024  # points whose distances are computed at once


@dataclass(frozen=True)
class Quality:
    """The measurements of pictures, with the networks and the reference that these need.

    frechet          Fréchet distance to the reference (lower is nearer); depends on how many pictures there are
    frechet_spread   its standard error over the pictures, by a jackknife
    precision        share of the pictures that are like the reference
    recall           share of the reference that is like some picture
    prompt_accuracy  share of the pictures for which the classifier predicts the label that the prompt names
    clip             CLIP score, up to 100
    """

    features: str | None  # the name of the extractor
    extractor: Extractor | None
    reference: Tensor | None  # features [N, F]
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
    ) -> Quality:
        """Open the networks and read the reference for the pictures of a model.

        reference: a folder of pictures; by default the features that lie beside the model's classifier. features:
        a name of `EXTRACTORS` or "package.module:Class"; by default the classifier. clip: a CLIP model's folder
        or hub id. A model without a classifier can still be measured by other features, or by CLIP alone.
        Raise InputError if something is missing or wrong.
        """
        if reference is not None and not reference.is_dir():
            raise InputError(f"reference {reference} is no folder; name one that holds pictures")
        device = pick_device(str(device))
        classifier = ClassifierFeatures(folder, device) if has_classifier(folder) else None
        scorer = Clip(clip, device) if clip else None
        if classifier is None and features is None and reference is None and scorer is not None:
            return cls(None, None, None, None, None, scorer)
        name = features or "classifier"
        kind = find("features", given("features", name), EXTRACTORS)
        check_class("features", name, kind, Extractor)
        extractor = classifier if classifier and kind is ClassifierFeatures else kind(folder, device)
        if kind not in EXTRACTORS.values():
            check_instance("features", name, extractor, Extractor, "side")
            check_features(name, extractor)
        if reference is not None:
            gallery = Gallery.read(reference_folder(reference), MIN_PICTURES)
            reference_features = extract(extractor, gallery, "reading the reference")
            reference_name = str(gallery.folder)
        elif classifier is not None and extractor is classifier:
            reference_features = read_reference(folder, classifier.classifier)
            reference_name = f"{folder.name}'s own"
        else:
            raise InputError(f"features {name} need --reference DIR, a folder of pictures to compare with")
        return cls(name, extractor, reference_features, reference_name, classifier, scorer)

    def measure(
        self,
        images: Sequence[Image.Image],
        prompts: Sequence[str | None] = (),
        label: str = "measuring",
    ) -> dict[str, float]:
        """Return the figures of pictures by the names that the class lists; prompts: of the pictures, or none.

        label: of the progress bar. A figure that needs prompts is left out if no prompt can be used. Raise InputError for fewer
        than `MIN_PICTURES` pictures.
        """
        if len(images) < MIN_PICTURES:
            raise InputError(
                f"{counted(len(images), 'picture')} cannot be measured; at least {MIN_PICTURES} are needed"
            )
        figures: dict[str, float] = {}
        features: Tensor | None = None
        if self.extractor and self.reference is not None:
            features = extract(self.extractor, images, label)
            reference = gaussian(self.reference)
            figures["frechet"] = frechet(gaussian(features), reference)
            figures["frechet_spread"] = standard_error(features, reference)
            figures["precision"], figures["recall"] = precision_recall(features, self.reference)
        if self.classifier:
            classes = self.classifier.classifier.config.labels
            labels = {i: label_of(prompt, classes) for i, prompt in enumerate(prompts) if prompt}
            labels = {i: label for i, label in labels.items() if label is not None}
            if labels:
                if features is None or self.extractor is not self.classifier:
                    features = extract(self.classifier, images, label)
                predicted = self.classifier.labels(features[list(labels)])
                correct = predicted == torch.tensor(list(labels.values()))
                figures["prompt_accuracy"] = correct.double().mean().item()
        score = self.clip.score(images, prompts, label) if self.clip else None
        return figures if score is None else figures | {"clip": score}


def check_features(name: str, extractor: Extractor) -> None:
    """Raise InputError unless the features of a picture are a tensor [1, F] of finite numbers."""
    side = extractor.side
    features = extractor(torch.arange(3 * side**2).remainder(251).byte().view(1, 3, side, side))
    is_row = isinstance(features, Tensor) and features.dim() == 2 and len(features) == 1
    if not is_row or not features.isfinite().all():
        raise InputError(
            f"features {name!r} of one picture are {features!r}; return a tensor [B, F] of finite numbers"
        )


def label_of(prompt: str, labels: Sequence[str]) -> int | None:
    """Return the index of the label that the prompt names first, in the singular or plural, or None if it names no label.

    The words of a label must be adjacent in the prompt; if two labels begin at the same word, the longer label counts.
    """
    text, matches = " ".join(words(prompt)), []
    for i, label in enumerate(map(words, labels)):
        pattern = " ".join(re.sub("y$", "(?:y|ie(?=s))", word) + "(?:e?s)?" for word in label)
        if label and (match := re.search(rf"\b{pattern}\b", text)):
            matches.append((match.start(), -len(label), i))
    return min(matches)[2] if matches else None


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def read_reference(folder: Path, classifier: Classifier) -> Tensor:
    """Read the features [M, F] that lie beside a classifier; raise InputError if these are missing, few or another classifier's."""
    path = folder / CLASSIFIER / REFERENCE
    if not path.is_file():
        raise InputError(f"{path} is missing; give --reference DIR, a folder of pictures to compare with")
    with input_errors(f"{path} cannot be read", "give --reference DIR"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            features = file.get_tensor("features").float()
        check_finite("features", features, path)
    if metadata.get("classifier") != fingerprint(classifier):
        raise InputError(f"{path} was made by other weights than {path.parent}'s; give --reference DIR")
    if len(features) < MIN_PICTURES:
        raise InputError(
            f"{path} describes {len(features)} pictures and at least {MIN_PICTURES} are needed; give --reference DIR"
        )
    return features


@dataclass(frozen=True)
class Gaussian:
    """Mean [F] and covariance root^T root, root [R, F], of features; float64."""

    mean: Tensor
    root: Tensor


def gaussian(features: Tensor) -> Gaussian:
    """Return the moments of features [M, F], M >= 2; R = min(M, F)."""
    features = features.double()
    mean = features.mean(0)
    centred = (features - mean) / math.sqrt(len(features) - 1)
    return Gaussian(mean, centred if len(features) <= len(mean) else torch.linalg.qr(centred, mode="r").R)


def frechet(generated: Gaussian, reference: Gaussian) -> float:
    """Return |m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)), at least 0 (FID, arXiv 1706.08500, section 3).

    With C = A^T A and C' = B^T B the product C C' has the eigenvalues of (A B^T)(A B^T)^T, so the trace of
    its square root is the sum of the singular values of A B^T. No matrix root is taken, and a singular
    covariance loses no digits.
    """
    means = (generated.mean - reference.mean).square().sum()
    shared = torch.linalg.svdvals(generated.root @ reference.root.T).sum()
    distance = means + generated.root.square().sum() + reference.root.square().sum() - 2 * shared
    return max(distance.item(), 0.0)


def standard_error(features: Tensor, reference: Gaussian) -> float:
    """Return the standard error of the Fréchet distance of features [M, F], M >= 4, from a reference, by a jackknife over parts.

    The pictures are the random part, the reference is held fixed. The error does not include the bias of few pictures, which makes
    every distance too long.
    """
    num_parts = min(JACKKNIFE_PARTS, len(features) // 2)
    # Pictures come prompt by prompt, so they are assigned to parts at random.
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    part_of = (order % num_parts).to(features.device)  # [M]
    distances = [frechet(gaussian(features[part_of != part]), reference) for part in range(num_parts)]
    variance = torch.tensor(distances, dtype=torch.float64).var(correction=0).item()
    return math.sqrt((num_parts - 1) * variance)


def precision_recall(generated: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return precision and recall, each 0 to 1, of features [M, F] and [N, F], at least `MIN_PICTURES` of each.

    Precision is the share of generated pictures that are closer to some reference picture than this picture's third nearest neighbour
    in the reference (arXiv 1904.06991, equation 2). Recall is the same with the two sets exchanged.
    """
    generated, reference = generated.double(), reference.double()
    return share_within(generated, reference), share_within(reference, generated)


def share_within(points: Tensor, manifold: Tensor) -> float:
    """Return the share of points [M, F] that lie in a ball around a point of the manifold [N, F] (equation 1)."""
    # The nearest of all is the point itself, which does not count as a neighbour.
    k = NUM_NEIGHBOURS + 1
    radii = [torch.cdist(part, manifold).kthvalue(k, dim=1).values for part in manifold.split(CHUNK)]
    radius = torch.cat(radii)  # [N]
    inside = [(torch.cdist(part, manifold) <= radius).any(dim=1) for part in points.split(CHUNK)]
    return torch.cat(inside).double().mean().item()
