"""The plugin, as an application's tests get it by the entry point; here it is imported."""

from __future__ import annotations

from qmq.testing.plugin import pytest_configure, qmq_cluster

__all__ = ["pytest_configure", "qmq_cluster"]
