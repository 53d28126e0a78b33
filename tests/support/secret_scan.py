"""Searches the output of all tests for secrets: prints, logs, written logs and audit files, and
texts of errors.

It recognises every token that any test makes, because tokens, JWTs and private keys have unique
forms. A test that must print one is marked `prints_secrets`. A test registers values of another
form, such as passwords, by `plant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PATTERNS: Final = (
    re.compile(r"qmq_[0-9a-f]{12}_[A-Za-z0-9_-]{43}"),
    re.compile(r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}"),
    re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----"),
)
HINTS: Final = ("qmq_", "eyJ", "PRIVATE KEY")
"""A text without any of these matches no pattern, so most texts need only this check."""
OUTPUTS: Final = ("*.log", "*.out", "*.err", "audit*", "stdout", "stderr")
"""Files that processes of a test write for people."""

_planted: set[str] = set()


def plant(secret: str) -> str:
    """A value that is to be found nowhere, from here on; the value."""
    _planted.add(secret)
    return secret


def found_in(text: str) -> str:
    """The first secret in a text, mostly masked; empty if there is none."""
    for secret in _planted:
        if secret in text:
            return f"the planted {secret[:4]}..."
    if not any(hint in text for hint in HINTS):
        return ""
    for pattern in PATTERNS:
        match = pattern.search(text)
        if match is not None:
            return f"{match[0][:12]}..."
    return ""


def outputs_in(folder: Path) -> Iterator[tuple[Path, str]]:
    """The texts that a test's processes wrote, by file."""
    for pattern in OUTPUTS:
        for path in folder.rglob(pattern):
            if path.is_file():
                yield path, path.read_text(errors="replace")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test whose output holds a secret has failed."""
    report: pytest.TestReport = (yield).get_result()  # type: ignore[misc]
    if report.when != "teardown" or item.get_closest_marker("prints_secrets"):
        return
    texts = [(name, text) for name, text in report.sections]
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if folder is not None and item.path.parts[-2] in ("security", "system"):
        texts += [(str(path), text) for path, text in outputs_in(folder)]
    for name, text in texts:
        if found := found_in(text):
            report.outcome = "failed"
            report.longrepr = f"a secret is in {name}: {found}"
