"""What a method's settings say: which dials its parts read, and what becomes of the others."""

from __future__ import annotations

import pytest

from lanternpp.errors import InputError
from lanternpp.methods import METHODS
from lanternpp.settings import DIALS, dials_read, resolve


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_dials_its_parts_read_and_no_other(name: str) -> None:
    row = METHODS[name]
    read = dials_read(row.proposer, row.accept)
    settings = resolve(name, {}, {})
    for dial in DIALS:
        said = getattr(row, dial)
        assert getattr(settings, dial) == said and (dial in read or said is None), dial


def test_a_dial_of_the_row_goes_with_the_part_that_read_it() -> None:
    settings = resolve("lantern++", {}, {"accept": "exact"})
    assert (settings.neighbours, settings.lam, settings.tree) == (None, None, "lantern-57")
    settings = resolve("lantern++", {"methods": {"lantern++": {"lam": 5.0}}}, {"proposer": "jacobi"})
    assert (settings.lam, settings.tree) == (5.0, None)
    assert resolve("jacobi", {}, {"proposer": "tree"}).tree == "eagle-25"
    assert resolve("lantern", {"methods": {"lantern": {"lam": 3.0}}}, {}).lam is None


def test_a_dial_that_is_asked_for_and_read_by_no_part_is_refused() -> None:
    with pytest.raises(InputError, match=r"lambda 2.0 would change nothing.*they take tree$"):
        resolve("eagle", {}, {"lam": 2.0})
    with pytest.raises(InputError, match="tree chain-2 would change nothing"):
        resolve("jacobi", {}, {"tree": "chain-2"})
    assert resolve("eagle", {}, {"lam": None}).lam is None
    with pytest.raises(InputError, match="option 'lamda' is unknown; did you mean 'lam'"):
        resolve("lantern++", {}, {"lamda": 2.0})
