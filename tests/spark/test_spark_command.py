"""`qmq spark` lists the jobs, and passes a job's arguments on unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from pyspark_qmq import jobs
from typer.testing import CliRunner

from qmq.cli.app import app

ORDER_AUDIT = ["--subject", "orders", "-o", "a=b", "--dry-run", "--", "-x", "--help"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Records the requested jobs, without running them."""
    found: list[tuple[str, list[str]]] = []

    def run(name: str, argv: Sequence[str]) -> int:
        found.append((name, list(argv)))
        return 1

    monkeypatch.setattr(jobs, "run", run)
    return found


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_alone_it_lists_every_job(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["spark", *words], terminal_width=200)
    assert done.exit_code == 0
    assert all(name in done.stdout for name in jobs.JOBS)


def test_a_job_gets_its_words_untouched_and_gives_the_exit_status(
    asked: list[tuple[str, list[str]]],
) -> None:
    assert CliRunner().invoke(app, ["spark", "order-audit", *ORDER_AUDIT]).exit_code == 1
    assert asked == [("order-audit", ORDER_AUDIT)]


def test_an_unknown_job_is_refused_with_the_nearest_name() -> None:
    done = CliRunner().invoke(app, ["spark", "duplicate"])
    assert done.exit_code == 2
    assert "did you mean duplicates?" in done.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(['py4j', 'pyspark']))"
    program = f"{missing}; from qmq.cli.app import app; app(['spark', 'order_audit'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    said = re.sub("py4j|pyspark", "NAME", done.stderr)
    assert said == (
        "error: [E102] qmq spark needs another package (NAME is missing): pip install "
        "'qmq[spark-jobs]'\n"
    )


def test_the_command_line_loads_nothing_of_spark_before_it_is_used() -> None:
    program = (
        "import sys; from qmq.cli.app import COMMANDS, loaded; "
        "[loaded(each) for each in COMMANDS]; print(sorted({'pyspark', 'pyspark_qmq', 'pyarrow', "
        "'matplotlib', 'py4j'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        == "[]\n"
    )
