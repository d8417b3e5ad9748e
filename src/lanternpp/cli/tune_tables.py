"""What `lanternpp tune` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from lanternpp.cli.tables import show_table

if TYPE_CHECKING:
    from lanternpp.tuning.trees import Tuning
    from lanternpp.tuning.windows import WindowTuning

SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RANKS = 8  # columns of the table of acceptances
SURE = 20  # children judged, below which an acceptance is mostly a guess


def show(result: Mapping[str, Any], found: Tuning | WindowTuning) -> None:
    """The figures as tables on stdout."""
    from lanternpp.tuning.trees import Tuning

    if isinstance(found, Tuning):
        show_search(result, found)
    else:
        show_windows(result)
    show_race(result)
    show_budget(result)
    typer.echo(
        f"{result['folder']}/tune.json" + (f"; now the default: {result['file']}" if "file" in result else "")
    )


def show_windows(result: Mapping[str, Any]) -> None:
    """Every window that was tried."""
    names = list(result["sizes"][0]["dials"])
    rows = [
        [
            *(str(size["dials"][name]) for name in names),
            str(size["nodes"]),
            f"{1000 * size['codes_per_draft'] / size['codes_per_second']:.3g}",
            f"{size['codes_per_pass']:.2f}",
            f"{size['codes_per_second']:.1f}",
            f"{size['speedup']:.2f}x",
        ]
        for size in result["sizes"]
    ]
    best = result["trees"][0]["dials"]
    show_table(
        (*names, "nodes", "ms", "codes / pass", "codes / s", "speed-up"),
        rows,
        "windows that were tried",
        left=(),
        bold=[place for place, size in enumerate(result["sizes"]) if size["dials"] == best],
    )


def show_search(result: Mapping[str, Any], found: Tuning) -> None:
    """What a search for a tree rests on, and the tree."""
    acceptance = result["acceptance"]
    chains = acceptance["chains"]
    apart = chains["tried"] != acceptance["tried"]  # they are verified in another way
    show_acceptance(acceptance, "how often a child is kept, % (by depth and rank; guesses in brackets)")
    if apart:
        show_acceptance(chains, "the same in chains, which are verified as a block", 1)
    at, cost = result["costs"]["look"]["at"], result["costs"]["look"]["cost"]
    rows = [[str(count), f"{1000 * seconds:.3g}"] for count, seconds in zip(at, cost, strict=True)]
    show_table(("nodes", "ms"), rows, "a target pass, by nodes with the root", left=())
    for kind in ("trees", "chains"):
        every, level, inner, node = (1000 * share for share in result["costs"][kind]["draft"])
        typer.echo(
            f"drafting {kind}, ms: {every:.2f} + {level:.2f} per level + {inner:.2f} per node with children "
            f"+ {node:.3f} per node"
        )
    sizes = [size for size in result["sizes"] if size["nodes"] in SHOWN]
    show_table(
        ("nodes", "depth", "codes / pass", "codes / s", "speed-up"),
        [[*_cells(size), f"{size['speedup']:.2f}x"] for size in sizes],
        "the best tree of each size, predicted",
        left=(),
    )
    show_tree(found)


def show_acceptance(found: Mapping[str, Any], title: str, most: int = RANKS) -> None:
    """A table of acceptances by depth, and by rank up to so many."""
    ranks = min(most, len(found["table"][0]))
    rows = [
        [str(depth), *(_share(p, c) for c, p in zip(counts, row, strict=True))][: ranks + 1]
        for depth, (counts, row) in enumerate(zip(found["tried"], found["table"], strict=True))
    ]
    show_table(("depth", *(f"rank {rank}" for rank in range(ranks))), rows, title)


def _share(chance: float, tried: int) -> str:
    """A share in per cent, in brackets where few children were judged."""
    return f"{100 * chance:.0f}" if tried >= SURE else f"({100 * chance:.0f})"


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        str(row["nodes"]),
        str(row["depth"]),
        f"{row['codes_per_pass']:.2f}",
        f"{row['codes_per_second']:.1f}",
    ]


def show_tree(found: Tuning) -> None:
    """The tree found, every node with its rank and how often a pass keeps it."""
    from rich.console import Console
    from rich.tree import Tree

    from lanternpp.tuning.report import kept_nodes

    branches: dict[tuple[int, ...], Tree] = {
        (): Tree("the tree found: rank, and how often a pass keeps the node")
    }
    for path, share in kept_nodes(found).items():
        if path:
            branches[path] = branches[path[:-1]].add(f"{path[-1]}  {100 * share:.1f} %")
    Console().print(branches[()])
    if found.chosen.min_survival:
        typer.echo(
            f"min_survival {found.chosen.min_survival:g}: a chain ends before a guess that is kept with less probability"
        )


def show_race(result: Mapping[str, Any]) -> None:
    """Predicted beside measured, for the tree found and the hand-made ones."""
    plain = result["plain"]
    rows = []
    for tree in result["trees"]:
        nodes, depth, codes, _ = _cells(tree)
        seen = tree["measured"]
        codes_seen, speed_seen = (
            (f"{seen['codes_per_pass']:.2f}", f"{seen['speedup']:.2f}x") if seen else ("-", "-")
        )
        rows.append([tree["name"], nodes, depth, codes, codes_seen, f"{tree['speedup']:.2f}x", speed_seen])
    show_table(
        ("draft", "nodes", "depth", "codes / pass", "measured", "speed-up", "measured"),
        rows,
        "predicted and measured",
        bold=[place for place, tree in enumerate(result["trees"]) if tree["name"] == "tuned"],
        caption=f"measured: {plain['images']} pictures each, taking turns with plain AR" if plain else None,
    )


def show_budget(result: Mapping[str, Any]) -> None:
    """What was chosen within a budget, and how sure its figure is."""
    if "budget" not in result:
        return
    budget, dials = result["budget"], result["settings"]
    spread = budget["spread"]
    sure = "" if spread is None else f" with a standard error of {spread:.3g}"
    typer.echo(
        f"k {dials.get('neighbours')}, lambda {dials.get('lam'):g}: spends {budget['spent']:.3g}{sure}, "
        f"of at most {budget['limit']:.3g}."
    )
    if plain := budget["plain"]:
        typer.echo(
            f"Plain AR, on which that limit rests: {plain['value']:.3g}, standard error {plain['spread']:.3g}."
        )
    if spread is not None and spread > abs(budget["limit"] - budget["spent"]):
        typer.echo("That error is wider than the room left: more --budget-pictures would make it surer.")
