"""A node for the tests of integrations, as a process of its own: task queues bring threads and processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import NodeProcess


@pytest.fixture(scope="package")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a node that all tests of a worker share; each test has names of its own."""
    node = NodeProcess(tmp_path_factory.mktemp("node"))
    yield node.start()
    node.kill()
