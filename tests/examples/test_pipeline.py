"""The example of a data pipeline: its load, and a part of the flights through all of it, run as its
README says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import qmq
from examples.pipeline.departures import Departure, departures
from examples.pipeline.load import CHUNK, load
from qmq.node.dev_node import Node

ROOT = Path(__file__).resolve().parents[2]
FLIGHTS = 3_000
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def test_flights_are_in_the_order_of_their_departure_and_delayed_ones_are_late() -> None:
    rows = [json.loads(each.body) for each in departures(FLIGHTS)]
    assert [row["number"] for row in rows] == list(range(FLIGHTS))
    assert [row["departed"] for row in rows] == sorted(row["departed"] for row in rows)
    assert [row["scheduled"] for row in rows] != sorted(row["scheduled"] for row in rows)


def made_up(count: int) -> list[Departure]:
    return [
        Departure(f"N{number % 97}", json.dumps({"number": number}).encode())
        for number in range(count)
    ]


async def test_a_load_that_was_killed_sends_what_is_missing_and_keeps_the_order(node: Node) -> None:
    rows = made_up(2 * CHUNK + 100)
    async with qmq.connect(node.address) as mq:
        assert await load(mq, rows[:CHUNK]) == CHUNK
        async with mq.ordered_producer("flights.departed") as killed:
            part = [each for each in rows[CHUNK : CHUNK + 2_000] if each.key < "N5"]
            await killed.send_many([each.body for each in part], [each.key for each in part])
        assert await load(mq, rows) == CHUNK + 100 - len(part)
        assert await load(mq, rows) == 0
        numbers = defaultdict(list)
        async for message in mq.browse("flights.departed"):
            numbers[message.key].append(json.loads(message.body)["number"])
    assert sorted(each for found in numbers.values() for each in found) == list(range(len(rows)))
    assert all(found == sorted(found) for found in numbers.values())


def run(folder: Path) -> str:
    """What `python -m examples.pipeline` prints."""
    words = ["--flights", str(FLIGHTS), "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "examples.pipeline", *words],
        cwd=ROOT,
        env={**os.environ, "JDK_JAVA_OPTIONS": QUICK},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    logs = "".join(path.read_text()[-5_000:] for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


def numbers_of(printed: str) -> dict[str, int]:
    """The counts at the end, by their words."""
    lines = re.findall(r"^ *([\d,]+)  (.+)$", printed, re.MULTILINE)
    return {words: int(number.replace(",", "")) for number, words in lines}


@pytest.mark.long
@pytest.mark.xdist_group("drivers")
def test_every_flight_is_everywhere_once_and_a_second_run_repeats_nothing(tmp_path: Path) -> None:
    first = run(tmp_path)
    counts = numbers_of(first)
    assert {n for words, n in counts.items() if words.startswith("flights ")} == {FLIGHTS}
    assert 0 < counts["of days that are still open"] < FLIGHTS
    assert counts["came after the hour in which they were due, and count in it"] > 0
    alerts = {n for words, n in counts.items() if words.startswith("alerts ")}
    assert len(alerts) == 1
    assert f"{alerts.pop()} new alerts" in first
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")
    second = run(tmp_path)
    assert numbers_of(second) == counts
    assert second.count(" 0 flights sent") == 2
    assert " 0 new alerts" in second
