"""Grids of pictures, comparisons with figures under each side, and PNGs with text chunks. Needs only Pillow."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import IO

from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo

from lanternpp.util.files import replacing

PAPER, INK, QUIET, ACCENT = "#ffffff", "#1a1a1a", "#5c5c5c", "#b3470e"
MARGIN = 32  # pixels around everything, and between panels
TITLE, HEADING, FIGURE = 26, 26, 20  # font sizes in pixels
LINE_HEIGHT = 1.4  # over font size
BAR_HEIGHT = 10  # pixels of a bar under a figure
font = ImageFont.load_default  # at a size in pixels
MAX_PIXELS = 1 << 26  # of a picture that is read
UPLOADED = ("PNG", "JPEG", "WEBP")  # some of Pillow's other decoders start programs
PNG_END = bytes.fromhex("00 00 00 00 49 45 4E 44 AE 42 60 82")  # the chunk that closes a PNG


@dataclass(frozen=True)
class Panel:
    """One side of a comparison: pictures of one size, a heading and figures to print under them."""

    images: Sequence[Image.Image]
    heading: str
    figures: Sequence[str]
    highlight: str = ""  # printed last, in colour
    shares: Sequence[float] = ()  # of the width, 0 to 1: bars that compare the sides, one under each figure


def grid(images: Sequence[Image.Image], gap: int = 2) -> Image.Image:
    """Return pictures of one size as a nearly square grid, row by row, with `gap` pixels between. A single picture stays as it is."""
    if len(images) == 1:
        return images[0].convert("RGB")
    columns = squarest(len(images))
    width, height = images[0].size
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), PAPER)
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        sheet.paste(image, (column * (width + gap), row * (height + gap)))
    return sheet


def squarest(count: int) -> int:
    """Return the columns of a nearly square grid of `count` pictures."""
    return math.ceil(math.sqrt(count))


def enlarged_grid(images: Sequence[Image.Image], side: int) -> Image.Image:
    """Return a grid about `side` pixels wide at most, enlarged by an integer factor, so that every pixel stays a sharp square."""
    factor = max(1, side // (squarest(len(images)) * max(images[0].size)))
    return grid([ImageOps.scale(image, factor, Image.Resampling.NEAREST) for image in images], gap=4)


def comparison(title: str, panels: Sequence[Panel], side: int = 512) -> Image.Image:
    """Draw panels side by side under a title, each picture or grid about `side` pixels wide."""
    sheets = [enlarged_grid(panel.images, side) for panel in panels]
    width = max(side, *(sheet.width for sheet in sheets))
    height = max(sheet.height for sheet in sheets)
    title_lines = wrap(title, TITLE, len(panels) * (width + MARGIN) - MARGIN)
    top = MARGIN + round(len(title_lines) * TITLE * LINE_HEIGHT + TITLE * 0.6)
    num_lines = max(len(panel.figures) + (1 if panel.highlight else 0) for panel in panels)
    bars = max(len(panel.shares) for panel in panels) * 2 * BAR_HEIGHT
    text = round((HEADING + num_lines * FIGURE) * LINE_HEIGHT + FIGURE) + bars
    canvas = Image.new("RGB", (len(panels) * (width + MARGIN) + MARGIN, top + height + text + MARGIN), PAPER)
    draw = ImageDraw.Draw(canvas)
    write(draw, title_lines, (MARGIN, MARGIN), TITLE, INK)
    for i, (panel, sheet) in enumerate(zip(panels, sheets, strict=True)):
        left = MARGIN + i * (width + MARGIN)
        canvas.paste(sheet, (left, top))
        y = write(draw, [fit(panel.heading, HEADING, width)], (left, top + height + FIGURE), HEADING, INK)
        for line, share in zip_longest(panel.figures, panel.shares):
            y = write(draw, [fit(line, FIGURE, width)], (left, y), FIGURE, QUIET)
            if share is not None:
                bar = (left, y, left + max(1, round(share * width)) - 1, y + BAR_HEIGHT - 1)
                draw.rectangle(bar, fill=ACCENT if panel.highlight else QUIET)
                y += 2 * BAR_HEIGHT
        if panel.highlight:
            write(draw, [fit(panel.highlight, FIGURE, width)], (left, y), FIGURE, ACCENT)
    return canvas


def digests(pictures: Sequence[Image.Image]) -> str:
    """Return the hashes of the pictures' pixels, for notes."""
    return " ".join(sha256(picture.tobytes()).hexdigest()[:16] for picture in pictures)


def save_png(image: Image.Image, path: Path, notes: Mapping[str, str]) -> None:
    """Write a PNG with `notes` as text chunks and without a date, completely or not at all; make its folder. InputError."""
    with replacing(path) as temporary:
        temporary.write_bytes(png_bytes(image, notes))


def png_bytes(image: Image.Image, notes: Mapping[str, str]) -> bytes:
    """Return the bytes that `save_png` writes."""
    buffer, chunks = io.BytesIO(), PngInfo()
    for key, value in notes.items():
        chunks.add_text(key, value)
    image.save(buffer, format="PNG", pnginfo=chunks)
    return buffer.getvalue()


def open_image(path: Path | IO[bytes]) -> Image.Image | str:
    """Read a picture as RGB, with a PNG's notes in its `info`, or return the error's text. Open files must have a format of `UPLOADED`."""
    try:
        with Image.open(path, formats=None if isinstance(path, Path) else UPLOADED) as file:
            if file.width * file.height > MAX_PIXELS:
                return f"it has {file.width}x{file.height} pixels, more than {MAX_PIXELS:,}"
            return as_rgb(ImageOps.exif_transpose(file))
    except FileNotFoundError:
        return "missing"
    # Decoders raise errors of many kinds for damaged files and metadata.
    except Exception as error:
        return str(error).replace(str(path), "").strip(" ':") or type(error).__name__


def as_rgb(image: Image.Image) -> Image.Image | str:
    """Convert a picture to RGB, transparency to white, greys of 16 bits to 8; or return the reason why that is impossible."""
    if image.mode.startswith("I;16"):  # `convert` would clip them
        return image.convert("I").point(lambda grey: grey / 256).convert("L").convert("RGB")
    if image.mode in ("I", "F"):
        return "its pixels are numbers of 32 bits without a known white: save it as a PNG of 8 or 16 bits"
    if image.has_transparency_data:
        sheet = Image.new("RGBA", image.size, PAPER)
        sheet.alpha_composite(image.convert("RGBA"))
        # Pillow would make this colour transparent again if a caller converted the picture.
        sheet.info = {name: value for name, value in image.info.items() if name != "transparency"}
        image = sheet
    return image.convert("RGB")


def png_notes(path: Path) -> dict[str, str] | None:
    """Read the text chunks of a PNG; return None for another format, and for a truncated or damaged file."""
    try:
        with path.open("rb") as file:
            file.seek(-len(PNG_END), os.SEEK_END)
            if file.read() != PNG_END:
                return None
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            return {str(key): value for key, value in image.info.items() if isinstance(value, str)}
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def write(draw: ImageDraw.ImageDraw, lines: Sequence[str], xy: tuple[int, int], size: int, ink: str) -> int:
    """Draw lines of text down from their top left corner `xy`; return the y of the next line."""
    left, top = xy
    for line in lines:
        draw.text((left, top), line, fill=ink, font=font(size))
        top += round(size * LINE_HEIGHT)
    return top


def wrap(text: str, size: int, width: int, max_lines: int = 3) -> list[str]:
    """Wrap text into at most `max_lines` lines of at most `width` pixels; longer text ends in an ellipsis."""
    lines, words = [""], text.split()
    for i, word in enumerate(words):
        longer = f"{lines[-1]} {word}".strip()
        if not lines[-1] or font(size).getlength(longer) <= width:
            lines[-1] = longer
        elif len(lines) < max_lines:
            lines.append(word)
        else:
            lines[-1] = " ".join([lines[-1], *words[i:]])
            break
    return [fit(line, size, width) for line in lines]


def fit(text: str, size: int, width: int) -> str:
    """Truncate text to `width` pixels, with an ellipsis."""
    if font(size).getlength(text) <= width:
        return text
    text = text[:width]  # a character takes a pixel or more
    while text and font(size).getlength(text.rstrip() + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
