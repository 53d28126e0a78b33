"""Tests of security log everything, so that a secret in a log that is off by default is found too
(tests/support/secret_scan.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from access_support import Papers


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path / "papers")
