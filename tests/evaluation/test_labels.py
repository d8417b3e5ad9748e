"""Which label a prompt names."""

import pytest

from lanternpp.evaluation.labels import label_of

LABELS = ("sea", "rose", "polar bear", "bear", "sea lion", "tree_frog")


@pytest.mark.parametrize(
    ("prompt", "label"),
    [
        ("a photo of the Sea, at sunset", "sea"),
        ("three roses by the sea", "rose"),
        ("polar bears", "polar bear"),
        ("a bear that is polar", "bear"),
        ("a sea lion on a rock", "sea lion"),
        ("tree frogs", "tree_frog"),
        ("a research vessel", None),
        ("prose", None),
        ("", None),
    ],
)
def test_the_label_named_first(prompt: str, label: str | None) -> None:
    found = label_of(prompt, LABELS)
    assert (None if found is None else LABELS[found]) == label
