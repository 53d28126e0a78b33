"""One running group for all tests of a session that need one: it takes ten seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from system.group import Group, can_use_namespaces, running_group


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Group g1 with etcd and metaservers."""
    network = "netns" if can_use_namespaces() else "loopback"
    with running_group(tmp_path_factory.mktemp("cluster"), network) as found:
        yield found
