"""`qmq outbox`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from outbox_support import committed_rows, engine_of, left
from sqlalchemy import text
from support.databases import Database
from typer.testing import CliRunner

import qmq.blocking
from qmq.cli.app import app
from qmq.sql.dialects import DIALECTS
from qmq.sql.outbox_tables import migration

pytestmark = pytest.mark.sampled


def say(*words: str) -> str:
    """The output of a command, which must succeed."""
    found = CliRunner().invoke(app, ["outbox", *words])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_command_prints_the_tables() -> None:
    for dialect in DIALECTS:
        assert say("migration", "--dialect", dialect, "--table", "shop_7") == migration(
            dialect, "shop_7"
        )
    assert CliRunner().invoke(app, ["outbox", "migration", "--dialect", "oracle"]).exit_code == 2


def test_what_was_set_aside_is_shown_retried_and_dropped(database: Database) -> None:
    with engine_of(database) as engine:
        ids = committed_rows(engine, [("order", b"body", b"k-%d" % number) for number in range(4)])
        with engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE qmq_outbox SET state = 1, attempts = 3, last_error = 'too large' "
                    "WHERE id < 4"
                )
            )
        for url in (database.sync_url, database.async_url):
            rows = json.loads(say("list", "--db", url, "--json"))
            assert [(row["subject"], row["key"], row["state"]) for row in rows[2:]] == [
                ("order", "k-2", "set aside"),
                ("order", "k-3", "waits"),
            ]
            assert rows[0]["last_error"] == "too large"
            assert rows[0]["attempts"] == 3
            assert rows[0]["message_id"] == str(ids[0])
        assert len(json.loads(say("list", "--db", database.sync_url, "--aside", "--json"))) == 3
        assert (
            len(json.loads(say("list", "--db", database.sync_url, "--limit", "1", "--json"))) == 1
        )
        assert '"messages": 1' in say("drop", "--db", database.sync_url, "2", "--dry-run", "--json")
        assert '"messages": 1' in say("drop", "--db", database.sync_url, "2", "--json")
        assert '"messages": 1' in say("retry", "--db", database.sync_url, "1", "4", "--json")
        assert [(row.id, row.state) for row in left(engine, "id, state")] == [
            (1, 0),
            (3, 1),
            (4, 0),
        ]
        assert '"messages": 1' in say("drop", "--db", database.sync_url, "--all", "--json")
        assert [row.id for row in left(engine, "id")] == [1, 4]


@pytest.mark.parametrize(
    "words", [("retry",), ("drop",), ("drop", "--all", "7"), ("list", "--table", "a b")]
)
def test_a_command_that_names_nothing_or_too_much_is_refused(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    found = CliRunner().invoke(
        app, ["outbox", *words, "--db", f"sqlite:///{tmp_path / 'x.sqlite'}"]
    )
    assert found.exit_code == 2, found.output


def test_a_missing_database_and_one_without_an_outbox_are_reported() -> None:
    for url, status in (("nonsense", 2), ("oracle+nodriver://x", 2), ("sqlite://", 3)):
        found = CliRunner().invoke(app, ["outbox", "list", "--db", url])
        assert found.exit_code == status, found.output


def test_the_watchdog_as_a_process_sends_and_ends_on_sigterm(
    tmp_path: Path, database: Database, node_address: str
) -> None:
    with engine_of(database) as engine:
        committed_rows(engine, [("order", b"left", b"k")])
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "qmq.cli",
                "outbox",
                "watchdog",
                "--db",
                database.async_url,
                "--server",
                node_address,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            with (
                qmq.blocking.connect(node_address) as mq,
                mq.consumer("order", "readers") as consumer,
            ):
                assert next(iter(consumer)).body == b"left"
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 0
        assert "watching 1 outboxes" in out
        assert left(engine) == []
        assert (
            left(
                engine,
                "lease_until",
                "(SELECT lease_until, 1 AS id FROM qmq_outbox_lease) AS lease",
            )[0].lease_until
            == 0
        )
