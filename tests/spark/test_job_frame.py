"""The frame of jobs: exit status, arguments, errors. No Spark is needed for it: jobs are handed an
object in its place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark_qmq import jobs
from pyspark_qmq.jobs.job import (
    checked_source,
    common_parser,
    error_line,
    main,
    projection,
    read_log,
    source_options,
)
from pyspark_qmq.jobs.report import Report

from qmq.errors import InvalidArgument, UnknownSubject

SPARK: Any = object()


class Probe:
    """A job that runs the test's function."""

    name = "probe"
    summary = "Looks."

    def __init__(self, act: Callable[[argparse.Namespace], Report]) -> None:
        self._act = act

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--depth", type=int, default=3)

    def run(self, spark: Any, args: argparse.Namespace) -> Report:
        return self._act(args)


def finding(is_clean: bool) -> Probe:
    return Probe(
        lambda args: Report("probe", f"looked {args.depth} deep", is_clean, {"depth": args.depth})
    )


def failing(error: BaseException) -> Probe:
    def act(_: argparse.Namespace) -> Report:
        raise error

    return Probe(act)


def parsed(*argv: str) -> argparse.Namespace:
    return common_parser(finding(True)).parse_args(argv)


@pytest.mark.parametrize(("is_clean", "status"), [(True, 0), (False, 1)])
def test_the_exit_status_says_whether_anything_was_found(
    is_clean: bool, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(finding(is_clean), ["--depth", "7"], SPARK) == status
    assert "looked 7 deep" in capsys.readouterr().out


def test_an_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(failing(UnknownSubject("subject 'x'\ndoes not exist")), [], SPARK) == 2
    printed = capsys.readouterr()
    assert printed.err == "error: [E105] subject 'x' does not exist\n"
    assert printed.out == ""


def test_an_error_that_spark_wrapped_is_unwrapped() -> None:
    wrapped = AnalysisException(
        "[PYTHON_DATA_SOURCE_ERROR] Failed when using Python data source\nTraceback (most "
        "recent call last):\n"
        '  File "spark/pyspark_qmq/source.py", line 1, in '
        "partitions\nqmq.errors.NotConnected: [E301] no server\n\nDuring handling …\n"
        "qmq.errors.MessagesExpired: [E110] orders/0@g1 begins at 70, needed is 20\n"
    )
    assert error_line(wrapped) == "[E110] orders/0@g1 begins at 70, needed is 20"
    assert (
        error_line(AnalysisException("no such table\nat line 3"))
        == "AnalysisException: no such table"
    )
    assert (
        error_line(OSError(28, "No space left on device"))
        == "OSError: [Errno 28] No space left on device"
    )


def test_ctrl_c_is_not_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(failing(KeyboardInterrupt()), [], SPARK) == 2
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_bug_is_not_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(failing(ZeroDivisionError("oops")), [], SPARK) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status"), [(["--help"], 0), (["--dept", "3"], 2), (["--depth", "x"], 2)]
)
def test_arguments_that_are_wrong_are_status_2_and_help_is_not(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(finding(True), argv, SPARK) == status
    printed = capsys.readouterr()
    assert "qmq spark probe" in printed.out + printed.err


def test_wrong_source_options_are_refused_before_the_job_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(failing(AssertionError("the job ran")), ["--from", "yesterday"], SPARK) == 2
    assert "'yesterday' is not a time" in capsys.readouterr().err


def test_json_is_for_machines_and_the_report_goes_to_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(finding(False), ["--json", "--out", str(tmp_path / "out")], SPARK) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["job"], found["is_clean"], found["facts"]) == ("probe", False, {"depth": 3})
    assert (tmp_path / "out" / "probe.html").is_file()
    assert json.loads((tmp_path / "out" / "probe.json").read_text())["command"].startswith(
        "qmq spark probe --json --out"
    )


def test_the_output_names_the_folder_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(finding(True), ["--out", str(tmp_path)], SPARK)
    assert f"report: {tmp_path / 'probe.html'}" in capsys.readouterr().out


def test_arguments_become_options_of_the_source() -> None:
    found = source_options(
        parsed(
            "--servers",
            "h:1,h:2",
            "--path",
            "/a",
            "--path",
            "/b",
            "--routes",
            "r",
            "--subject",
            "x",
            "--subject",
            "y",
        )
    )
    assert found == {
        "qmq.servers": "h:1,h:2",
        "qmq.path": "/a,/b",
        "qmq.routes": "r",
        "subscribe": "x,y",
    }
    assert source_options(parsed("--pattern", "a.*")) == {"subscribePattern": "a.*"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--from", "earliest", "--until", "latest"], {}),
        (["--from", "latest"], {"startingOffsets": "latest"}),
        (["--from", "1970-01-02"], {"startingTimestamp": "86400000"}),
        (["--from", "1970-01-01T01:00:00+01:00"], {"startingTimestamp": "0"}),
        (["--until", "1970-01-01T00:00:01.5Z"], {"endingTimestamp": "1500"}),
        (["-o", "tags=a,b=c", "-o", "minPartitions=4"], {"tags": "a,b=c", "minPartitions": "4"}),
        (["--path", "/a", "-o", "qmq.path=/b"], {"qmq.path": "/b"}),
    ],
)
def test_times_and_options_are_read(argv: list[str], expected: dict[str, str]) -> None:
    assert source_options(parsed(*argv)) == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--from", "2026-01-01T00:00:00"], "no time zone"),
        (["--until", "soon"], "not a time"),
        (["-o", "tags"], "KEY=VALUE"),
        (["-o", "=x"], "KEY=VALUE"),
        (["--subject", "a", "--pattern", "b"], "not both"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        source_options(parsed(*argv))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"subscribe": "x"}, "give the log"), ({"qmq.path": "/a"}, "give the subjects")],
)
def test_a_read_says_what_it_lacks(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        checked_source(options)
    assert checked_source({"qmq.path": "/a", "qmq.log": "deliveries"})


def test_only_the_columns_that_are_asked_for_are_read() -> None:
    calls: list[tuple[str, Any]] = []

    class Reader:
        def __getattr__(self, name: str) -> Callable[..., Reader]:
            def call(*arguments: Any, **named: Any) -> Reader:
                calls.append((name, arguments or named))
                return self

            return call

    class Session:
        read = Reader()

    session: Any = Session()
    read_log(
        session, parsed("--path", "/a", "--subject", "x"), ["sequence", "place"], minPartitions="4"
    )
    found = dict(calls)
    assert found["format"] == ("qmq",)
    assert found["schema"][0].simpleString() == "struct<sequence:bigint,place:int>"
    assert found["options"] == {"qmq.path": "/a", "subscribe": "x", "minPartitions": "4"}
    with pytest.raises(InvalidArgument, match="no column 'offset'"):
        projection(["offset"])


def test_a_job_that_does_not_exist_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert jobs.run("order-adit", []) == 2
    assert "did you mean order_audit?" in capsys.readouterr().err
    assert jobs.run("xyz", []) == 2
    assert "archive, order_audit" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(jobs.JOBS))
def test_every_job_that_is_listed_is_there_and_takes_the_common_arguments(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = import_module(f"pyspark_qmq.jobs.{name}").JOB
    assert job.name == name
    assert main(job, ["--help"], SPARK) == 0
    assert "--servers" in capsys.readouterr().out
