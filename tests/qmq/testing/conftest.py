"""The plugin. An application's tests get it by the entry point; these tests import it."""

from __future__ import annotations

from qmq.testing.plugin import pytest_configure, qmq_cluster

__all__ = ["pytest_configure", "qmq_cluster"]
