"""Short notation for hand-made histories: each function gives the lines of one operation, and `+`
joins operations.

    sent(1, 2, at=0) + got((0, 1), (1, 2)) + done(1)

means: p1 sent the batch 1, 2 and got the answer that it is stored from sequence 0 on; c1 polled
both; c1 acknowledged 1 and got the answer. For overlapping operations, take the lines apart:
`begun, answered = sent(1, at=0)`.

Small histories, good and bad. A bad one names every anomaly that the checkers must find in it; they
must find no other.

If a case says `drained=False`, `lost_below` judges it instead of `lost`.
"""

from __future__ import annotations

from typing import NamedTuple

from history.events import Ack, Event, Note, Poll, Record, Reset, Send, Type

Q = "orders/0@g1"
R = "orders/0@g2"


def tried(*values: int, by: str = "p1") -> list[Event]:
    """A send without an end."""
    return [Send(process=by, type="invoke", subject="orders", values=values)]


def unknown(*values: int, by: str = "p1") -> list[Event]:
    """A send of unknown outcome."""
    return [*tried(*values, by=by), Send(process=by, type="info", subject="orders", values=values)]


def refused(*values: int, by: str = "p1") -> list[Event]:
    """A send that was certainly not stored."""
    return [*tried(*values, by=by), Send(process=by, type="fail", subject="orders", values=values)]


def sent(
    *values: int, at: int, by: str = "p1", queue: str = Q, master: tuple[int, str] | None = None
) -> list[Event]:
    """A send that was answered, by a replica in an epoch if that matters."""
    epoch, replica = master or (None, None)
    end = Send(
        process=by,
        type="ok",
        subject="orders",
        values=values,
        queue=queue,
        sequence=at,
        epoch=epoch,
        replica=replica,
    )
    return [*tried(*values, by=by), end]


def got(
    *records: tuple[int, ...], by: str = "c1", group: str = "billing", queue: str = Q
) -> list[Event]:
    """A poll that got (sequence, value) or (sequence, value, attempt)."""
    held = tuple(Record(*record) for record in records)
    return [
        Poll(process=by, type="invoke", group=group),
        Poll(process=by, type="ok", group=group, queue=queue, records=held),
    ]


def lost_poll(by: str = "c1", group: str = "billing") -> list[Event]:
    """A poll without an answer."""
    return [Poll(process=by, type=kind, group=group) for kind in ("invoke", "info")]


def done(
    *values: int, by: str = "c1", group: str = "billing", queue: str = Q, end: Type = "ok"
) -> list[Event]:
    """An acknowledgement by value."""
    return [
        Ack(process=by, type=kind, group=group, queue=queue, values=values)
        for kind in ("invoke", end)
    ]


def done_at(*sequences: int, by: str = "c1", group: str = "billing", queue: str = Q) -> list[Event]:
    """An acknowledgement by sequence."""
    return [
        Ack(process=by, type=kind, group=group, queue=queue, sequences=sequences)
        for kind in ("invoke", "ok")
    ]


def reset(group: str | None = "billing", end: Type = "ok") -> list[Event]:
    """An operator's reset of a group, or of all."""
    return [Reset(process="operator", type=kind, group=group) for kind in ("invoke", end)]


class Case(NamedTuple):
    """A history, and the names of its anomalies."""

    name: str
    events: list[Event]
    wrong: str = ""
    drained: bool = True
    groups: tuple[str, ...] = ()


def overlapping(early: list[Event], late: list[Event]) -> list[Event]:
    """Two operations: both begin, then both end in the same order."""
    return [early[0], late[0], early[1], late[1]]


def within(outer: list[Event], inner: list[Event]) -> list[Event]:
    """The inner operations happen during the outer one."""
    return [outer[0], *inner, outer[1]]


ONE = sent(1, at=0)
GOT_ONE = got((0, 1))
AGAIN = got((0, 1, 2), by="c2")
SETTLED = ONE + GOT_ONE + done(1)
THREE = sent(1, 2, 3, at=0)
ZEROTH = got((0, 1))
ALL = got((0, 1), (1, 2), (2, 3))

GOOD = [
    Case("nothing happened", []),
    Case("one message goes through", SETTLED),
    Case(
        "a batch goes through in two polls", sent(1, 2, 3, at=5) + got((5, 1)) + got((6, 2), (7, 3))
    ),
    Case(
        "two queues number their own", ONE + sent(2, at=0, queue=R) + GOT_ONE + got((0, 2), queue=R)
    ),
    Case("not drained: the tail is on its way", ONE + sent(2, at=1) + GOT_ONE, drained=False),
    Case("not drained: nothing was polled yet", ONE + sent(2, at=1), drained=False),
    Case("an unknown send was stored", unknown(1) + GOT_ONE),
    Case("an unknown send was not stored", unknown(1) + sent(2, at=0) + got((0, 2))),
    Case("a send without an end was stored", tried(1) + GOT_ONE),
    Case("a send without an end was not stored", tried(1)),
    Case("a refused send stays away", refused(1) + sent(2, at=0) + got((0, 2))),
    Case("refused first, answered at the second attempt", refused(1) + ONE + GOT_ONE),
    Case("refused once and unknown once, and stored", refused(1) + unknown(1) + GOT_ONE),
    Case("unknown first, then refused, and stored", unknown(1) + refused(1) + GOT_ONE),
    Case("answered twice with the same place", ONE + ONE + GOT_ONE),
    Case("polled before the producer has its answer", within(ONE, GOT_ONE)),
    Case("handed out again without an acknowledgement", ONE + GOT_ONE + AGAIN + done(1, by="c2")),
    Case(
        "two groups see everything once",
        ONE + GOT_ONE + done(1) + got((0, 1), by="d1", group="audit"),
        groups=("billing", "audit"),
    ),
    Case(
        "acknowledged in one group, comes again in the other",
        SETTLED + 2 * got((0, 1), by="d1", group="audit"),
    ),
    Case("an unknown acknowledgement has no effect", ONE + GOT_ONE + done(1, end="info") + AGAIN),
    Case("a refused acknowledgement has no effect", ONE + GOT_ONE + done(1, end="fail") + AGAIN),
    Case("an acknowledgement without an end has no effect", ONE + GOT_ONE + done(1)[:1] + AGAIN),
    Case(
        "the second poll was under way at the acknowledgement",
        ONE + GOT_ONE + within(AGAIN, done(1)),
    ),
    Case("a reset brings it back", SETTLED + reset() + AGAIN),
    Case("a reset of all groups brings it back", SETTLED + reset(group=None) + AGAIN),
    Case("a reset of unknown outcome may bring it back", SETTLED + reset(end="info") + AGAIN),
    Case("a reset under way may bring it back", SETTLED + within(reset(), AGAIN)),
    Case(
        "a reset of all groups under way may bring it back",
        SETTLED + within(reset(group=None), AGAIN),
    ),
    Case(
        "a reset of all groups overtook the acknowledgement",
        ONE + GOT_ONE + within(done(1), reset(group=None)) + AGAIN,
    ),
    Case("a reset overtook the acknowledgement", ONE + GOT_ONE + within(done(1), reset()) + AGAIN),
    Case("the queue has a gap after a power cut", ONE + sent(2, at=9) + got((0, 1), (9, 2))),
    Case(
        "sends overlap and keep their order", overlapping(ONE, sent(2, at=1)) + got((0, 1), (1, 2))
    ),
    Case(
        "two producers need no order between them",
        sent(2, at=1, by="p2") + ONE + got((0, 1), (1, 2)),
    ),
    Case(
        "one producer, two queues: no order between them",
        sent(1, at=7) + sent(2, at=3, queue=R) + got((7, 1)) + got((3, 2), queue=R),
    ),
    Case(
        "a value tried twice has no place in the order",
        unknown(1) + sent(2, at=1) + ONE + got((0, 1), (1, 2)),
    ),
    Case(
        "a value tried twice may lie later",
        unknown(1) + sent(2, at=0) + sent(1, at=1) + got((0, 2), (1, 1)),
    ),
    Case(
        "a batch cut in two, each half with its own place",
        tried(1, 2) + sent(1, at=0)[1:] + sent(2, at=4)[1:] + got((0, 1), (4, 2)),
    ),
    Case("an unknown batch is polled together", unknown(1, 2) + got((3, 1), (4, 2))),
    Case(
        "masters change with the epoch",
        sent(1, at=0, master=(1, "a")) + sent(2, at=1, master=(2, "b")) + got((0, 1), (1, 2)),
    ),
    Case(
        "two broker groups count epochs apart",
        sent(1, at=0, master=(1, "a")) + sent(2, at=0, queue=R, master=(1, "b")),
        drained=False,
    ),
    Case(
        "notes are for people",
        [Note(process="nemesis", type="info", f="kill", text="broker 2"), *SETTLED],
    ),
    Case(
        "two consumers share what lies between", THREE + ZEROTH + got((1, 2), by="c2") + got((2, 3))
    ),
    Case("what came back comes later", THREE + ZEROTH + got((2, 3)) + got((1, 2, 2))),
    Case(
        "a poll of unknown outcome took what comes later",
        THREE + ZEROTH + lost_poll() + got((2, 3)) + got((1, 2)),
    ),
    Case(
        "a poll without an end took what comes later",
        THREE + ZEROTH + lost_poll()[:1] + got((2, 3)) + got((1, 2)),
    ),
    Case("a reset starts over, in the middle too", THREE + ALL + reset() + got((2, 3))),
    Case(
        "retention or a power cut left a gap", sent(1, at=0) + sent(2, at=9) + got((0, 1), (9, 2))
    ),
    Case(
        "the second queue has its own places",
        sent(1, 2, at=5) + sent(3, at=0, queue=R) + got((5, 1), (6, 2)) + got((0, 3), queue=R),
    ),
    Case(
        "a poll of unknown outcome",
        [*ONE, Poll(process="c1", type="info", group="billing", queue=Q), *GOT_ONE],
    ),
    Case("an empty poll", ONE + GOT_ONE + got(by="c2")),
]

BAD = [
    Case("never polled", ONE, "lost"),
    Case("two sends, one never polled", ONE + sent(2, at=1) + GOT_ONE, "lost"),
    Case(
        "half of a batch is polled",
        sent(1, 2, 3, 4, at=0) + got((0, 1), (3, 4)),
        "lost int_poll_skip",
    ),
    Case("two sends never polled", ONE + sent(2, at=1), "lost lost"),
    Case("the poll that took it has an unknown outcome", ONE + got((0, 1))[:1], "lost"),
    Case("refused first, answered then, never polled", refused(1) + ONE, "lost"),
    Case("unknown first, answered then, never polled", unknown(1) + ONE, "lost"),
    Case(
        "one of two groups misses it",
        ONE + GOT_ONE + got(group="audit"),
        "lost",
        groups=("billing", "audit"),
    ),
    Case(
        "a hole below what was polled",
        ONE + sent(2, at=1) + got((1, 2)),
        "lost_below",
        drained=False,
    ),
    Case(
        "a hole inside a batch",
        sent(1, 2, 3, at=0) + got((0, 1), (2, 3)),
        "lost_below int_poll_skip",
        drained=False,
    ),
    Case(
        "a hole for one of two groups",
        ONE + sent(2, at=1) + got((0, 1), (1, 2)) + got((1, 2), group="audit"),
        "lost_below",
        drained=False,
        groups=("billing", "audit"),
    ),
    Case(
        "a hole in one queue, a tail in the other",
        sent(1, 2, at=0) + sent(3, at=2, queue=R) + got((1, 2)),
        "lost_below",
        drained=False,
    ),
    Case("a value from nowhere", got((0, 1)), "phantom"),
    Case("a value from nowhere, twice", got((0, 1)) + AGAIN, "phantom"),
    Case("a refused send is polled", refused(1) + GOT_ONE, "phantom"),
    Case("refused twice, polled", refused(1) + refused(1) + GOT_ONE, "phantom"),
    Case(
        "a retry was stored again",
        ONE + sent(2, at=2) + got((0, 1), (1, 1), (2, 2)),
        "duplicate_stored",
    ),
    Case("an unknown send was stored twice", unknown(1) + got((0, 1), (1, 1)), "duplicate_stored"),
    Case("answered twice with two places", ONE + sent(1, at=1) + GOT_ONE, "duplicate_stored"),
    Case("stored in two queues", ONE + GOT_ONE + got((0, 1), queue=R), "duplicate_stored"),
    Case("polled elsewhere than the answer said", ONE + got((4, 1)), "duplicate_stored"),
    Case(
        "two producers were told the same place",
        ONE + sent(2, at=0, by="p2") + GOT_ONE,
        "lost inconsistent_positions",
    ),
    Case(
        "a sequence was used again",
        unknown(1) + unknown(2) + GOT_ONE + got((0, 2)),
        "inconsistent_positions",
    ),
    Case(
        "a lost write's place holds another",
        ONE + unknown(2) + got((0, 2)),
        "lost inconsistent_positions",
    ),
    Case(
        "three values at one place",
        unknown(1) + unknown(2) + unknown(3) + got((0, 1), (0, 2), (0, 3)),
        "inconsistent_positions",
    ),
    Case(
        "two consumers see two orders",
        unknown(1) + unknown(2) + got((0, 1), (1, 2)) + got((0, 2), (1, 1), group="audit"),
        "duplicate_stored duplicate_stored inconsistent_positions inconsistent_positions",
    ),
    Case(
        "the second send lies before the first",
        sent(1, at=1) + sent(2, at=0) + got((0, 2), (1, 1)),
        "send_order",
    ),
    Case(
        "overlapping sends changed places",
        overlapping(sent(1, at=1), sent(2, at=0)) + got((0, 2), (1, 1)),
        "send_order",
    ),
    Case(
        "two sends fell behind",
        sent(1, at=9) + sent(2, at=0) + sent(3, at=1),
        "send_order send_order",
        drained=False,
    ),
    Case(
        "batches overlap",
        sent(1, 2, at=0) + sent(3, at=1),
        "inconsistent_positions send_order",
        drained=False,
    ),
    Case("an unknown batch was torn apart", unknown(1, 2) + got((3, 1), (5, 2)), "send_order"),
    Case(
        "a batch tried twice was torn apart, told once",
        unknown(1, 2) + unknown(1, 2) + got((3, 1), (5, 2)),
        "send_order",
    ),
    Case(
        "an answered batch was torn apart",
        sent(1, 2, at=3) + got((3, 1)) + got((5, 2)),
        "duplicate_stored send_order poll_skip",
    ),
    Case(
        "an unfinished batch was turned around",
        tried(1, 2) + got((3, 2)) + got((4, 1)),
        "send_order",
    ),
    Case(
        "an answered batch was turned around",
        sent(1, 2, at=0) + got((0, 2), (1, 1)),
        (
            "duplicate_stored duplicate_stored inconsistent_positions inconsistent_positions "
            "send_order"
        ),
    ),
    Case("comes again after its acknowledgement", SETTLED + AGAIN, "delivered_after_ack"),
    Case("comes again to the same consumer", SETTLED + got((0, 1, 2)), "delivered_after_ack"),
    Case(
        "comes again after an acknowledgement by sequence",
        ONE + GOT_ONE + done_at(0) + AGAIN,
        "delivered_after_ack",
    ),
    Case("comes twice again, told once", SETTLED + AGAIN + AGAIN, "delivered_after_ack"),
    Case(
        "the first message was acknowledged, both come again",
        sent(1, 2, at=0) + got((0, 1), (1, 2)) + done(1) + got((0, 1, 2), (1, 2, 2)),
        "delivered_after_ack",
    ),
    Case(
        "one poll leaves a message out, which comes later",
        THREE + got((0, 1), (2, 3)) + got((1, 2)),
        "int_poll_skip nonmonotonic_poll",
    ),
    Case(
        "two polls leave a message out, which comes later",
        THREE + ZEROTH + got((2, 3)) + got((1, 2)),
        "poll_skip nonmonotonic_poll",
    ),
    Case("two polls leave a message out for ever", THREE + ZEROTH + got((2, 3)), "lost poll_skip"),
    Case(
        "one poll goes back",
        THREE + got((0, 1), (2, 3), (1, 2)),
        "int_poll_skip int_nonmonotonic_poll",
    ),
    Case(
        "a poll goes back behind where it began",
        THREE + got((1, 2), (2, 3)) + ZEROTH,
        "nonmonotonic_poll",
    ),
    Case(
        "a reset came before the acknowledgement",
        ONE + reset() + GOT_ONE + done(1) + AGAIN,
        "delivered_after_ack",
    ),
    Case("a reset of another group", SETTLED + reset(group="audit") + AGAIN, "delivered_after_ack"),
    Case(
        "a reset of another group under way",
        SETTLED + within(reset(group="audit"), AGAIN),
        "delivered_after_ack",
    ),
    Case("a reset that was refused", SETTLED + reset(end="fail") + AGAIN, "delivered_after_ack"),
    Case(
        "two masters in one epoch",
        sent(1, at=0, master=(3, "a")) + sent(2, at=1, master=(3, "b")),
        "two_masters",
        drained=False,
    ),
    Case(
        "the old master came back",
        sent(1, at=0, master=(3, "a"))
        + sent(2, at=1, master=(4, "b"))
        + sent(3, at=2, master=(4, "a"))
        + sent(4, at=3, master=(4, "a")),
        "two_masters",
        drained=False,
    ),
    Case(
        "everything at once",
        refused(1) + SETTLED[2:] + AGAIN + sent(2, at=0),
        "phantom lost inconsistent_positions delivered_after_ack",
    ),
]


def answered_nowhere() -> list[Event]:
    """An invalid history: an answered send must have a position."""
    return [Send(process="p1", type="ok", subject="orders", values=(1,))]
