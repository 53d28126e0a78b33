"""The runner on a suite of another project. `scripts/judges --all` runs all of them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from judges.runner import checkout_in, judge, lacking
from judges.suites import SUITES


@pytest.mark.long
def test_the_suite_of_kombu_holds() -> None:
    suite = SUITES["kombu"]
    if why_not := lacking(suite, None):
        pytest.skip(why_not)
    report = judge(suite, None)
    assert report.verdict.holds, f"{report.verdict}\n{report.output[-20_000:]}"


def test_a_suite_without_its_checkout_says_which_one_it_wants(tmp_path: Path) -> None:
    suite = SUITES["pyspark-streaming"]
    assert checkout_in(None, suite) is checkout_in(str(tmp_path), suite) is None
    wanted = f"git clone --branch v{version('pyspark')} --depth 1 https://github.com/apache/spark,"
    assert wanted in (lacking(suite, None) or "")
    (tmp_path / "spark").mkdir()
    assert checkout_in(str(tmp_path), suite) == tmp_path / "spark"
