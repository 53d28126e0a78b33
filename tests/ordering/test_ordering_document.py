"""docs/ORDERING.md names tests: they are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_document_names_exists() -> None:
    named = set(
        re.findall(r"`(test_hazard_\w+)`", (TESTS.parent / "docs" / "ORDERING.md").read_text())
    )
    source = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    missing = {name for name in named if f"def {name}(" not in source}
    assert not missing
    assert len({re.findall(r"\d+", name)[0] for name in named}) == 20


def test_every_hazard_has_a_test() -> None:
    source = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    numbers = {int(number) for number in re.findall(r"def test_hazard_(\d+)_", source)}
    assert numbers == set(range(1, 21))
