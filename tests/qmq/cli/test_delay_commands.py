"""`qmq delay`: delayed messages while they wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cli_support import Command, FakeMeta

from qmq.cli import delay, tables
from qmq.errors import DelayTooLong, MessageNotFound, NotConnected, TooLate
from qmq.model import DelayedId, MessageId
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import delay_pb2 as pb
from qmq.proto.v1 import meta_pb2

HOUR = 3_600_000
NOW = datetime(2026, 11, 21, 13, 20, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
ID = str(DelayedId(MessageId(7, 1, 2), NOW_MS, 1, "d1"))
DUE = "2026-11-21T13:20:00.000+00:00"


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`+2h` counts from NOW."""

    class Standing(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Standing:
            return cls.fromtimestamp(NOW_MS / 1000, tz)

    monkeypatch.setattr(delay, "datetime", Standing)
    monkeypatch.setattr(delay.time, "time_ns", lambda: NOW_MS * 1_000_000)


def message(number: int = 2, **fields: Any) -> pb.DelayedMessage:
    known = {
        "id": str(DelayedId(MessageId(7, 1, number), NOW_MS, 1, "d1")),
        "subject": "orders",
        "message_id": str(MessageId(7, 1, number)),
        "due_ms": NOW_MS,
        "create_time_ms": 5,
        "key": b"N14228",
        "tags": ["a", "b"],
        "state": "pending",
        "group": "d1",
        "body_bytes": 5,
    }
    return pb.DelayedMessage(**(known | fields))


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


# --- list -----------------------------------------------------------------------------------------


def test_pending_messages_are_listed_with_what_is_needed_to_cancel_them(
    meta: FakeMeta, qmq: Command
) -> None:
    meta.answers["ListDelayed"] = pb.ListDelayedResponse(
        messages=[message(2), message(3, key=b"\x00", cron="0 9 * * *", zone="UTC")]
    )
    first, second = qmq.json("delay", "list", "orders")
    assert first == {
        "due": DUE,
        "subject": "orders",
        "key": "N14228",
        "tags": ["a", "b"],
        "bytes": 5,
        "cron": "",
        "zone": "",
        "id": ID,
    }
    assert (second["key"], second["cron"], second["zone"]) == ("hex:00", "0 9 * * *", "UTC")
    (request,) = meta.requests("ListDelayed")
    assert (request.subject, request.from_ms, request.to_ms, request.after) == ("orders", 0, 0, "")
    assert "N14228" in qmq.text("delay", "list")


@pytest.mark.parametrize("width", [80, 110, 200])
def test_no_id_is_cut_in_a_list_however_narrow_it_is(
    meta: FakeMeta, qmq: Command, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(tables.console, "width", width)
    meta.answers["ListDelayed"] = pb.ListDelayedResponse(
        messages=[message(cron="0 9 * * *", zone="Europe/Warsaw", tags=[])]
    )
    monkeypatch.setattr(tables.console, "_force_terminal", True)
    lines = qmq.text("delay", "list").splitlines()
    assert any(ID in line for line in lines)
    assert all(len(line) <= width for line in lines)


def test_a_key_that_looks_like_markup_is_printed_unchanged(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ListDelayed"] = pb.ListDelayedResponse(
        messages=[message(key=b"[/red]x", tags=["[bold]"])]
    )
    shown = qmq.text("delay", "list")
    assert "[/red]x" in shown
    assert "[bold]" in shown


@pytest.mark.parametrize(
    ("words", "first", "last"),
    [
        (("--from", "2026-11-21T09:30:00+01:00"), ms("2026-11-21T08:30:00Z"), 0),
        (("--to", "+2h"), 0, NOW_MS + 2 * HOUR),
        (("--from", "-1d", "--to=+1h30m"), NOW_MS - 24 * HOUR, NOW_MS + HOUR * 3 // 2),
    ],
)
def test_a_list_is_of_a_time_in_words_of_the_clock_or_from_now(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], first: int, last: int
) -> None:
    meta.answers["ListDelayed"] = pb.ListDelayedResponse()
    assert qmq.json("delay", "list", "orders", *words) == []
    (request,) = meta.requests("ListDelayed")
    assert (request.from_ms, request.to_ms) == (first, last)


def test_a_list_ends_at_its_limit_and_says_that_there_is_more(meta: FakeMeta, qmq: Command) -> None:
    pages = [
        pb.ListDelayedResponse(messages=[message(1), message(2)], next="5:x"),
        pb.ListDelayedResponse(messages=[message(3), message(4)], next="6:y"),
    ]
    for limit, has_more in ((3, True), (4, False)):
        meta.answers["ListDelayed"] = [*pages, pb.ListDelayedResponse()]
        meta.asked.clear()
        done = qmq("delay", "list", "orders", "--limit", str(limit), "--json")
        assert done.exit_code == 0
        assert done.stdout.count('"id"') == limit
        assert ("for more, use" in done.stderr) == has_more
        assert [each.after for each in meta.requests("ListDelayed")][:2] == ["", "5:x"]


@pytest.mark.parametrize(
    "words",
    [
        ("list", "orders", "--from", "tomorrow"),
        ("list", "orders", "--to", "2026-11-21T09:30:00"),
        ("list", "orders", "--from", "+2 hours"),
        ("list", "orders", "--to", "+9999999d"),
        ("move", ID),
        ("move", ID, "--to", "+1h", "--by", "1h"),
        ("move", ID, "--by", "soon"),
        ("move", ID, "--to", "2026-11-22T09:00:00"),
    ],
)
def test_an_invalid_time_is_an_error_before_any_request(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...]
) -> None:
    status, said = qmq.error("delay", *words)
    assert (status, "[E102]" in said) == (2, True)
    assert meta.asked == []


# --- show -----------------------------------------------------------------------------------------


def test_a_message_is_shown_with_all_there_is(meta: FakeMeta, qmq: Command) -> None:
    headers = [control.Header(name="who", value=b"me"), control.Header(name="raw", value=b"\xff")]
    meta.answers["ShowDelayed"] = message(
        headers=headers,
        body="für".encode(),
        body_bytes=4,
        state="planned",
        cron="0 9 * * *",
        zone="Europe/Warsaw",
    )
    assert qmq.json("delay", "show", ID) == {
        "id": ID,
        "subject": "orders",
        "state": "planned",
        "due": DUE,
        "cron": "0 9 * * *",
        "zone": "Europe/Warsaw",
        "message_id": str(MessageId(7, 1, 2)),
        "created": "1970-01-01T00:00:00.005+00:00",
        "delay_group": "d1",
        "key": "N14228",
        "tags": ["a", "b"],
        "headers": {"who": "me", "raw": "hex:ff"},
        "body_bytes": 4,
        "body": "für",
        "body_base64": "ZsO8cg==",
    }
    shown = qmq.text("delay", "show", ID)
    for text in (ID, "planned", DUE, "who: me", "raw: hex:ff", "für"):
        assert text in shown, text


def test_a_body_that_is_not_text_is_shown_in_base64(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["ShowDelayed"] = message(body=b"\xff\x00", body_bytes=2, key=b"", tags=[])
    found = qmq.json("delay", "show", ID)
    assert found["body"] is None
    assert found["body_base64"] == "/wA="
    assert found["key"] is None
    assert found["tags"] == []
    shown = qmq.text("delay", "show", ID)
    assert "base64:/wA=" in shown
    assert "tags" not in shown


@pytest.mark.parametrize("verb", ["show", "cancel"])
def test_an_invalid_or_unknown_id_is_an_error(meta: FakeMeta, qmq: Command, verb: str) -> None:
    status, said = qmq.error("delay", verb, "17")
    assert (status, "use the receipt's `delayed_id`" in said, meta.asked) == (2, True, [])
    for call in ("ShowDelayed", "CancelDelayed"):
        meta.answers[call] = MessageNotFound("no message has this id here")
    status, said = qmq.error("delay", verb, ID)
    assert (status, "[E111] no message has this id here" in said) == (2, True)


# --- cancel ---------------------------------------------------------------------------------------


def test_a_cancelled_message_is_shown_as_cancelled(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["CancelDelayed"] = message(state="cancelled")
    assert qmq.json("delay", "cancel", ID) == [
        {"id": ID, "subject": "orders", "due": DUE, "cron": "", "state": "cancelled"}
    ]
    assert [each.id for each in meta.requests("CancelDelayed")] == [ID]


def test_a_dry_run_of_cancel_shows_the_message_and_changes_nothing(
    meta: FakeMeta, qmq: Command
) -> None:
    meta.answers["ShowDelayed"] = message(cron="0 9 * * *")
    assert qmq.json("delay", "cancel", ID, "--dry-run") == [
        {"id": ID, "subject": "orders", "due": DUE, "cron": "0 9 * * *", "state": "pending"}
    ]
    assert "would be cancelled" in qmq.text("delay", "cancel", ID, "--dry-run")
    meta.answers["ShowDelayed"] = message(state="cancelled")
    assert qmq.json("delay", "cancel", ID, "--dry-run")[0]["state"] == "cancelled"
    assert meta.requests("CancelDelayed") == []


@pytest.mark.parametrize("state", ["planned", "delivered"])
def test_a_dry_run_reports_too_late_like_the_real_one(
    meta: FakeMeta, qmq: Command, state: str
) -> None:
    meta.answers["ShowDelayed"] = message(state=state)
    meta.answers["CancelDelayed"] = meta.answers["MoveDelayed"] = TooLate(f"{ID} is {state}")
    for words in (("cancel", ID), ("move", ID, "--by", "1h")):
        for option in ((), ("--dry-run",)):
            status, said = qmq.error("delay", *words, *option)
            assert (status, "[E118]" in said, f"is {state}" in said) == (2, True, True)


# --- move -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "due_ms"),
    [
        (("--to", "2026-11-22T09:00:00+01:00"), ms("2026-11-22T08:00:00Z")),
        (("--to", "+2h"), NOW_MS + 2 * HOUR),
        (("--by", "30m"), NOW_MS + 11 * HOUR // 2),
        (("--by", "+1d"), NOW_MS + 29 * HOUR),
        (("--by", "-1h"), NOW_MS + 4 * HOUR),
    ],
)
def test_a_message_is_moved_to_a_time_or_by_a_duration(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], due_ms: int
) -> None:
    meta.answers["ShowDelayed"] = message(due_ms=NOW_MS + 5 * HOUR)
    meta.answers["MoveDelayed"] = lambda request: message(due_ms=request.due_ms)
    planned = qmq.json("delay", "move", ID, *words, "--dry-run")
    assert meta.requests("MoveDelayed") == []
    moved = qmq.json("delay", "move", ID, *words)
    assert (
        moved
        == planned
        == [
            {
                "id": ID,
                "subject": "orders",
                "from": "2026-11-21T18:20:00.000+00:00",
                "to": moved[0]["to"],
            }
        ]
    )
    assert ms(moved[0]["to"]) == due_ms
    (request,) = meta.requests("MoveDelayed")
    assert (request.id, request.due_ms) == (ID, due_ms)


@pytest.mark.parametrize("option", [(), ("--dry-run",)])
def test_a_move_beyond_two_years_is_refused(
    meta: FakeMeta, qmq: Command, option: tuple[str, ...]
) -> None:
    meta.answers["ShowDelayed"] = message()
    meta.answers["MoveDelayed"] = DelayTooLong("not asked")
    status, said = qmq.error("delay", "move", ID, "--to", "+800d", *option)
    assert (status, "[E117] 800 days from now is too long" in said) == (2, True)
    status, said = qmq.error("delay", "move", ID, "--by", f"{timedelta.max.days}d", *option)
    assert (status, "outside the calendar" in said) == (2, True)
    assert meta.requests("MoveDelayed") == []


# --- stats ----------------------------------------------------------------------------------------

BUCKET = {"length_ms": HOUR, "stored_bytes": 100}
THIS_HOUR = NOW_MS - 20 * 60_000


def description(group: str, *buckets: tuple[int, int], **fields: Any) -> pb.DelayDescription:
    """Buckets: (hours from now, pending)."""
    known = {
        "group": group,
        "replica": f"{group}-a",
        "pending": sum(pending for _, pending in buckets),
        "time_ms": NOW_MS,
        "horizon_ms": NOW_MS + HOUR,
        "wheel_messages": 5,
        "wheel_bytes": 3 << 20,
        "lateness_p50_ms": 250,
        "lateness_p99_ms": 490,
        "buckets": [
            pb.DelayBucket(
                start_ms=THIS_HOUR + hours * HOUR, messages=pending + 1, pending=pending, **BUCKET
            )
            for hours, pending in buckets
        ],
    }
    return pb.DelayDescription(**(known | fields))


TROUBLE = pb.DelayTrouble(subject="gone", waiting=7, reason="[E105] there is no subject 'gone'")
ALL = meta_pb2.DescribeDelaysResponse(
    delays=[
        description("d1", (-2, 3), (0, 1000), (24 * 9, 50), waiting=3, planned=2, delivered=77),
        description("d2", (0, 500), (24 * 200, 1), troubles=[TROUBLE], clock_step_ms=-12),
    ],
    silent={"d3": "delay group 'd3' has no master"},
)


def test_stats_as_json_have_everything_that_the_groups_report(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DescribeDelays"] = ALL
    found = qmq.json("delay", "stats")
    assert list(found) == ["time", "pending", "groups", "silent_groups", "histogram"]
    assert found["time"] == DUE
    assert found["pending"] == 1554
    assert found["silent_groups"] == {"d3": "delay group 'd3' has no master"}
    first, second = found["groups"]
    assert first.pop("buckets")[1] == {
        "from": "2026-11-21T13:00:00.000+00:00",
        "to": "2026-11-21T14:00:00.000+00:00",
        "messages": 1001,
        "pending": 1000,
        "bytes": 100,
    }
    assert first == {
        "delay_group": "d1",
        "master": "d1-a",
        "pending": 1053,
        "waiting": 3,
        "planned": 2,
        "delivered": 77,
        "lateness_p50_ms": 250,
        "lateness_p99_ms": 490,
        "wheel_messages": 5,
        "wheel_bytes": 3 << 20,
        "horizon": "2026-11-21T14:20:00.000+00:00",
        "time": DUE,
        "clock_step_ms": 0,
        "troubles": [],
    }
    assert (second["clock_step_ms"], second["troubles"]) == (
        -12,
        [{"subject": "gone", "waiting": 7, "reason": "[E105] there is no subject 'gone'"}],
    )
    bars = found["histogram"]
    assert bars["late"] == 3
    assert bars["hours"][0]["pending"] == 1500
    assert len(bars["hours"]) == 24
    assert len(bars["days"]) == 30
    assert (
        sum(each["pending"] for name in ("hours", "days", "months") for each in bars[name]) == 1551
    )


def test_stats_show_people_what_is_due_when_and_what_is_wrong(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DescribeDelays"] = ALL
    shown = qmq.text("delay", "stats")
    for text in (
        f"delayed messages at {DUE}: 1,554 pending",
        "due, but cannot be delivered",
        "[E105] there is no subject 'gone'",
        "overdue, delivered at once: 3",
        "due by hour (UTC)",
        "2026-11-21 13:00 1,500 " + "█" * 60,
        "due by day (UTC)",
        "2026-11-30 50 █",
        "due by month (UTC)",
        "2027-06 1 █",
        "partial: delay group d3 did not answer (delay group 'd3' has no master)",
    ):
        assert text in shown, text


def test_no_number_of_the_stats_is_broken_on_a_narrow_terminal(
    meta: FakeMeta, qmq: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.console, "width", 80)
    large = description(
        "d1",
        (0, 10_000_000),
        waiting=20_000,
        planned=20_000,
        delivered=600_000,
        wheel_messages=16_000_000,
    )
    meta.answers["DescribeDelays"] = meta_pb2.DescribeDelaysResponse(delays=[large])
    lines = qmq.text("delay", "stats").splitlines()
    (delivery,) = [line.split() for line in lines if line.split()[:2] == ["d1", "d1-a"]]
    assert delivery[2:] == ["10,000,000", "20,000", "20,000", "600,000", "250", "490"]
    assert [line.split() for line in lines if "16,000,000" in line] == [
        ["d1", "16,000,000", "3.0", "2026-11-21T14:20:00", "0"]
    ]


def test_stats_without_messages_show_no_histogram_and_no_problems(
    meta: FakeMeta, qmq: Command
) -> None:
    meta.answers["DescribeDelays"] = meta_pb2.DescribeDelaysResponse(delays=[description("d1")])
    shown = qmq.text("delay", "stats")
    assert "0 pending" in shown
    assert "due" not in shown
    meta.answers["DescribeDelays"] = meta_pb2.DescribeDelaysResponse(silent={"d1": "away"})
    assert "delay group d1 did not answer (away)" in qmq.text("delay", "stats")


def test_without_a_delay_group_stats_say_how_to_start_one(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DescribeDelays"] = NotConnected(
        "there is no delay group: start one with `qmq delay`"
    )
    status, said = qmq.error("delay", "stats")
    assert (status, "start one with `qmq delay`" in said) == (3, True)
