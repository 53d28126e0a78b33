"""Fixtures: a metaserver with canned answers, and the command line on it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import typer.testing
from cli_support import Command, FakeMeta, serving
from typer.main import get_command

from qmq.cli import tables


@pytest.fixture(scope="session", autouse=True)
def _one_tree_of_commands() -> Iterator[None]:
    """Build the tree of all commands once: that is most of the work of a command in the process of
    the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(get_command))
        yield


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeMeta, Command]]:
    """Both; tables have room for all they say."""
    monkeypatch.setattr(tables.console, "width", 160)
    with serving() as (meta, address):
        yield meta, Command(address)


@pytest.fixture
def meta(served: tuple[FakeMeta, Command]) -> FakeMeta:
    return served[0]


@pytest.fixture
def qmq(served: tuple[FakeMeta, Command]) -> Command:
    return served[1]
