"""The fixtures of tests that read the log as files."""

from __future__ import annotations

from file_support import traffic  # noqa: F401 - a fixture
