"""Tests of security log everything, so that a secret in a log that is off by default is found too (tests/support/secret_scan.py)."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
