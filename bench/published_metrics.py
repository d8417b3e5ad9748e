"""FID, HPSv2 or ImageReward of a folder of `bench`, by the package that papers use; each needs an environment of its own.

    pip install clean-fid==0.1.35;                       python bench/published_metrics.py fid PICTURES REFERENCE
    pip install hpsv2x==1.2.0;                           python bench/published_metrics.py hpsv2 PICTURES
    pip install image-reward==1.5 'transformers<4.56';   python bench/published_metrics.py image-reward PICTURES

hpsv2x is hpsv2 with the tokenizer's vocabulary, which hpsv2 1.2.0 lacks.
PICTURES holds metadata.jsonl, whose lines have a file_name and a text, as `out/bench/pictures/METHOD` does.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

SIDE = 256  # pixels of LANTERN's FID (eval_fid_clip.py of jadohu/LANTERN)


def crop(pixels: np.ndarray) -> np.ndarray:
    """Crop [H, W, 3] uint8 as torchvision's center_crop, and resample the square to [SIDE, SIDE, 3] with Lanczos' filter."""
    image = Image.fromarray(pixels)
    side = min(image.size)
    left, top = round((image.width - side) / 2), round((image.height - side) / 2)
    square = image.crop((left, top, left + side, top + side))
    return np.array(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def fid(pictures: str, reference: str) -> float:
    """Return the Fréchet distance of clean-fid."""
    import torch
    from cleanfid import fid

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return fid.compute_fid(reference, pictures, device=device, custom_image_tranform=crop)


def mean_score(pictures: str, score: Callable[[str, str], float]) -> float:
    """Return the mean of `score(prompt, path)` over the pictures."""
    rows = map(json.loads, (Path(pictures) / "metadata.jsonl").read_text(encoding="utf-8").splitlines())
    return float(np.mean([score(row["text"], str(Path(pictures) / row["file_name"])) for row in rows]))


def hpsv2(pictures: str) -> float:
    """Return the mean of HPSv2.1."""
    import hpsv2

    return mean_score(pictures, lambda text, path: hpsv2.score(path, text, hps_version="v2.1")[0])


def image_reward(pictures: str) -> float:
    """Return the mean of ImageReward 1.0."""
    # The package imports OpenAI's clip for other scores, and does not install it.
    sys.modules["clip"] = ModuleType("clip")
    import ImageReward

    return mean_score(pictures, ImageReward.load("ImageReward-v1.0").score)


METRICS: dict[str, Callable[..., float]] = {"fid": fid, "hpsv2": hpsv2, "image-reward": image_reward}

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        sys.exit()
    if len(sys.argv) != (4 if sys.argv[1:2] == ["fid"] else 3) or sys.argv[1] not in METRICS:
        sys.exit(__doc__)
    print(METRICS[sys.argv[1]](*sys.argv[2:]))
