"""Draws pictures that are to be measured: the prompt and seed of each, and the statistics of all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lanternpp.api.pipeline import Pipeline, Result, Stats

CHUNK = 32  # pictures drawn before they are handed over


@dataclass(frozen=True)
class EvaluationRequest:
    """A picture to draw."""

    prompt: str
    seed: int


def evaluation_requests(prompts: Sequence[str], n: int, seed: int) -> list[EvaluationRequest]:
    """n pictures over some prompts: evenly over them where they are more, in turn where they are fewer.

    Their seeds are seed, seed + 1 and so on: pictures of the same seed share their noise, whatever the prompt, and too few
    seeds would make plain decoding, whose noise is at the same places in every picture, look less varied than it is.
    """
    count = len(prompts)
    chosen = (prompts[i * count // n if n < count else i % count] for i in range(n))
    return [EvaluationRequest(prompt, seed + i) for i, prompt in enumerate(chosen)]


def draw(
    pipe: Pipeline,
    requests: Sequence[EvaluationRequest],
    method: str,
    progress: Callable[[int, int], None] | None = None,
    **overrides: Any,
) -> Iterator[tuple[Sequence[EvaluationRequest], Result]]:
    """Draw a list of requests, a chunk at a time. progress is called with (codes done, total). InputError before the first is drawn."""
    size = min(overrides.pop("batch_size", min(len(requests), 8)), CHUNK)
    length = pipe.target.length
    for start in range(0, len(requests), CHUNK):
        part = requests[start : start + CHUNK]

        def report_progress(done: int, total: int, before: int = start * length) -> None:
            if progress:
                progress(before + done, len(requests) * length)

        prompts, seeds = [request.prompt for request in part], [request.seed for request in part]
        yield (
            part,
            pipe(prompts, seed=seeds, method=method, progress=report_progress, batch_size=size, **overrides),
        )


def combined_stats(parts: Sequence[Stats]) -> Stats:
    """The statistics of several runs with the same settings, summed up as one."""
    images, codes = sum(s.images for s in parts), sum(s.codes for s in parts)
    passes, seconds = sum(s.passes for s in parts), sum(s.seconds for s in parts)
    tv_cost = [value for s in parts for value in s.tv_cost_per_image]
    return replace(
        parts[0],
        images=images,
        codes=codes,
        passes=passes,
        codes_per_pass=codes / passes,
        seconds=seconds,
        seconds_per_image=seconds / images,
        accepted_per_pass=[count for s in parts for count in s.accepted_per_pass],
        tv_cost=sum(tv_cost) / len(tv_cost) if tv_cost else None,
        tv_cost_per_image=tv_cost,
    )
