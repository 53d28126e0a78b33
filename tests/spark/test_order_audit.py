"""The job order_audit on a real node: no finding through splits, merges and moves; a planted
violation is reported with its counterexample.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from publishing import change_route, create_ordered, send, send_ordered, until_in_files
from pyspark.sql import SparkSession
from pyspark_qmq.jobs.job import common_parser, main
from pyspark_qmq.jobs.order_audit import JOB, ordered_subjects, reads_to_end
from support import NodeProcess

from qmq.columns.model import QueueKey, Routes, SourceQueue, Topology
from qmq.columns.servers.log import ServerAddress
from qmq.errors import InvalidArgument, OrderMismatch
from qmq.proto.v1 import meta_pb2 as pb

KEYS = [f"key-{number}" for number in range(40)]


def rounds(first: int, end: int) -> list[tuple[str, str]]:
    """One message for each key and number, number by number."""
    return [(key, json.dumps({"n": number})) for number in range(first, end) for key in KEYS]


def changed_under_way(server: str) -> None:
    """Numbers 0 to 79 of each key, with a split, a merge and two moves between them."""
    create_ordered(server, "s", 2)
    changes: list[dict[str, Any]] = [
        {"split": pb.SplitOperation(partition=1)},
        {"merge": pb.MergeOperation(partitions=[4, 2])},
        {"move": pb.MoveOperation(partition=3, broker_group=group_of(server, "s"))},
        {"move": pb.MoveOperation(partition=5, broker_group=group_of(server, "s"))},
    ]
    for at, change in enumerate(changes):
        send_ordered(server, "s", rounds(16 * at, 16 * (at + 1)))
        change_route(server, "s", **change)
    send_ordered(server, "s", rounds(64, 80))


def group_of(server: str, subject: str) -> str:
    return next(iter(topology(server, subject).queues)).broker_group


def topology(server: str, subject: str) -> Topology:
    log = ServerAddress(server, 10_000).open()
    try:
        return log.topology([subject])
    finally:
        log.close()


def write_routes(path: Path, subject: str, routes: Routes) -> None:
    """Write the routes as `qmq route export` does."""
    parts = [
        {
            "number": part.number,
            "first_lp": part.lps.first,
            "end_lp": part.lps.end,
            "broker_group": part.broker_group,
            "version": part.version,
            "sources": list(part.sources),
        }
        for part in routes.partitions.values()
    ]
    found = {
        "subject": subject,
        "order": "strict",
        "logical_partitions": routes.logical_partitions,
        "version": routes.version,
        "partitions": parts,
        "sealed_at": {str(number): at for number, at in routes.sealed_at.items()},
    }
    path.write_text(json.dumps({"format": "qmq-routes", "version": 1, "subjects": [found]}))


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "order_audit.json").read_text())
    return found


@pytest.mark.sampled
def test_the_audit_of_a_real_log_is_clean_and_finds_what_is_planted(
    spark: SparkSession,
    node_process: NodeProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = node_process.start()
    changed_under_way(server)
    here = ["--servers", server, "--subject", "s"]
    out = tmp_path / "clean"
    assert main(JOB, [*here, "--by", "json:n", "--dense", "--out", str(out)], spark) == 0, (
        capsys.readouterr().err
    )
    found = result(out)
    assert found["headline"].startswith(
        "log order is sending order, judged by json:n, and no message follows a seal: 3,200 "
        "messages of 40"
    )
    assert (
        found["facts"]["keys checked against the hash"],
        found["facts"]["in-order replays"],
    ) == (40, 0)
    assert found["tables"][1]["rows"][0][5] == 5
    assert (out / "order_audit.html").stat().st_size > 10_000
    assert not (out / "violations.parquet").exists()

    send_ordered(server, "s", [(KEYS[7], json.dumps({"n": 20}))])
    out = tmp_path / "planted"
    assert main(JOB, [*here, "--by", "json:n", "--out", str(out)], spark) == 1
    found = result(out)
    assert [row[1:4] for row in found["tables"][0]["rows"]] == [["reorder", "number_order", 1]]
    lines = found["counterexample"].splitlines()
    assert lines[0] == "subject s: reorder"
    assert lines[2].split() == ["key", KEYS[7]]
    assert [
        line.split()[3] for line in lines if "lies" in line and "number" in line and "," in line
    ] == ["79,", "20,"]
    (violation,) = spark.read.parquet(str(out / "violations.parquet")).collect()
    assert (violation["subject"], violation["rule"], bytes(violation["key"])) == (
        "s",
        "number_order",
        KEYS[7].encode(),
    )

    until_in_files(node_process.data, "s", 3_201)
    routes = topology(server, "s").routes["s"]
    early = Routes(
        routes.logical_partitions,
        routes.version,
        routes.partitions,
        {**routes.sealed_at, 1: routes.sealed_at[1] - 2},
    )
    write_routes(tmp_path / "early.json", "s", early)
    here = ["--path", str(node_process.data), "--subject", "s", "--json"]
    capsys.readouterr()
    assert main(JOB, [*here, "--routes", str(tmp_path / "early.json")], spark) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["messages"] == 3_201
    assert found["facts"]["judged by"] == "create_time"
    assert [row[1:4] for row in found["tables"][0]["rows"]] == [["after_seal", "behind_seal", 2]]
    assert main(JOB, here, spark) == 2
    assert "the routes of subject 's' are not known" in capsys.readouterr().err

    send(server, "plain", ["x"])
    assert main(JOB, ["--servers", server, "--subject", "plain"], spark) == 2
    assert "[E113] subject 'plain' is unordered" in capsys.readouterr().err


# --- what is asked --------------------------------------------------------------------------------


def arguments(*argv: str) -> argparse.Namespace:
    return common_parser(JOB).parse_args(list(argv))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], True),
        (["--from", "2026-11-21"], True),
        (["--until", "2026-11-21"], False),
        (["-o", 'endingOffsets={"s":{"1@g":5}}'], False),
    ],
)
def test_ends_are_checked_where_nothing_is_left_out_there(argv: list[str], expected: bool) -> None:
    assert reads_to_end(arguments(*argv)) is expected


def test_an_audit_of_some_messages_only_is_refused(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(JOB, ["--servers", "localhost:1", "--subject", "s", "-o", "keyFrom=a"], spark) == 2
    assert "leave out option keyFrom" in capsys.readouterr().err


def test_losses_are_counted_by_numbers_only(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(JOB, ["--servers", "localhost:1", "--subject", "s", "--dense"], spark) == 2
    assert "--by header:NAME" in capsys.readouterr().err
    assert main(JOB, ["--servers", "localhost:1", "--subject", "s", "--by", "clock"], spark) == 2
    assert "create_time, header:NAME or json:FIELD" in capsys.readouterr().err


def test_only_subjects_with_routes_are_audited() -> None:
    ordered, plain, unknown = QueueKey("a", 1, "g"), QueueKey("b", 0, "g"), QueueKey("c", 2, "g")
    routes = {"a": Routes(8, 1, {})}
    queues = {key: SourceQueue(key, 0, 1) for key in (ordered, plain)}
    assert ordered_subjects(Topology(queues, routes), is_named=False) == ["a"]
    with pytest.raises(OrderMismatch, match="'b' is unordered"):
        ordered_subjects(Topology(queues, routes), is_named=True)
    with pytest.raises(OrderMismatch, match="none of these"):
        ordered_subjects(Topology({plain: queues[plain]}), is_named=False)
    with pytest.raises(InvalidArgument, match="qmq route export"):
        ordered_subjects(Topology({unknown: SourceQueue(unknown, 0, 1)}), is_named=False)
