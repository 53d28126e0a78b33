"""The short form of `tools/run soak`, and its judge."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from system.group import SECURE
from system.soak_run import Report, Runs, Sample, Soak, judge_messages, judge_samples


def runs(*found: tuple[int, int]) -> Runs:
    return np.array(found, np.int64).reshape(-1, 2)


ALL, FINE, GRAVES = (
    runs((0, 300)),
    runs((0, 37), (38, 99), (138, 99), (238, 62)),
    runs((37, 1), (137, 1), (237, 1)),
)


def test_a_soak_in_which_everything_was_handled_or_dead_lettered_is_fine() -> None:
    verdict = judge_messages(ALL, FINE, GRAVES, every=100, fails=37)
    assert (verdict.sent, verdict.handled, verdict.dead_lettered, verdict.anomalies) == (
        300,
        297,
        3,
        [],
    )
    again = judge_messages(
        ALL,
        np.concatenate([FINE, runs((0, 10))]),
        np.concatenate([GRAVES, runs((50, 1))]),
        every=100,
        fails=37,
    )
    assert (again.handled_again, again.lost_consumers_dead_lettered, again.anomalies) == (10, 1, [])


@pytest.mark.parametrize(
    ("handled", "dead_lettered", "says"),
    [
        (FINE[1:], GRAVES, "37 messages were lost"),
        (FINE, GRAVES[1:], "1 messages were lost"),
        (
            np.concatenate([FINE, runs((137, 1))]),
            GRAVES,
            "1 messages always fail, and count as handled, such as 137",
        ),
        (
            FINE,
            np.concatenate([GRAVES, GRAVES[:2]]),
            "2 messages are in the dead-letter queue more than once, such as 37",
        ),
    ],
    ids=("unhandled", "not dead-lettered", "handled", "twice"),
)
def test_lost_and_wrongly_dead_lettered_messages_are_reported(
    handled: Runs, dead_lettered: Runs, says: str
) -> None:
    assert any(
        text.startswith(says)
        for text in judge_messages(ALL, handled, dead_lettered, every=100, fails=37).anomalies
    )


def test_what_a_soak_found_can_be_read_by_machines() -> None:
    report = Report(1.0, 7, 0.7, samples={"broker": [Sample(0.0, 1.5, 2, 3)]})
    report.events.update(["join", "crash", "join"])
    found = json.loads(report.to_json())
    assert found["events"] == {"join": 2, "crash": 1}
    assert (found["samples"]["broker"][0]["handles"], found["verdict"]["anomalies"]) == (2, [])


def test_growth_of_memory_handles_or_threads_is_reported() -> None:
    flat = [Sample(at, 100.0, 20, 5) for at in range(40)]
    assert judge_samples("broker", flat) == []
    grown = [Sample(at, 100.0 + 10 * at, 20 + at, 5 + at) for at in range(40)]
    said = [text.split(" grew")[0] for text in judge_samples("broker", grown)]
    assert said == ["broker: memory", "broker: file handles", "broker: threads"]


@pytest.mark.long
async def test_a_minute_with_failing_consumers_loses_no_message_and_leaks_nothing(
    tmp_path: Path,
) -> None:
    report = await Soak(tmp_path, 30.0, seed=7, calibrate_s=6.0, steps_s=1.5, secure=SECURE).run()
    assert report.anomalies == []
    assert {"leave", "crash", "hang", "join"} <= set(report.events)
    assert report.verdict.dead_lettered >= report.verdict.sent // 100
