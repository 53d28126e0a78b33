"""The table of docs/INTEGRATIONS.md has each integration's length."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "qmq" / "integrations"
PARTS = {
    "celery": ["kombu", "cluster_link.py"],
    "http": ["http", "cloud_event.py"],
    "taskiq": ["taskiq.py"],
    "django": ["django", "pending_listeners.py"],
    "dramatiq": ["dramatiq.py", "cluster_link.py"],
    "faststream": ["faststream", "local_messages.py"],
    "fastapi": ["fastapi.py", "starlette.py", "pending_listeners.py"],
}
"""Each extra's folders and files."""


def length(extra: str) -> int:
    paths = [SOURCES / part for part in PARTS[extra]]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("extra", PARTS)
def test_the_table_has_the_lines_of_an_integration(extra: str) -> None:
    row = next(
        line
        for line in (ROOT / "docs" / "INTEGRATIONS.md").read_text().splitlines()
        if f"| `{extra}` |" in line
    )
    told = re.search(r"\| (\d+) \|$", row)
    assert told is not None
    assert int(told[1]) == length(extra), f"docs/INTEGRATIONS.md: the lines of {extra}"


def test_every_integration_is_in_the_table() -> None:
    found = {path.name for path in SOURCES.iterdir() if not path.name.startswith("__")}
    assert found == {part for parts in PARTS.values() for part in parts}
