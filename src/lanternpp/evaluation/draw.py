"""Pictures to be measured, drawn here: which prompt and seed each has, and what drawing all of them took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lanternpp.pipeline import Pipeline, Result, Stats

PART = 32  # pictures drawn before they are handed over


@dataclass(frozen=True)
class Order:
    """A picture to draw."""

    prompt: str
    seed: int


def orders(prompts: Sequence[str], n: int, seed: int) -> list[Order]:
    """n pictures over some prompts: evenly over them where they are more, in turn where they are fewer.

    The pictures of one prompt have seed, seed + 1, ..., so that `generate` draws the same ones.
    """
    count = len(prompts)
    chosen = [prompts[i * count // n if n < count else i % count] for i in range(n)]
    had: Counter[str] = Counter()
    made = []
    for prompt in chosen:
        made.append(Order(prompt, seed + had[prompt]))
        had[prompt] += 1
    return made


def draw(
    pipe: Pipeline,
    wanted: Sequence[Order],
    method: str,
    progress: Callable[[int, int], None] | None = None,
    **overrides: Any,
) -> Iterator[tuple[Sequence[Order], Result]]:
    """Draw a list of orders, a part at a time. progress is told of codes. Raises InputError before the first."""
    size = {"batch_size": min(len(wanted), 8)}
    length = pipe.target.length
    for start in range(0, len(wanted), PART):
        part = wanted[start : start + PART]

        def tell(done: int, total: int, before: int = start * length) -> None:
            if progress:
                progress(before + done, len(wanted) * length)

        prompts, seeds = [order.prompt for order in part], [order.seed for order in part]
        yield part, pipe(prompts, seed=seeds, method=method, progress=tell, **(size | overrides))


def together(parts: Sequence[Stats]) -> Stats:
    """What several runs with the same settings took, as one."""
    images, codes = sum(s.images for s in parts), sum(s.codes for s in parts)
    passes, seconds = sum(s.passes for s in parts), sum(s.seconds for s in parts)
    spent = [value for s in parts for value in s.tv_spent_per_image]
    return replace(
        parts[0],
        images=images,
        codes=codes,
        passes=passes,
        codes_per_pass=codes / passes,
        seconds=seconds,
        seconds_per_image=seconds / images,
        accepted_per_pass=[count for s in parts for count in s.accepted_per_pass],
        tv_spent=sum(spent) / len(spent) if spent else None,
        tv_spent_per_image=spent,
    )
