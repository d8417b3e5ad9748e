"""The parts of the page as HTML: pictures, bands of passes, figures, the verdict and the gallery."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from PIL import Image

from lanternpp.methods import METHODS
from lanternpp.serve.page.race import Frame, Picture, Side
from lanternpp.serve.pictures import encode

BRACES = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def text(words: object) -> str:
    """Text that no browser and no template takes for anything else."""
    return html.escape(str(words)).translate(BRACES)


def jpeg(image: Image.Image) -> str:
    """A picture to look at, as an address of its own."""
    return f"data:image/jpeg;base64,{encode(image, 'jpeg')}"


def bands(accepted: Iterable[int], seen: int, columns: int, rows: int, width: int) -> str:
    """Which codes came in one pass, as SVG: neighbouring passes in alternating tints.

    accepted: codes by each pass, of which the first `seen` codes can be seen. width: codes of a row, those that end it and are not drawn among them.
    """
    paths: tuple[list[str], list[str]] = ([], [])
    at = 0
    for turn, count in enumerate(accepted):
        end = min(at + count, seen)
        while at < end:
            row, column = divmod(at, width)
            stop = min(end, (row + 1) * width)
            long = min(stop - row * width, columns) - column
            if long > 0:
                paths[turn % 2].append(f"M{column} {row}h{long}v1h-{long}z")
            at = stop
    shapes = "".join(f'<path class="tint{i}" d="{"".join(path)}"/>' for i, path in enumerate(paths))
    return (
        f'<svg class="bands" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" '
        f'aria-hidden="true">{shapes}</svg>'
    )


@dataclass(frozen=True)
class Look:
    """What does not change from frame to frame."""

    columns: int  # of codes in a picture
    rows: int
    width: int  # codes of a row, with those that end it

    def panel(self, side: Side | None, method: str, title: str) -> str:
        """One side of the race; None: before the first."""
        head = f'<h2>{text(title)} <span class="name">{text(method)}</span></h2>'
        if side is None:
            return f'<section class="panel">{head}{self._empty(1)}{_figures(None)}</section>'
        pictures = "".join(self._picture(picture, side) for picture in side.pictures)
        most = side.length * len(side.pictures)
        return (
            f'<section class="panel">{head}'
            f'<div class="pictures n{len(side.pictures)}">{pictures}</div>'
            f'<progress max="{most}" value="{side.decided}" aria-label="{text(method)}: codes decided">'
            f"</progress>{_figures(side)}</section>"
        )

    def _empty(self, count: int) -> str:
        grey = f'<div class="picture blank" style="aspect-ratio:{self.columns}/{self.rows}"></div>'
        bar = '<progress max="1" value="0" aria-hidden="true"></progress>'
        return f'<div class="pictures n{count}">{grey * count}</div>{bar}'

    def _picture(self, picture: Picture, side: Side) -> str:
        shape = f"aspect-ratio:{self.columns}/{self.rows}"
        if picture.image is None:
            return f'<div class="picture blank" style="{shape}"></div>'
        state = "finished" if picture.drawn else f"{picture.decided} of {side.length} codes"
        alt = f"{side.settings.method}, seed {picture.seed}: {state}"
        return (
            f'<div class="picture" style="{shape}"><img alt="{text(alt)}" '
            f'src="{jpeg(picture.image)}">'
            f"{bands(picture.accepted, picture.seen, self.columns, self.rows, self.width)}</div>"
        )


def _figures(side: Side | None) -> str:
    """The figures under a side's pictures."""
    named = {"seconds": "–", "codes per pass": "–", "passes": "–"}  # noqa: RUF001
    if side is not None and side.passes:
        several = len(side.pictures) > 1
        named = {
            "seconds a picture" if several else "seconds": f"{side.seconds:.2f}",
            "codes per pass": f"{side.per_pass:.2f}",
            "passes a picture" if several else "passes": f"{side.passes / len(side.pictures):.0f}",
        }
        if side.tv_spent is not None and side.settings.measure:
            named["TV spent"] = f"{side.tv_spent:.1f}"
    cells = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in named.items())
    return f'<dl class="figures">{cells}</dl>'


def verdict(frame: Frame | None) -> str:
    """Who leads, or who won."""
    if frame is None:
        return note("Plain decoding and your method draw the same seed side by side. Press Race.", "idle")
    base, side = frame.base, frame.side
    if not frame.finished:
        if not base.passes and not side.passes:
            return note("Waiting for a free place …", "running")
        share = [round(100 * s.decided / (s.length * len(s.pictures))) for s in (base, side)]
        return note(f"Plain decoding {share[0]}\u00a0%, {side.settings.method} {share[1]}\u00a0%", "running")
    times, method = frame.speedup, side.settings.method
    each = " a picture" if len(side.pictures) > 1 else ""
    took = f"{side.seconds:.2f} s{each} where plain decoding took {base.seconds:.2f} s"
    if times >= 1.005:
        return won(f"{times:.1f}×", f"{method} won: {took}.")  # noqa: RUF001
    if times > 0.995:
        return won("1.0×", f"A draw: {took}.")  # noqa: RUF001
    return won(f"{times:.2f}×", f"Plain decoding won: {method} took {took}.")  # noqa: RUF001


def won(figure: str, sentence: str) -> str:
    """The line of the winner."""
    return (
        f'<p class="verdict won" role="status"><strong>{text(figure)}</strong> '
        f"<span>{text(sentence)}</span></p>"
    )


def note(sentence: str, kind: str) -> str:
    """A sentence; kind: idle, running, stopped or wrong. Wrong is read out at once, running never."""
    role = {"wrong": ' role="alert"', "stopped": ' role="status"'}.get(kind, "")
    sentence = sentence[:1].upper() + sentence[1:] + ("" if sentence.endswith((".", "…")) else ".")
    return f'<p class="verdict {kind}"{role}>{text(sentence)}</p>'


@dataclass(frozen=True)
class Shot:
    """A picture of the gallery."""

    png: str  # to keep, an address of its own
    jpeg: str  # to look at, another
    prompt: str
    method: str
    seed: int
    seconds: float
    per_pass: float
    name: str  # of its file


def gallery(shots: Sequence[Shot]) -> str:
    """All pictures of the session, the latest first."""
    if not shots:
        return '<p class="quiet">Every picture you draw is kept here until you close the page.</p>'
    return f'<ul class="gallery">{"".join(_shot(shot) for shot in reversed(shots))}</ul>'


def _shot(shot: Shot) -> str:
    facts = f"{shot.method} · seed {shot.seed} · {shot.seconds:.2f} s · {shot.per_pass:.2f} codes per pass"
    return (
        f'<li><a href="{shot.png}" download="{text(shot.name)}" title="Save this picture as PNG">'
        f'<img src="{shot.jpeg}" alt="{text(shot.prompt)}, {text(shot.method)}, seed {shot.seed}">'
        f'<span class="save">Save PNG</span></a><p class="prompt">{text(shot.prompt)}</p>'
        f'<p class="facts">{text(facts)}</p></li>'
    )


def about(method: str) -> str:
    """One sentence on a method."""
    sentence = METHODS[method].about
    return f'<p class="quiet">{text(sentence[:1].upper() + sentence[1:])}.</p>'
