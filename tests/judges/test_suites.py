"""Suites of other projects, which fail where a page does not say so. Those from packages run in the
long form; the others where `QMQ_CHECKOUTS` names a folder with checkouts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from judges.runner import judge, lacking
from judges.suites import SUITES

QUICK = {"kombu"}


def marked(name: str) -> object:
    suite = SUITES[name]
    marks = [pytest.mark.long if name in QUICK else pytest.mark.longest]
    marks += [pytest.mark.checkout] if suite.needs_checkout else []
    return pytest.param(name, marks=[*marks, pytest.mark.timeout(7200)])


@pytest.mark.parametrize("name", [marked(name) for name in SUITES if SUITES[name].project])
def test_a_suite_of_another_project_holds(name: str) -> None:
    suite, folder = SUITES[name], os.environ.get("QMQ_CHECKOUTS")
    checkout = Path(folder, suite.project.rpartition("/")[2]) if folder else None
    if checkout is not None and not checkout.is_dir():
        checkout = None
    if why_not := lacking(suite, checkout):
        pytest.skip(why_not)
    report = judge(suite, checkout)
    assert report.verdict.holds, f"{report.verdict}\n{report.output[-20_000:]}"
