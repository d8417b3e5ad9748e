"""What `lanternpp tune` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from lanternpp.tuning.run import Tuning

SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RANKS = 8  # columns of the table of acceptances
SURE = 20  # children judged, below which an acceptance is mostly a guess


def show(told: Mapping[str, Any], found: Tuning) -> None:
    """The figures as tables on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title="how often a child is kept, % (by depth and rank; guesses in brackets)", title_justify="left"
    )
    table.add_column("depth")
    tried, chances = told["acceptance"]["tried"], told["acceptance"]["table"]
    for rank in range(min(RANKS, len(chances[0]))):
        table.add_column(str(rank), justify="right")
    for depth, (counts, row) in enumerate(zip(tried, chances, strict=True)):
        cells = [
            f"{100 * p:.0f}" if c >= SURE else f"({100 * p:.0f})" for c, p in zip(counts, row, strict=True)
        ]
        table.add_row(str(depth), *cells[:RANKS])
    console.print(table)

    at, cost = told["costs"]["look"]["at"], told["costs"]["look"]["cost"]
    table = Table(title="a target pass, ms, by nodes with the root", title_justify="left")
    for count in at:
        table.add_column(str(count), justify="right")
    table.add_row(*(f"{1000 * seconds:.3g}" for seconds in cost))
    console.print(table)
    every, level, inner, node = (1000 * share for share in told["costs"]["draft"])
    console.print(
        f"drafting, ms: {every:.2f} + {level:.2f} per level + {inner:.2f} per node with children + {node:.3f} per node"
    )

    table = Table(title="the best tree of each size, predicted", title_justify="left")
    for heading in ("nodes", "depth", "codes / pass", "codes / s", "speed-up"):
        table.add_column(heading, justify="right")
    for size in told["sizes"]:
        if size["nodes"] in SHOWN:
            table.add_row(*_cells(size), f"{size['speedup']:.2f}x")
    console.print(table)
    show_tree(found)
    show_race(told)
    show_budget(told)
    typer.echo(
        f"{told['folder']}/tune.json" + (f"; now the default: {told['file']}" if "file" in told else "")
    )


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

    from lanternpp.tuning.report import drawn

    branches: dict[tuple[int, ...], Tree] = {
        (): Tree("the tree found: rank, and how often a pass keeps the node")
    }
    for path, share in drawn(found).items():
        if path:
            branches[path] = branches[path[:-1]].add(f"{path[-1]}  {100 * share:.1f} %")
    Console().print(branches[()])


def show_race(told: Mapping[str, Any]) -> None:
    """Predicted beside measured, for the tree found and the hand-made ones."""
    from rich.console import Console
    from rich.table import Table

    plain = told["plain"]
    table = Table(
        title="predicted and measured", title_justify="left",
        caption=f"measured: {plain['images']} pictures each, taking turns with plain AR" if plain else None,
    )  # fmt: skip
    table.add_column("tree")
    for heading in ("nodes", "depth", "codes / pass", "measured", "speed-up", "measured"):
        table.add_column(heading, justify="right")
    for tree in told["trees"]:
        nodes, depth, codes, _ = _cells(tree)
        seen = tree["measured"]
        row = [
            nodes,
            depth,
            codes,
            f"{seen['codes_per_pass']:.2f}" if seen else "-",
            f"{tree['speedup']:.2f}x",
        ]
        row.append(f"{seen['speedup']:.2f}x" if seen else "-")
        table.add_row(tree["name"], *row, style="bold" if tree["name"] == "tuned" else None)
    Console().print(table)


def show_budget(told: Mapping[str, Any]) -> None:
    """What was chosen within a budget, and how sure its figure is."""
    if "budget" not in told:
        return
    budget, dials = told["budget"], told["settings"]
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
