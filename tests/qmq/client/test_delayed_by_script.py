"""Delayed messages by scripts without asyncio, and by `qmq produce`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from fake_cluster import DelayCluster, delay_cluster, message
from typer.testing import CliRunner, Result

from qmq import blocking
from qmq.cli.app import app
from qmq.errors import InvalidArgument, TooLate
from qmq.model import DelayedId
from qmq.proto.v1 import delay_pb2
from qmq.proto.v1 import meta_pb2 as pb

NINE = datetime(2027, 1, 15, 8, tzinfo=UTC)
NINE_MS = 1_800_000_000_000
_R = TypeVar("_R")


async def apart(it: DelayCluster, work: Callable[[blocking.BlockingClient], _R]) -> _R:
    """Run in a separate thread, because the call blocks."""

    def run() -> _R:
        with blocking.connect(it.meta.address) as mq:
            return work(mq)

    return await asyncio.to_thread(run)


async def test_scripts_send_later() -> None:
    async with delay_cluster() as it:
        receipt = await apart(it, lambda mq: mq.send("s", b"a", key="k", at=NINE))
        await apart(it, lambda mq: mq.send("s", b"b", delay=timedelta(hours=1)))
        await apart(it, lambda mq: mq.send("s", b"c", cron="0 9 * * *", zone="UTC"))
        await apart(
            it, lambda mq: mq.send_many("s", [b"d", b"e"], ats=[NINE, NINE + timedelta(seconds=1)])
        )
        await apart(it, lambda mq: mq.send_many("s", [b"f"], delays=timedelta(hours=1)))
        assert DelayedId.parse(str(receipt.delayed_id)).due_ms == NINE_MS
        found = {each.body: each for each in it.kept}
        assert sorted(found) == [b"a", b"b", b"c", b"d", b"e", b"f"]
        assert (found[b"d"].due_ms, found[b"e"].due_ms) == (NINE_MS, NINE_MS + 1000)
        assert found[b"c"].headers["qmq-zone"] == b"UTC"


async def test_scripts_cancel_move_show_and_list() -> None:
    async with delay_cluster() as it:
        id = f"{1:032x}-1-1-d0"
        it.meta.answers = {
            "CancelDelayed": [message(id, state="cancelled"), TooLate("delivered")],
            "MoveDelayed": [lambda request: message(id, due_ms=request.due_ms)],
            "ShowDelayed": [message(id, body=b"x")],
            "ListDelayed": [
                delay_pb2.ListDelayedResponse(messages=[message(id)], next="1"),
                delay_pb2.ListDelayedResponse(),
            ],
            "DescribeDelays": [pb.DescribeDelaysResponse(silent={"d1": "away"})],
        }
        assert (await apart(it, lambda mq: mq.delayed.cancel(id))).state == "cancelled"
        with pytest.raises(TooLate):
            await apart(it, lambda mq: mq.delayed.cancel(id))
        assert (await apart(it, lambda mq: mq.delayed.move(id, NINE))).due == NINE
        assert (await apart(it, lambda mq: mq.delayed.show(id))).body == b"x"
        assert [
            each.id
            for each in await apart(it, lambda mq: list(mq.delayed.list("s", start=NINE, limit=5)))
        ] == [id]
        assert (await apart(it, lambda mq: mq.delayed.stats())).silent == {"d1": "away"}


async def test_scripts_get_errors_in_json() -> None:
    async with delay_cluster() as it:
        with pytest.raises(InvalidArgument, match="time zone"):
            await apart(it, lambda mq: mq.send("s", b"x", at=datetime(2027, 1, 1)))


# --- the command line -----------------------------------------------------------------------------


async def produce(it: DelayCluster, text: str, *options: str) -> Result:
    """`qmq produce s`, with this on its standard input."""
    line = ["produce", "s", "--server", it.meta.address, *options]
    return await asyncio.to_thread(CliRunner().invoke, app, line, input=text)


async def test_produce_delays_each_line_and_prints_what_cancels_it() -> None:
    async with delay_cluster() as it:
        before = time.time_ns() // 1_000_000
        result = await produce(it, "a\nb\nc\n", "--delay", "10m", "--key", "k", "--json")
        assert result.exit_code == 0, result.output
        assert sorted(each.body for each in it.kept) == [b"a", b"b", b"c"]
        assert {each.key for each in it.kept} == {b"k"}
        rows = json.loads(result.stdout)
        assert len(rows) == 3
        ids = [DelayedId.parse(row["delayed_id"]) for row in rows]
        assert sorted(each.due_ms for each in ids) == sorted(each.due_ms for each in it.kept)
        assert len({each.message_id for each in ids}) == 3
        assert all(
            before + 600_000 <= each.due_ms <= time.time_ns() // 1_000_000 + 600_001 for each in ids
        )
        assert [
            datetime.fromisoformat(row["due"]).timestamp() * 1000 for row in rows
        ] == pytest.approx([each.due_ms for each in ids])


async def test_produce_delivers_at_a_time_and_shows_a_lone_messages_id_in_its_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qmq.cli.tables.console.width", 160)
    async with delay_cluster() as it:
        result = await produce(it, "a\n", "--at", "2027-01-15T09:00:00+01:00")
        assert result.exit_code == 0, result.output
        assert [each.due_ms for each in it.kept] == [NINE_MS]
        assert "1a3185c5000-" in result.stdout
        assert "2027-01-15T08:00:00" in result.stdout


async def test_produce_of_many_lines_counts_them_by_delay_group(tmp_path: Path) -> None:
    async with delay_cluster() as it:
        file = tmp_path / "lines"
        file.write_bytes(b"".join(b"%d\n" % number for number in range(2500)))
        result = await produce(it, "", "--at", "2027-01-15T08:00:00Z", "--file", str(file))
        assert result.exit_code == 0, result.output
        assert len(it.kept) == 2500
        assert "d0" in result.stdout
        assert "2,500" in result.stdout


async def test_produce_without_a_time_is_as_it_was() -> None:
    async with delay_cluster() as it:
        result = await produce(it, "a\nb\n", "--json")
        assert json.loads(result.stdout) == [{"subject": "s", "broker_group": "g0", "messages": 2}]
        assert it.groups[0].bodies == [b"a", b"b"]
        empty = await produce(it, "", "--delay", "1s", "--json")
        assert json.loads(empty.stdout) == [{"subject": "s", "broker_group": "", "messages": 0}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--delay", "soon"], "duration"),
        (["--at", "2027-01-15T09:00:00"], "time zone"),
        (["--at", "noon"], "is not a time"),
        (["--delay", "1s", "--at", "2027-01-15T09:00:00Z"], "not both"),
        (["--delay", "800d"], "732 days"),
    ],
)
async def test_produce_says_what_is_wrong_with_a_time(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("qmq.cli.tables.errors.print", lambda text, **_: said.append(text))
    async with delay_cluster() as it:
        result = await produce(it, "a\n", *options)
        assert result.exit_code == 2
        assert words in said[0]
        assert not it.kept
