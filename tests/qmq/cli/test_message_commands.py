"""`qmq message` and `qmq why`: what they ask, and how they tell where a message is."""

from __future__ import annotations

from typing import Any

import pytest
from cli_support import Command, FakeMeta

from qmq.errors import MessageNotFound
from qmq.model import DelayedId, MessageId
from qmq.operations.messages import Followed, Inquiry, event_line, span_text, timeline, why
from qmq.operations.text import Time
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import delay_pb2
from qmq.proto.v1 import meta_pb2 as pb

NOW = 1_700_000_000_000
AT = "2023-11-14T22:13:20.000+00:00"
ID = MessageId((NOW - 5_000) << 20, 1, 2)


def place(**fields: Any) -> control.StoredMessage:
    known = {
        "subject": "orders",
        "broker_group": "g1",
        "sequence": 4711,
        "message_id": str(ID),
        "key": b"k1",
        "tags": ["new"],
        "headers": [control.Header(name="h", value=b"v")],
        "body": b'{"a":1}',
        "create_time_ms": NOW - 20,
        "append_time_ms": NOW - 10,
    }
    return control.StoredMessage(**(known | fields))


def event(kind: str, ms: int = 0, **fields: Any) -> control.MessageEvent:
    return control.MessageEvent(kind=kind, time_ms=NOW + ms, group="billing", **fields)


def told(
    state: str,
    stored: control.StoredMessage | None = None,
    pauses: tuple[pb.Pause, ...] = (),
    **fields: Any,
) -> str:
    """The output about group billing."""
    found = Followed(
        stored or place(),
        [],
        [control.MessageState(group="billing", state=state, **fields)],
        now_ms=NOW,
    )
    return why(Inquiry(str(ID), [found], [], pauses), NOW)[1]["text"]


# --- why ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "less than 1 s"),
        (999, "less than 1 s"),
        (1_000, "1 s"),
        (29_900, "29 s"),
        (90_000, "1 min 30 s"),
        (3_600_000, "1 h"),
        (86_400_000, "1 day"),
        (3 * 86_400_000 - 1, "2 days 23 h"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(ms: int, text: str) -> None:
    assert span_text(ms) == text


def test_a_waiting_message_is_reported_with_the_messages_before_it() -> None:
    assert (
        told("new", behind=1204, consumers=3) == "Group billing: waits behind 1,204 older messages."
    )
    assert (
        told("new", behind=1)
        == "Group billing: waits behind 1 older message; none of its consumers is here."
    )
    assert (
        told("new")
        == "Group billing: is the next one to be handed out; none of its consumers is here."
    )
    assert told("new", consumers=1).endswith(
        "to be handed out: its consumer has asked for none, or for other tags."
    )


def test_a_message_held_by_a_consumer_is_reported_with_its_lease() -> None:
    text = told(
        "held",
        consumer="host-1",
        attempt=2,
        attempts_max=5,
        lease_left_ms=18_000,
        last=event("pull", -12_000),
    )
    assert text == (
        "Group billing: held by consumer host-1 since 12 s (attempt 2 of 5); its lease ends "
        "in 18 s unless it sends a heartbeat."
    )
    assert "(attempt 1)" in told("held", consumer="host-1", attempt=1)


def test_a_message_that_will_be_retried_is_reported_with_time_and_reason() -> None:
    text = told("waiting", attempt=4, attempts_max=5, due_ms=NOW + 40_000, last=event("nack"))
    assert text == "Group billing: failed 3 times, comes again in 40 s (attempt 4 of 5)."
    text = told(
        "waiting", attempt=2, attempts_max=5, consumers=1, last=event("lost", consumer="host-1")
    )
    assert text == (
        f"Group billing: its consumer was lost (host-1) at {AT}, goes out again to the next "
        "consumer that asks (attempt 2 of 5)."
    )
    assert told("waiting", attempt=1) == (
        "Group billing: was given back, goes out again to the next consumer that asks "
        "(attempt 1); none is here."
    )


def test_a_copy_for_one_group_counts_earlier_failures() -> None:
    headers = [
        control.Header(name="qmq-group", value=b"billing"),
        control.Header(name="qmq-attempt", value=b"2"),
    ]
    copy = place(is_directed=True, headers=headers)
    text = told("waiting", copy, attempt=2, attempts_max=5, due_ms=NOW + 1_000, last=event("nack"))
    assert text == (
        "Group billing (the copy for it alone): failed 3 times, comes again in 1 s (attempt "
        "4 of 5)."
    )


def test_the_story_of_a_dead_message_says_why_it_died_and_where_it_is() -> None:
    died = event("dead", error="no stock", attempt=5)
    assert told("dying", last=died) == (
        f"Group billing: failed for good at {AT} because of: no stock; on its way to the "
        "dead-letter queue."
    )
    letter = place(subject="%dlq%billing", sequence=7)
    text = told("dead", last=died, dead_letter=letter)
    assert text.startswith(
        "Group billing: in the dead-letter queue since 2023-11-14T22:13:19.990+00:00 because "
        "of: no stock; there it is"
    )
    assert text.endswith("there it is g1 as 7 of %dlq%billing.")
    assert told("dead", last=died).endswith("its dead letter is not kept any more.")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ack", f"done: acknowledged at {AT} by host-1 (attempt 1 of 5)."),
        ("expired", f"retention took it before it went out again, at {AT} by host-1."),
        ("reset", f"an operator moved the group past it at {AT} by host-1."),
        ("skip", f"the group began behind it at {AT} by host-1."),
    ],
)
def test_the_reason_why_a_message_is_done_is_shown(kind: str, text: str) -> None:
    assert (
        told("done", attempt=1, attempts_max=5, last=event(kind, consumer="host-1"))
        == f"Group billing: {text}"
    )


def test_a_message_that_is_done_since_before_the_logs_begin_is_done() -> None:
    assert told("done") == "Group billing: done; how, the logs do not tell any more."


def test_pauses_are_reported_with_their_start_and_reason() -> None:
    pauses = (
        pb.Pause(kind="group", subject="*", group="billing", since_ms=NOW, reason="deploying"),
        pb.Pause(kind="consumer", subject="orders", group="billing", name="host-1", since_ms=NOW),
    )
    text = told("new", pauses=pauses, behind=2, consumers=1, is_paused=True)
    assert text == (
        f"Group billing: waits behind 2 older messages; the group is paused since {AT} (deploying)."
    )
    text = told("held", pauses=pauses, consumer="host-1", attempt=1, is_consumer_paused=True)
    assert text.endswith(f"; consumer host-1 is paused since {AT}.")
    assert told("done", pauses=pauses, is_paused=True).endswith("any more.")


def test_a_message_of_a_lane_is_reported_with_the_lanes_holder() -> None:
    stored = place(partition=3)
    text = told("new", stored, attempt=2, behind=7, consumer="host-1", lease_left_ms=9_000)
    assert text == (
        "Group billing: failed 2 times so far; waits behind 7 others of its partition; its "
        "lane is held by host-1, whose lease ends in 9 s "
        "unless it sends a heartbeat."
    )
    assert (
        told("new", stored)
        == "Group billing: is the next one of its lane; no consumer holds its lane."
    )
    text = told("parked", stored, parked_first=4700, last=event("park"))
    assert text == (
        f"Group billing: set aside with its key k1 since {AT}, behind 4700 of the same key: "
        "`qmq dlq replay orders billing k1` gives it back."
    )


def test_a_group_that_has_not_reached_the_partition_is_reported() -> None:
    found = Followed(place(partition=3), unopened=[("billing", 3)])
    assert why(Inquiry(str(ID), [found], []), NOW)[1] == {
        "group": "billing",
        "state": "unopened",
        "text": (
            "Group billing: still reads version 3 of the route; the message's partition comes "
            "after that is finished."
        ),
    }


def test_a_subject_without_consumers_and_an_interrupted_look_are_reported() -> None:
    told_ = why(Inquiry(str(ID), [Followed(place())], [], is_incomplete=True), NOW)
    assert [each["state"] for each in told_] == ["stored", "unread", "incomplete"]
    assert (
        told_[0]["text"]
        == f"Message {ID}: stored on g1 as 4711 of orders at 2023-11-14T22:13:19.990+00:00."
    )
    assert told_[1]["text"] == "No group has consumed orders on g1."


def test_a_dead_letter_shows_its_replay_or_purge() -> None:
    state = control.MessageState(group="qmq-dlq", state="done", last=event("ack"))
    found = Followed(place(subject="%dlq%billing"), [], [state], now_ms=NOW)
    text = why(Inquiry(str(ID), [found], []), NOW)[1]["text"]
    assert (
        text == f"Group qmq-dlq of the dead-letter queue %dlq%billing: replayed or purged at {AT}."
    )


# --- trace ----------------------------------------------------------------------------------------


def test_a_timeline_has_everything_in_order() -> None:
    first = Followed(
        place(),
        [
            event("pull", 1, consumer="a", attempt=1),
            event("nack", 2, consumer="a", attempt=1, delay_ms=5_000),
        ],
    )
    letter = Followed(place(subject="%dlq%billing", sequence=0, append_time_ms=NOW + 4))
    first.events.append(event("dead", 3, consumer="a", attempt=2, error="no stock"))
    assert [row[1:] for row in timeline(Inquiry(str(ID), [letter, first], []))] == [
        ("", "created", "", "", f"by producer {str(ID)[:16]}"),
        ("", "stored", "", "", "g1 as 4711 of orders"),
        ("billing", "handed out", "a", 1, ""),
        ("billing", "failed", "a", 1, "again after 5 s"),
        ("billing", "failed for good", "a", 2, "no stock"),
        ("", "moved to the dead-letter queue", "", "", "g1 as 0 of %dlq%billing"),
    ]


# --- the commands ---------------------------------------------------------------------------------


def canned(meta: FakeMeta, *places: control.StoredMessage, **states: Any) -> None:
    meta.answers["FindMessage"] = control.FindMessageResponse(message=places[0], others=places[1:])
    page = control.TraceMessageResponse(
        events=[event("pull", 1, consumer="a", attempt=1)],
        cursor=b"more",
        known_since_ms=NOW,
        time_ms=NOW,
    )
    last = control.TraceMessageResponse(
        events=[event("ack", 2, consumer="a", attempt=1)],
        time_ms=NOW,
        states=[
            control.MessageState(
                group="billing", state="done", last=event("ack", 2, consumer="a"), attempt=1
            )
        ],
    )
    meta.answers["TraceMessage"] = lambda request: last if request.cursor else page
    meta.answers["ListPauses"] = pb.ListPausesResponse()


def test_show_prints_headers_and_body_in_the_form_that_was_asked_for(
    meta: FakeMeta, qmq: Command
) -> None:
    canned(meta, place(), place(body=b"\xff\x00", sequence=4712))
    shown = qmq.text("message", "show", str(ID))
    assert [word in shown for word in ("g1", "4711", "h: v", '"a": 1', "hex:ff00")] == [True] * 5
    assert '{"a":1}' in qmq.text("message", "show", str(ID), "--body", "text")
    assert "hex:7b2261223a317d" in qmq.text("message", "show", "orders", str(ID), "--body", "hex")
    assert qmq.error("message", "show", str(ID), "--body", "json")[0] == 2
    assert [(request.subject, request.every) for request in meta.requests("FindMessage")][:3] == [
        ("", True),
        ("", True),
        ("orders", True),
    ]
    first, second = qmq.json("message", "show", str(ID))
    assert (first["body"], first["key"], first["headers"]) == ('{"a":1}', "k1", {"h": "v"})
    assert first["created"] == "2023-11-14T22:13:19.980+00:00"
    assert (second["body"], second["body_base64"]) == (None, "/wA=")


def test_trace_asks_page_by_page_and_says_since_when_it_knows(meta: FakeMeta, qmq: Command) -> None:
    canned(meta, place())
    shown = qmq.text("message", "trace", "orders", str(ID), "--group", "billing")
    assert [
        word in shown for word in ("handed out", "acknowledged", f"before {AT} have been deleted")
    ] == [True] * 3
    asked = [
        (each.subject, each.broker_group, each.sequence, each.group, each.cursor)
        for each in meta.requests("TraceMessage")
    ]
    assert asked == [
        ("orders", "g1", 4711, "billing", b""),
        ("orders", "g1", 4711, "billing", b"more"),
    ]
    assert [row["what"] for row in qmq.json("message", "trace", str(ID))] == [
        "created",
        "stored",
        "handed out",
        "acknowledged",
    ]


def test_an_event_of_a_trace_is_one_line() -> None:
    line = event_line(Time(1_700_000_000_000), "billing", "failed", "billing-1", 2, "broken")
    assert (
        line == "2023-11-14T22:13:20.000+00:00  group billing: failed: billing-1, attempt 2, broken"
    )
    assert (
        event_line(Time(1_700_000_000_000), "", "created", "", "", "")
        == "2023-11-14T22:13:20.000+00:00  created"
    )


def test_why_says_it_in_words(meta: FakeMeta, qmq: Command) -> None:
    canned(meta, place())
    assert "Group billing: done: acknowledged at" in qmq.text("why", str(ID))
    assert [each["state"] for each in qmq.json("why", "orders", str(ID))] == ["stored", "done"]


def test_why_of_a_delayed_id_says_when_it_is_due(meta: FakeMeta, qmq: Command) -> None:
    due_ms = 4_000_000_000_000
    text = str(DelayedId(ID, due_ms, NOW, "d1"))
    message = delay_pb2.DelayedMessage(
        id=text, subject="orders", message_id=str(ID), due_ms=due_ms, state="pending", group="d1"
    )
    meta.answers |= {
        "ShowDelayed": message,
        "FindMessage": MessageNotFound("not here"),
        "ListPauses": pb.ListPausesResponse(),
    }
    shown = qmq.text("why", text)
    assert "Delayed: due in" in shown
    assert "in delay group d1." in shown
    assert [each["what"] for each in qmq.json("message", "trace", text)] == [
        "created",
        "stored to be delivered later",
    ]
    assert qmq.json("message", "show", text)[0]["state"] == "pending"


def test_of_an_ordered_subject_groups_that_have_not_come_there_are_asked_for(
    meta: FakeMeta, qmq: Command
) -> None:
    canned(meta, place(partition=3))
    groups = [
        pb.OrderedGroup(group="billing", version=4),
        pb.OrderedGroup(group="audit", version=3),
    ]
    meta.answers["DescribeRoute"] = pb.DescribeRouteResponse(groups=groups)
    assert [(each["group"], each["state"]) for each in qmq.json("why", str(ID))][1:] == [
        ("billing", "done"),
        ("audit", "unopened"),
    ]


def test_invalid_and_unknown_ids_are_errors(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["FindMessage"] = MessageNotFound("no kept message of any subject has the id")
    assert qmq.error("why", str(ID)) == (
        2,
        "error: [E111] no kept message of any subject has the id ",
    )
    for words in (
        ("why", "nonsense"),
        ("why", "a", "b", "c"),
        ("message", "trace", "x-y"),
        ("message", "show", str(ID), "--body", "xml"),
    ):
        assert qmq.error(*words)[0] == 2
