"""docs/PROMISES.md and docs/SECURITY.md name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "PROMISES.md").read_text()


def test_every_promise_names_a_test_and_every_test_that_is_named_exists() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert sorted(set(named) - tests) == []
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| promise")
    ]
    assert len(rows) > 30
    assert [row for row in rows if "`test_" not in row] == []


def test_every_attack_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "SECURITY.md").read_text().partition("## Attacks")[2]
    rows = [
        line
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| attack")
    ]
    assert len(rows) > 50
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(
                rf"^(async )?def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE
            ), f"{file}::{test}"
