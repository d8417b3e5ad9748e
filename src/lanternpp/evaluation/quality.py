"""Quality of pictures: their distance from a reference, and their agreement with their prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import has_classifier, read_reference
from lanternpp.evaluation.clip import Clip
from lanternpp.evaluation.distances import NEAREST, frechet, gaussian, precision_recall, standard_error
from lanternpp.evaluation.features import EXTRACTORS, ClassifierFeatures, Extractor, extract
from lanternpp.evaluation.pictures import Gallery, reference_folder
from lanternpp.util.devices import pick_device
from lanternpp.util.progress import Progress
from lanternpp.util.registry import find, importable

LEAST = NEAREST + 1  # pictures: precision and recall need that many neighbours of each, and itself


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
        extractor = classifier if classifier and kind is ClassifierFeatures else kind.open(folder, on)
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
        prompts: Sequence[str | None] | None = None,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """The figures of pictures and, where they are known, their prompts; see the class for their names.

        A figure of prompts is left out where no prompt serves it. Raises InputError below four pictures.
        """
        if len(images) < LEAST:
            raise InputError(f"{len(images)} pictures are too few to measure; at least {LEAST} are needed")
        prompts = prompts if prompts is not None else [None] * len(images)
        if len(prompts) != len(images):
            raise InputError(
                f"{len(prompts)} prompts do not go with {len(images)} pictures; give one for each"
            )
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
        pattern = " ".join(f"{re.escape(word)}(?:e?s)?" for word in label)
        if label and (there := re.search(rf"\b{pattern}\b", text)):
            found.append((there.start(), -len(label), number))
    return min(found)[2] if found else None


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"[^\W_]+", text.lower())
