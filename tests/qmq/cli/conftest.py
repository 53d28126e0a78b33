"""Fixtures: a metaserver with canned answers, and the command line on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_support import Command, FakeMeta, serving

from qmq.cli import output


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeMeta, Command]]:
    """Both; tables have room for all they say."""
    monkeypatch.setattr(output.console, "width", 160)
    with serving() as (meta, address):
        yield meta, Command(address)


@pytest.fixture
def meta(served: tuple[FakeMeta, Command]) -> FakeMeta:
    return served[0]


@pytest.fixture
def qmq(served: tuple[FakeMeta, Command]) -> Command:
    return served[1]
