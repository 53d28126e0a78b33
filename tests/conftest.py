"""Fixtures: a node in this process, a node in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support import NodeProcess, node_config, running

from qmq.node.dev import Node

settings.register_profile("ci", deadline=None, max_examples=100, derandomize=False)
settings.load_profile("ci")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node on an empty folder."""
    async with running(node_config(tmp_path / "node")) as found:
        yield found


@pytest.fixture
def node_process(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node process, not started yet; killed at the end."""
    found = NodeProcess(tmp_path / "node")
    yield found
    found.kill()
