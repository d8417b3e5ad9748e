"""A tiny drafter's training from nothing: pictures drawn, features kept, steps; for a process that may be killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import torch

from lanternpp.training.drafter import DrafterSettings, train
from lanternpp.training.run import Plan
from lanternpp.training.samples import Own

STEPS = 12


def learn(model: str, life: float | None = None) -> None:
    """Train the drafter of a model, with a state after every step and shards of four pictures.

    After `life` seconds of its own work, whatever else the machine does, the system ends the process.
    """
    torch.set_num_threads(1)
    place, began = Path(model), time.process_time()
    if life is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # nothing of ours runs when it comes, as with SIGKILL
        signal.setitimer(signal.ITIMER_PROF, life)
    (place / "mine").write_text("red tulip\na tulip\n")
    from lanternpp.training import cached

    cached.SHARD = 1 << 14
    plan = Plan(place / "drafter", STEPS, checks=2, log_steps=5, save_minutes=0)
    settings = DrafterSettings(loss="guided", batch_size=3, warmup=2)
    assert train(None, place, 1, settings, plan, own=Own(place / "mine", 12, 1), follow=True, cache=True)
    (place / "work").write_text(str(time.process_time() - began))
