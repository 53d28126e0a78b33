"""Fixtures: a cluster with the machine's clock, a console for it, a browser that is logged in."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.console import PlainBrowser, page, site_of, stage

from qmq.testing import TestCluster

__all__ = ["browser", "cluster", "page", "stage"]


@pytest.fixture
async def cluster() -> AsyncIterator[TestCluster]:
    """One broker and a delay server."""
    async with TestCluster() as found:
        yield found


@pytest.fixture
async def browser(cluster: TestCluster) -> AsyncIterator[PlainBrowser]:
    """Logged in at a console that only reads."""
    site = site_of(cluster)
    yield await PlainBrowser(site).log_in()
    await site.close()
