"""A sheet of 6 x 6 pictures, four of each subject of nature-128, to compare two models by eye.

    python bench/sheet.py --model nature-128 --out after.png [--method ar] [--seed 0]

Every model draws the same prompts with the same seeds. The script prints the prompts, a line for each row of the sheet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lanternpp import InputError, Pipeline
from lanternpp.api.picture import grid

PROMPTS = [
    *("a photo of a white daisy", "a photo of a daisy on a green background"),
    *("a photo of a daisy under a blue sky", "a photo of a yellow daisy"),
    *("a photo of a dandelion", "a photo of a yellow dandelion on a green background"),
    *("a photo of a white dandelion", "a photo of a dandelion under a blue sky"),
    *("a photo of a red rose", "a photo of a pink rose on a green background"),
    *("a photo of a white rose", "a photo of a yellow rose"),
    *("a photo of a sunflower", "a photo of a yellow sunflower"),
    *("a photo of a sunflower under a blue sky", "a photo of a sunflower on a green background"),
    *("a photo of a red tulip", "a photo of a pink tulip on a green background"),
    *("a photo of a yellow tulip", "a photo of a purple tulip"),
    *("a photo of a forest", "a photo of a forest in autumn"),
    *("a photo of a forest in the mist", "a photo of a forest covered in snow"),
    *("a photo of a glacier", "a photo of a glacier under a blue sky"),
    *("a photo of a glacier under a cloudy sky", "a photo of a glacier at sunset"),
    *("a photo of a mountain", "a photo of a mountain under a blue sky"),
    *("a photo of a mountain covered in snow", "a photo of a mountain at sunset"),
    *("a photo of the sea", "a photo of the sea under a blue sky"),
    *("a photo of the sea under a cloudy sky", "a photo of the sea at sunset"),
]
COLUMNS = 6


def main() -> None:
    """Draw the pictures, and write the sheet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="nature-128")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", default="ar")
    parser.add_argument("--cfg", type=float, help="classifier-free guidance; default: the model's")
    parser.add_argument("--seed", type=int, default=0, help="of the first picture; the next has the next")
    args = parser.parse_args()
    try:
        pipe = Pipeline.from_pretrained(args.model)
        output = pipe(PROMPTS, method=args.method, seed=args.seed, cfg=args.cfg)
    except InputError as error:
        parser.error(str(error))
    grid(output.images).save(args.out)
    for row in range(0, len(PROMPTS), COLUMNS):
        print("; ".join(prompt.removeprefix("a photo of ") for prompt in PROMPTS[row : row + COLUMNS]))


if __name__ == "__main__":
    main()
