"""The checkers of ordered histories are tested before anything is tested by them: small ones, each
with exactly what is wrong in it.

Short notation for hand-made ordered histories; `lines(...)` joins operations and stamps them with
times.

    lines(ONE, put("d1 d2", at="1:0 1:1"), give("d1@0 d2@1"), done("0 1"))

means: the route has one partition; p1 sent two messages of key d, stored at sequences 0 and 1 of
partition 1; c1 got both under token 1 and acknowledged them. With eight logical partitions the keys
have these logical partitions:

    d 0, f 2, o 3  |  e 4, g 5, k 6          partition 2 has [0, 4) and partition 3 [4, 8) wherever
                                             they occur here

Small ordered histories, good and bad. A bad one names every anomaly that the checkers must find in
it; they must find no other.

A case is drained unless it says `drained=False`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import pytest

from history.events import Note, Operation, Reset, Type
from history.ordered import (
    Deliver,
    Handed,
    Keyed,
    OrderedHistory,
    Part,
    Put,
    Rerouted,
    Settle,
    Stored,
    check_ordered,
)
from history.ordered.checkers import Pauses
from history.ordered.events import Outage, Sealed

LPS = 8
STEP_NS = 10
JUST_NOW = -1
"""For a settlement that began right before it was answered."""


def keyed(name: str) -> Keyed:
    """`d12`: message 12 of key d."""
    return Keyed(name[0], int(name[1:]))


def id_of(message: Keyed) -> int:
    """A number in place of a message id."""
    return ord(message.key) * 1000 + message.serial


def put(
    names: str,
    at: str = "",
    *,
    by: str = "p1",
    resent: bool | None = None,
    end: Type | None = "ok",
    since_ns: int = 0,
    until_ns: int = 0,
) -> list[Operation]:
    """`put("d1 d2", at="1:0 1:1")`: places are partition:sequence. Without an end the outcome is
    unknown.
    """
    messages = tuple(map(keyed, names.split()))
    begun = Put(process=by, type="invoke", subject="orders", messages=messages, t_ns=since_ns)
    if end is None:
        return [begun]
    numbers = [tuple(map(int, place.split(":"))) for place in at.split()]
    places = tuple(
        Stored(part, sequence, id_of(each))
        for (part, sequence), each in zip(numbers, messages, strict=end == "ok")
    )
    return [begun, replace(begun, type=end, places=places, resent=resent, t_ns=until_ns)]


def give(
    names: str,
    *,
    part: int = 1,
    token: int = 1,
    by: str = "c1",
    group: str = "g",
    lps: tuple[int, int] = (0, LPS),
    version: int = 1,
    sent_by: str = "p1",
    attempt: int = 1,
    id: int | None = None,
) -> list[Operation]:
    """`give("d1@0 d2@1")`: messages at sequences of a partition, all in one lane."""
    found = [each.split("@") for each in names.split()]
    handed = tuple(
        Handed(
            int(at),
            *keyed(name)[:1],
            sent_by,
            keyed(name).serial,
            attempt,
            id_of(keyed(name)) if id is None else id,
        )
        for name, at in found
    )
    return [
        Deliver(
            process=by,
            type="ok",
            group=group,
            partition=part,
            first=lps[0],
            end=lps[1],
            token=token,
            version=version,
            handed=handed,
        )
    ]


def done(
    sequences: str,
    *,
    part: int = 1,
    token: int = 1,
    by: str = "c1",
    group: str = "g",
    end: Type = "ok",
    began_line: int | None = None,
) -> list[Operation]:
    """An acknowledgement's answer; it began just now, or at the time of that line of the history,
    counted from 0.
    """
    began_ns = JUST_NOW if began_line is None else (began_line + 1) * STEP_NS
    numbers = tuple(map(int, sequences.split()))
    return [
        Settle(
            process=by,
            type=end,
            group=group,
            partition=part,
            token=token,
            sequences=numbers,
            began_ns=began_ns,
        )
    ]


def through(
    names: str,
    *,
    part: int = 1,
    token: int = 1,
    by: str = "c1",
    group: str = "g",
    lps: tuple[int, int] = (0, LPS),
) -> list[Operation]:
    """Messages that were delivered and acknowledged."""
    sequences = " ".join(each.split("@")[1] for each in names.split())
    return give(names, part=part, token=token, by=by, group=group, lps=lps) + done(
        sequences, part=part, token=token, by=by, group=group
    )


def route(
    version: int,
    parts: str,
    *,
    sources: Iterable[int] = (),
    sealed: str = "",
    fenced: Iterable[int] = (),
    began_ns: int | None = None,
    published_ns: int | None = None,
) -> list[Operation]:
    """`route(2, "2:0-4@b1 3:4-8@b2", sources=[1], sealed="1:17")`."""
    found = []
    for text in parts.split():
        number, rest = text.split(":")
        lps, group = rest.split("@")
        first, end = lps.split("-")
        found.append(Part(int(number), int(first), int(end), group))
    seals = tuple(Sealed(*map(int, each.split(":"))) for each in sealed.split())
    return [
        Rerouted(
            process="nemesis",
            type="ok",
            version=version,
            logical_partitions=LPS,
            partitions=tuple(found),
            sources=tuple(sources),
            sealed=seals,
            fenced=tuple(fenced),
            began_ns=began_ns,
            published_ns=published_ns,
        )
    ]


def outage(broker_group: str, since_ns: int, until_ns: int) -> list[Operation]:
    """A broker group without a master."""
    begun = Outage(
        process="nemesis",
        type="invoke",
        broker_group=broker_group,
        kind="kill",
        op=since_ns,
        t_ns=since_ns,
    )
    return [begun, replace(begun, type="ok", t_ns=until_ns)]


def reset(group: str) -> list[Operation]:
    """An operator's."""
    return [Reset(process="operator", type="ok", group=group)]


def lines(*parts: list[Operation]) -> list[Operation]:
    """The whole history, stamped by place unless a line brings its own time."""
    found = [event for part in parts for event in part]
    stamped = [
        event if event.t_ns else replace(event, t_ns=(at + 1) * STEP_NS)
        for at, event in enumerate(found)
    ]
    return [
        replace(event, began_ns=event.t_ns - 1)
        if isinstance(event, Settle) and event.began_ns == JUST_NOW
        else event
        for event in stamped
    ]


ONE = route(1, "1:0-8@b1")
SPLIT = "2:0-4@b1 3:4-8@b2"


def split(sealed: int, *, fenced: bool = False) -> list[Operation]:
    """Version 2: partition 1 is closed at that sequence."""
    return route(2, SPLIT, sources=[1], sealed=f"1:{sealed}", fenced=[1] if fenced else [])


S = 1_000_000_000


class Case(NamedTuple):
    """A history, and the names of its anomalies."""

    name: str
    events: list[Operation]
    wrong: str = ""
    drained: bool = True
    groups: tuple[str, ...] = ()
    strict: tuple[str, ...] = ()
    latest: tuple[str, ...] = ()


D1 = put("d1", at="1:0")
D123 = put("d1 d2 d3", at="1:0 1:1 1:2")
GIVEN = give("d1@0 d2@1 d3@2")
DONE = done("0 1 2")
AGAIN = "2:0-4@b1 3:4-8@b1"
MERGED = "4:0-8@b2"
LOW, HIGH = (0, 4), (4, 8)
PARENT = put("d1 g1", at="1:0 1:1")
"""A message of either half, in partition 1."""
CHILDREN = put("d2 g2", at="2:0 3:0")
TWICE = [*put("d1 d2 d3", at="1:0 1:1 1:2")[:1], *put("d1", at="1:0")[1:]]
"""p1 sent three, and got the answer for the first; the others are on their way when partition 1 is
fenced.
"""
RESENT = put("d2 d3", at="2:0 2:1", resent=True)[1:]
SEEN_TWICE = [
    *through("d1@0 d2@1 d3@2", lps=(0, 8)),
    *through("d2@0 d3@1", part=2, token=1, lps=LOW),
]

GOOD = [
    Case("nothing happened", lines(ONE)),
    Case("one message goes through", lines(ONE, D1, through("d1@0"))),
    Case(
        "three messages of a key, one after the other",
        lines(ONE, D123, through("d1@0"), through("d2@1"), through("d3@2")),
    ),
    Case(
        "keys need no order between them",
        lines(
            ONE, put("d1 g1 d2", at="1:0 1:1 1:2"), give("g1@1"), give("d1@0 d2@2"), done("1 0 2")
        ),
    ),
    Case(
        "two producers of one key need no order",
        lines(
            ONE,
            D1,
            put("d1", at="1:1", by="p2"),
            through("d1@0"),
            give("d1@1", sent_by="p2"),
            done("1"),
        ),
    ),
    Case("given before the producer has its answer", lines(ONE, D1[:1], through("d1@0"), D1[1:])),
    Case(
        "two groups, each in its time",
        lines(ONE, D123, GIVEN, DONE, give("d1@0 d2@1 d3@2", group="h"), done("0 1 2", group="h")),
        groups=("g", "h"),
    ),
    Case(
        "notes are for people",
        [
            Note(process="nemesis", type="info", f="kill", text="b1", t_ns=1),
            *lines(ONE, D1, through("d1@0")),
        ],
    ),
    Case("not drained: the tail is on its way", lines(ONE, D123, through("d1@0")), drained=False),
    Case(
        "an unknown put was stored",
        lines(ONE, outage("b1", 1, 10), put("d1", end="info"), through("d1@0")),
    ),
    Case(
        "an unfinished put was not stored",
        lines(ONE, put("d1", end=None), put("d2", at="1:0"), through("d2@0")),
    ),
    Case(
        "an unfinished put was stored",
        lines(ONE, put("d1", end=None), put("d2", at="1:1"), through("d1@0 d2@1")),
    ),
    Case(
        "a consumer dies, the next begins at the first that is not settled",
        lines(ONE, D123, GIVEN, done("0"), through("d2@1 d3@2", token=2, by="c2")),
    ),
    Case(
        "a consumer dies behind its acknowledgement",
        lines(ONE, D123, GIVEN, through("d3@2", token=2, by="c2")),
    ),
    Case(
        "its answer was lost, all is replayed",
        lines(
            ONE, D123, GIVEN, done("0 1 2", end="info"), through("d1@0 d2@1 d3@2", token=2, by="c2")
        ),
    ),
    Case(
        "a failed message is tried again",
        lines(ONE, D123, give("d1@0 d2@1"), give("d2@1", attempt=2), give("d3@2"), DONE),
    ),
    Case("a replay under the same token", lines(ONE, D123, GIVEN, give("d1@0 d2@1 d3@2"), DONE)),
    Case(
        "a lane is cut in two",
        lines(ONE, PARENT, give("d1@0"), done("0"), through("g1@1", token=3, by="c2", lps=HIGH)),
    ),
    Case(
        "a stopped consumer wakes up: its deliveries no longer count",
        lines(
            ONE,
            D123,
            give("d1@0"),
            give("d1@0 d2@1", token=2, by="c2"),
            give("d2@1"),
            done("0 1", end="fail"),
            done("0 1", token=2, by="c2"),
            through("d3@2", token=2, by="c2"),
        ),
    ),
    Case(
        "an acknowledgement was under way when the lane was lost",
        lines(
            ONE,
            D123,
            GIVEN,
            give("d3@2", token=2, by="c2"),
            done("0 1", began_line=3),
            done("2", end="fail"),
            done("2", token=2, by="c2"),
        ),
    ),
    Case(
        "a reset brings it back",
        lines(ONE, D123, GIVEN, DONE, reset("g"), through("d1@0 d2@1 d3@2", token=2)),
    ),
    Case(
        "a group that began at the end has nothing before",
        lines(ONE, D123, through("d3@2")),
        latest=("g",),
    ),
    Case(
        "a group that began at the end, behind a split",
        lines(
            ONE,
            PARENT,
            split(2),
            CHILDREN,
            through("d2@0", part=2, lps=LOW),
            through("g2@0", part=3, lps=HIGH),
        ),
        latest=("g",),
    ),
    Case(
        "a split: one half continues while the other is read",
        lines(
            ONE,
            PARENT,
            split(2),
            CHILDREN,
            through("d1@0"),
            through("d2@0", part=2, lps=LOW),
            through("g1@1"),
            through("g2@0", part=3, lps=HIGH),
        ),
    ),
    Case(
        "a split with a strict gate",
        lines(
            ONE,
            PARENT,
            split(2),
            CHILDREN,
            through("d1@0 g1@1"),
            through("d2@0", part=2, lps=LOW),
            through("g2@0", part=3, lps=HIGH),
        ),
        strict=("g",),
    ),
    Case(
        "a merge",
        lines(
            route(1, AGAIN),
            put("d1 g1", at="2:0 3:0"),
            route(2, MERGED, sources=[2, 3], sealed="2:1 3:1"),
            put("d2 g2", at="4:0 4:1"),
            through("d1@0", part=2, lps=LOW),
            through("g1@0", part=3, lps=HIGH),
            through("d2@0 g2@1", part=4),
        ),
    ),
    Case(
        "an untouched partition continues over a change",
        lines(
            route(1, AGAIN),
            put("d1 g1", at="2:0 3:0"),
            route(2, "4:0-4@b2 3:4-8@b1", sources=[2], sealed="2:1"),
            put("d2 g2", at="4:0 3:1"),
            through("g1@0 g2@1", part=3, lps=HIGH),
            through("d1@0", part=2, lps=LOW),
            through("d2@0", part=4, lps=LOW),
        ),
    ),
    Case(
        "the next version is read behind an acknowledgement that no consumer received",
        lines(
            ONE,
            PARENT,
            split(2),
            CHILDREN,
            give("d1@0 g1@1"),
            through("d2@0", part=2, lps=LOW),
            through("g2@0", part=3, lps=HIGH),
        ),
    ),
    Case(
        "a fence: what nobody knew of is stored twice, in order",
        lines(
            ONE,
            TWICE,
            split(-1, fenced=True),
            RESENT,
            route(2, "2:0-4@b1 3:4-8@b2", sources=[1], sealed="1:3"),
            SEEN_TWICE,
        ),
    ),
    Case(
        "a fence: the old partition had only some of it",
        lines(
            ONE,
            TWICE,
            split(-1),
            RESENT,
            through("d1@0 d2@1"),
            through("d2@0 d3@1", part=2, lps=LOW),
        ),
    ),
    Case(
        "a fence: the second copy was not answered either", lines(ONE, TWICE, split(-1), SEEN_TWICE)
    ),
    Case(
        "a put is slow while its partition is closed",
        lines(
            route(1, "1:0-8@b1"),
            put("d1", at="2:0", since_ns=S, until_ns=9 * S),
            route(
                2,
                "2:0-4@b1 3:4-8@b2",
                sources=[1],
                sealed="1:0",
                began_ns=2 * S,
                published_ns=8 * S,
            ),
        ),
        drained=False,
    ),
    Case(
        "a put is slow while its group has no master",
        lines(ONE, put("d1", at="1:0", since_ns=S, until_ns=9 * S), outage("b1", 2 * S, 8 * S)),
        drained=False,
    ),
    Case(
        "a put fails right behind an outage",
        lines(
            ONE,
            outage("b1", 2 * S, 3 * S),
            put("d1", end="info", since_ns=4 * S, until_ns=4 * S + 9),
        ),
        drained=False,
    ),
    Case(
        "an outage without an end excuses all that follows",
        lines(
            ONE, outage("b1", S, 2 * S)[:1], put("d1", at="1:0", since_ns=3 * S, until_ns=30 * S)
        ),
        drained=False,
    ),
]

BAD = [
    Case("never given", lines(ONE, D1), "lost", groups=("g",)),
    Case("the last of three was never given", lines(ONE, D123, through("d1@0 d2@1")), "lost"),
    Case(
        "one of two groups misses one",
        lines(ONE, D123, GIVEN, DONE, through("d1@0 d2@1", group="h")),
        "lost",
    ),
    Case(
        "the tail of a closed partition is passed over",
        lines(
            ONE,
            PARENT,
            split(2),
            put("d2", at="2:0"),
            through("d1@0"),
            through("d2@0", part=2, lps=LOW),
        ),
        "lost",
    ),
    Case(
        "given, its acknowledgement refused, and never again",
        lines(ONE, D1, give("d1@0"), done("0", end="fail")),
        "unsettled",
    ),
    Case(
        "two refused at the end",
        lines(ONE, D123, through("d1@0"), give("d2@1 d3@2"), done("1 2", end="fail")),
        "unsettled unsettled",
    ),
    Case(
        "refused twice",
        lines(
            ONE,
            D1,
            give("d1@0"),
            give("d1@0", token=2, by="c2"),
            done("0", end="fail"),
            done("0", token=2, by="c2", end="fail"),
        ),
        "unsettled",
    ),
    Case("from nowhere", lines(ONE, give("d1@0")), "phantom"),
    Case("from nowhere, among others", lines(ONE, D1, through("d1@0 d7@1")), "phantom"),
    Case(
        "from a producer that never sent it",
        lines(ONE, D1, through("d1@0"), give("d1@1", sent_by="p9")),
        "phantom",
    ),
    Case(
        "certainly failed, and given",
        lines(ONE, outage("b1", 1, 10), put("d1", end="fail"), through("d1@0")),
        "phantom",
    ),
    Case(
        "a newer one first",
        lines(ONE, D123, through("d1@0 d3@2"), through("d2@1", token=2)),
        "skipped",
    ),
    Case(
        "the second comes before the first, which never comes",
        lines(ONE, D123, through("d2@1 d3@2")),
        "lost skipped",
    ),
    Case(
        "the next consumer leaves one out",
        lines(
            ONE, D123, through("d1@0"), through("d3@2", token=2, by="c2"), through("d2@1", token=3)
        ),
        "skipped",
    ),
    Case(
        "an older one comes between newer ones",
        lines(
            ONE,
            D123,
            put("d4", at="1:3"),
            give("d1@0 d3@2"),
            give("d2@1", token=2),
            give("d4@3", token=2),
        ),
        "skipped torn_replay",
    ),
    Case(
        "order breaks over a split",
        lines(
            ONE,
            PARENT,
            split(2),
            put("d2", at="2:0"),
            through("d2@0", part=2, lps=LOW),
            through("d1@0 g1@1"),
        ),
        "skipped early",
    ),
    Case(
        "the next consumer begins too late",
        lines(
            ONE,
            D123,
            GIVEN,
            done("0 1", end="fail"),
            give("d3@2", token=2, by="c2"),
            through("d1@0 d2@1 d3@2", token=3),
        ),
        "torn_replay",
    ),
    Case(
        "... since the acknowledgement began later",
        lines(
            ONE,
            D123,
            give("d1@0"),
            give("d2@1", token=2, by="c2"),
            done("0", began_line=5),
            through("d3@2", token=2, by="c2"),
        ),
        "torn_replay zombie_ack",
    ),
    Case(
        "a replay leaves one out",
        lines(ONE, D123, GIVEN, give("d1@0 d3@2", token=2, by="c2"), through("d2@1 d3@2", token=3)),
        "torn_replay",
    ),
    Case(
        "a replay under the same token leaves one out",
        lines(ONE, D123, GIVEN, give("d1@0"), give("d3@2"), DONE),
        "torn_replay",
    ),
    Case(
        "a lost lane's acknowledgement counts",
        lines(
            ONE,
            D1,
            give("d1@0"),
            give("d1@0", token=2, by="c2"),
            done("0"),
            done("0", token=2, by="c2", end="fail"),
        ),
        "zombie_ack",
    ),
    Case(
        "... in a lane that covers a part of it",
        lines(
            ONE,
            PARENT,
            give("d1@0 g1@1"),
            give("g1@1", token=2, by="c2", lps=HIGH),
            done("1"),
            done("0"),
        ),
        "zombie_ack",
    ),
    Case(
        "... of the same consumer",
        lines(
            ONE, D1, give("d1@0"), give("d1@0", token=2), done("0"), done("0", token=2, end="info")
        ),
        "zombie_ack",
    ),
    Case(
        "... of both messages",
        lines(ONE, PARENT, give("d1@0 g1@1"), through("d1@0 g1@1", token=2, by="c2"), done("0 1")),
        "zombie_ack zombie_ack",
    ),
    Case(
        "settled, and given again",
        lines(ONE, D1, through("d1@0"), through("d1@0", token=2, by="c2")),
        "came_back",
    ),
    Case(
        "settled, and given again twice",
        lines(ONE, D1, through("d1@0"), give("d1@0", token=2, by="c2"), give("d1@0", token=3)),
        "came_back came_back",
    ),
    Case(
        "settled, and given again in a replay of others",
        lines(ONE, D123, GIVEN, done("0"), through("d1@0 d2@1 d3@2", token=2, by="c2")),
        "came_back",
    ),
    Case(
        "settled, and given again after another group's reset",
        lines(ONE, D1, through("d1@0"), reset("h"), through("d1@0", token=2)),
        "came_back",
    ),
    Case(
        "two consumers with one token",
        lines(ONE, PARENT, give("d1@0"), give("g1@1", by="c2"), done("0"), done("1", by="c2")),
        "shared_token",
    ),
    Case(
        "one token for two ranges",
        lines(ONE, PARENT, through("d1@0", lps=LOW), through("g1@1", lps=HIGH)),
        "shared_token",
    ),
    Case(
        "three with one token",
        lines(
            ONE,
            put("d1 g1 e1", at="1:0 1:1 1:2"),
            give("d1@0"),
            give("g1@1", by="c2"),
            give("e1@2", by="c3"),
        ),
        "shared_token shared_token",
    ),
    Case(
        "a child is read before its parent is settled",
        lines(
            ONE,
            PARENT,
            split(2),
            CHILDREN,
            give("d1@0 g1@1"),
            through("d2@0", part=2, lps=LOW),
            through("g2@0", part=3, lps=HIGH),
            done("1"),
            done("0"),
        ),
        "torn_replay torn_replay early early",
    ),
    Case(
        "... of another key in the range",
        lines(
            ONE,
            put("d1 f1", at="1:0 1:1"),
            split(2),
            put("d2", at="2:0"),
            through("d1@0"),
            through("d2@0", part=2, lps=LOW),
            through("f1@1"),
        ),
        "early",
    ),
    Case(
        "... and nobody ever settles that",
        lines(
            ONE,
            put("d1 f1", at="1:0 1:1"),
            split(2),
            put("d2", at="2:0"),
            through("d1@0"),
            give("f1@1"),
            done("1", end="fail"),
            through("d2@0", part=2, lps=LOW),
        ),
        "unsettled early",
    ),
    Case(
        "... two versions on",
        lines(
            ONE,
            put("d1 f1", at="1:0 1:1"),
            split(2),
            route(3, "4:0-4@b2 3:4-8@b2", sources=[2], sealed="2:0"),
            put("d2", at="4:0"),
            through("d1@0"),
            through("d2@0", part=4, lps=LOW),
            through("f1@1"),
        ),
        "early",
    ),
    Case(
        "... of a merge",
        lines(
            route(1, AGAIN),
            put("d1 g1", at="2:0 3:0"),
            route(2, MERGED, sources=[2, 3]),
            put("d2", at="4:0"),
            through("d1@0", part=2, lps=LOW),
            through("d2@0", part=4),
            through("g1@0", part=3, lps=HIGH),
        ),
        "early",
    ),
    Case(
        "... with a strict gate, the other half's",
        lines(
            ONE,
            PARENT,
            split(2),
            CHILDREN,
            through("d1@0"),
            through("d2@0", part=2, lps=LOW),
            through("g1@1"),
            through("g2@0", part=3, lps=HIGH),
        ),
        "early",
        strict=("g",),
    ),
    Case(
        "... while a fenced partition has more to come",
        lines(
            ONE,
            TWICE,
            split(-1),
            RESENT,
            through("d1@0"),
            through("d2@0 d3@1", part=2, lps=LOW),
            through("d2@1"),
        ),
        "early",
    ),
    Case(
        "two messages were told one place",
        lines(ONE, D1, put("g1", at="1:0"), through("d1@0")),
        "lost two_at_one_place",
    ),
    Case(
        "a place shows another message",
        lines(ONE, D1, through("d1@0"), put("g1", end=None), give("g1@0")),
        "two_at_one_place",
    ),
    Case(
        "three at one place",
        lines(ONE, put("d1 g1 e1", at="1:0 1:0 1:0"), through("d1@0"), give("g1@0"), give("e1@0")),
        "two_at_one_place two_at_one_place",
    ),
    Case(
        "stored behind the command message",
        lines(ONE, PARENT, split(1), through("d1@0 g1@1")),
        "behind_seal",
    ),
    Case(
        "stored where the command message lies",
        lines(ONE, D1, split(0), through("d1@0")),
        "behind_seal",
    ),
    Case(
        "behind a command message that came late",
        lines(ONE, D123, split(-1), route(2, "2:0-4@b1 3:4-8@b2", sealed="1:1"), GIVEN, DONE),
        "behind_seal behind_seal",
    ),
    Case(
        "given from behind the command message, never answered",
        lines(ONE, put("d1", end=None), split(0), through("d1@5")),
        "behind_seal",
    ),
    Case(
        "in a partition of other keys",
        lines(route(1, AGAIN), put("d1", at="3:0"), through("d1@0", part=3, lps=HIGH)),
        "wrong_partition",
    ),
    Case(
        "in a partition that no route has",
        lines(ONE, put("d1", at="9:0"), through("d1@0", part=9)),
        "wrong_partition",
    ),
    Case(
        "both halves changed places",
        lines(
            route(1, AGAIN),
            put("d1 g1", at="3:0 2:0"),
            through("d1@0", part=3, lps=HIGH),
            through("g1@0", part=2, lps=LOW),
        ),
        "wrong_partition wrong_partition",
    ),
    Case(
        "the second lies before the first",
        lines(ONE, put("d1 d2", at="1:1 1:0"), through("d1@1 d2@0")),
        "log_order",
    ),
    Case(
        "the second send lies before the first",
        lines(ONE, put("d1", at="1:7"), put("d2", at="1:3"), through("d1@7 d2@3")),
        "log_order",
    ),
    Case(
        "the second lies in an older partition",
        lines(
            ONE,
            put("d1", at="2:0"),
            split(1),
            put("d2", at="1:0"),
            through("d2@0"),
            through("d1@0", part=2, lps=LOW),
        ),
        "skipped log_order",
    ),
    Case(
        "two lines out of order",
        lines(ONE, put("d1 d2 g1 g2", at="1:1 1:0 1:3 1:2"), through("d1@1 d2@0 g1@3 g2@2")),
        "log_order log_order",
    ),
    Case(
        "stored twice in one partition",
        lines(ONE, D1, through("d1@0 d1@1")),
        "stored_twice stored_twice",
    ),
    Case(
        "stored twice without a fence",
        lines(ONE, TWICE, split(3), RESENT, SEEN_TWICE),
        "stored_twice stored_twice",
    ),
    Case(
        "stored twice and not sent again",
        lines(ONE, D1, split(-1), through("d1@0"), through("d1@0", part=2, lps=LOW)),
        "stored_twice",
    ),
    Case(
        "the second copy has another id",
        lines(
            ONE,
            TWICE,
            split(-1),
            RESENT,
            through("d1@0 d2@1"),
            give("d2@0", part=2, lps=LOW, id=7),
            through("d3@1", part=2, lps=LOW),
        ),
        "stored_twice",
    ),
    Case(
        "the replay in the log leaves one out",
        lines(
            ONE,
            TWICE,
            split(-1),
            put("d2", at="2:0", resent=True)[1:],
            put("d4", at="2:1"),
            through("d1@0 d2@1 d3@2"),
            through("d2@0 d4@1", part=2, lps=LOW),
        ),
        "torn_replay stored_twice",
    ),
    Case(
        "the second copies changed places",
        lines(
            ONE,
            TWICE,
            split(-1),
            put("d2 d3", at="2:1 2:0", resent=True)[1:],
            through("d1@0 d2@1 d3@2"),
            through("d3@0 d2@1", part=2, lps=LOW),
        ),
        "stored_twice",
    ),
    Case(
        "a put is slow, and nothing happened",
        lines(ONE, put("d1", at="1:0", since_ns=S, until_ns=3 * S)),
        "stalled",
        drained=False,
    ),
    Case(
        "a put fails, and nothing happened",
        lines(ONE, put("d1", end="fail", since_ns=S, until_ns=S + 1)),
        "stalled",
        drained=False,
    ),
    Case(
        "a put is slow while another group has no master",
        lines(
            route(1, "2:0-4@b1 3:4-8@b2"),
            outage("b2", S, 9 * S),
            put("d1", at="2:0", since_ns=S, until_ns=9 * S),
        ),
        "stalled",
        drained=False,
    ),
    Case(
        "a put is slow while another partition is closed",
        lines(
            route(1, AGAIN),
            route(2, "2:0-4@b1 4:4-8@b1", sources=[3], began_ns=S, published_ns=8 * S),
            put("d1", at="2:0", since_ns=S, until_ns=9 * S),
        ),
        "stalled",
        drained=False,
    ),
    Case(
        "a put is slow long after a change",
        lines(
            ONE,
            route(2, "2:0-4@b1 3:4-8@b2", sources=[1], began_ns=S, published_ns=2 * S),
            put("d1", at="2:0", since_ns=8 * S, until_ns=12 * S),
        ),
        "stalled",
        drained=False,
    ),
    Case(
        "two keys are slow, each told once",
        lines(
            ONE,
            put("d1 g1", at="1:0 1:1", since_ns=S, until_ns=4 * S),
            put("d2", at="1:2", since_ns=S, until_ns=5 * S),
        ),
        "stalled stalled",
        drained=False,
    ),
]


def late_hour(events: list[Operation], by_ns: int) -> list[Operation]:
    """The same events, shifted in time."""
    return [replace(event, t_ns=event.t_ns + by_ns) for event in events]


@pytest.mark.parametrize("case", GOOD + BAD, ids=lambda case: case.name)
def test_an_ordered_history_shows_exactly_its_anomalies(case: Case) -> None:
    report = check_ordered(
        case.events,
        drained=case.drained,
        groups=case.groups,
        strict=case.strict,
        latest=case.latest,
    )
    assert sorted(report.names.elements()) == sorted(case.wrong.split()), str(report)
    assert report.ok == (not case.wrong)


def test_every_anomaly_is_found_in_three_bad_histories_at_least() -> None:
    found = Counter(name for case in BAD for name in set(case.wrong.split()))
    names = (
        "lost unsettled phantom skipped torn_replay zombie_ack came_back shared_token early "
        "two_at_one_place behind_seal wrong_partition"
    )
    assert set(found) == {*names.split(), "log_order", "stored_twice", "stalled"}
    assert min(found.values()) >= 3
    assert len({case.name for case in GOOD + BAD}) == len(GOOD + BAD)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_counterexample_is_one_paragraph_that_names_the_message(case: Case) -> None:
    for anomaly in check_ordered(
        case.events, drained=case.drained, groups=case.groups, strict=case.strict
    ).anomalies:
        assert "\n" not in str(anomaly)
        assert 40 < len(anomaly.what) < 400
        assert anomaly.name == "shared_token" or any(f"{key} " in anomaly.what for key in "dfoegk")


def test_a_counterexample_reads_as_a_story() -> None:
    events = lines(
        ONE,
        put("d1", at="1:0"),
        give("d1@0"),
        give("d1@0", token=2, by="c2"),
        done("0"),
        done("0", token=2, by="c2", end="fail"),
    )
    (found,) = check_ordered(events, drained=True).anomalies
    assert found.what == (
        "d 1 of p1 was acknowledged by c1 (token 1, [0, 8) of partition 1) in group g, which "
        "began at 0.000000 s and was confirmed, "
        "although c2 (token 2, [0, 8) of partition 1) was given messages of the same logical "
        "partition from 0.000000 s on"
    )


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (lines(route(2, "1:0-8@b1")), "every version"),
        (lines(ONE, route(1, "2:0-8@b1")), "was recorded as"),
        (lines(ONE, put("d2 d1", at="1:0 1:1")), "serials must grow"),
        (lines(ONE, put("d1", at="1:0")[1:]), "without having begun"),
        (lines(ONE, put("d1", at="1:0"), put("d1", at="1:0")[1:]), "or twice"),
        (
            lines(
                ONE,
                [
                    replace(event, places=())
                    for event in put("d1", at="1:0")
                    if isinstance(event, Put)
                ],
            ),
            "must say where",
        ),
        (lines(ONE, put("d1", at="1:0"), done("0")), "was not given"),
    ],
)
def test_a_history_that_proves_nothing_is_refused(events: list[Operation], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_ordered(events, drained=True)


def test_late_and_repeated_deliveries_are_counted() -> None:
    events = lines(
        ONE,
        put("d1 d2", at="1:0 1:1"),
        give("d1@0"),
        give("d1@0 d2@1", token=2, by="c2"),
        give("d2@1"),
        done("0 1", end="fail"),
        done("0 1", token=2, by="c2"),
    )
    counts = check_ordered(events, drained=True).counts
    assert (counts["deliveries"], counts["repeated"], counts["late"]) == (4, 2, 1)


def test_copies_and_what_was_sent_again_are_counted() -> None:
    case = next(case for case in GOOD if "stored twice, in order" in case.name)
    counts = check_ordered(case.events, drained=True).counts
    assert (counts["with two copies"], counts["sent again after a fence"], counts["changes"]) == (
        2,
        2,
        1,
    )
    assert (counts["sent"], counts["acknowledged"], counts["stored"]) == (3, 3, 3)


def test_the_pause_of_a_change_is_the_longest_time_without_an_answer_in_its_ranges() -> None:
    serials = count(1)

    def sent(key: str, part: int, at_ns: int) -> list[Operation]:
        serial = next(serials)
        return put(f"{key}{serial}", at=f"{part}:{serial}", since_ns=at_ns - 1, until_ns=at_ns)

    low = [sent("d", 2, int(at * S)) for at in (1, 2, 3, 3.1, 3.9, 5)]
    high = [sent("g", 3, int(at * S)) for at in (1, 4.5)]
    change = route(
        2, "4:0-4@b1 3:4-8@b2", sources=[2], began_ns=int(3.2 * S), published_ns=int(3.6 * S)
    )
    events = lines(
        route(1, "2:0-4@b1 3:4-8@b2"),
        change,
        *low,
        *high,
        outage("b1", 2 * S, int(2.5 * S)),
        outage("b3", S, 2 * S),
    )
    report = check_ordered(events, drained=False)
    assert report.write_pauses == {"a change": Pauses((int(0.7 * S),)), "kill": Pauses((S,))}
    assert report.figures["writes paused by a change, s"] == {
        "p50": 0.7,
        "p99": 0.7,
        "max": 0.7,
        "of": 1,
    }
    assert report.figures["writes paused by kill, s"]["p50"] == 1.0
    met = check_ordered([*events, *outage("b1", int(3.3 * S), int(3.4 * S))], drained=False)
    assert met.write_pauses["a change in an outage"] == Pauses((int(0.7 * S),))


def test_the_pause_of_a_group_is_the_longest_time_without_a_delivery() -> None:
    given = [
        replace(event, t_ns=at * S)
        for at, part, token in ((1, 1, 1), (2, 1, 1), (6, 2, 2))
        for event in give("d1@0", part=part, token=token)
    ]
    change = route(2, "2:0-8@b1", sources=[1], began_ns=3 * S, published_ns=4 * S)
    report = check_ordered(lines(ONE, change, put("d1", end=None), given), drained=False)
    assert report.read_pauses == {"g": {"a change": Pauses((3 * S,))}}
    assert report.figures["g paused by a change, s"]["p99"] == 3.0


def test_without_values_there_are_no_quantiles() -> None:
    assert Pauses(()).quantile(0.5) == 0.0
    assert [Pauses((3 * S, S, 2 * S)).quantile(share) for share in (0.0, 0.5, 0.99, 1.0)] == [
        1.0,
        2.0,
        3.0,
        3.0,
    ]


def test_the_ordered_report_is_json_and_text_and_stays_short() -> None:
    events = lines(ONE, *(put(f"d{at}", at=f"1:{at}") for at in range(1, 101)), split(101))
    report = check_ordered(events, drained=True, groups=("g",))
    told = json.loads(json.dumps(report.to_json(shown_max=3)))
    assert (told["found"], len(told["anomalies"]), told["ok"]) == ({"lost": 100}, 3, False)
    assert str(report).startswith("lost 100 (drained)\nsent 100, acknowledged 100")
    assert str(report).count("lost: ") == 10
    assert str(check_ordered(lines(ONE), drained=False)).startswith("no anomaly (not drained)")


def test_one_promise_broken_everywhere_is_reported_at_most_1000_times() -> None:
    events = lines(ONE, *(put(f"d{at}", at=f"1:{at}") for at in range(1, 1_202)))
    assert check_ordered(events, drained=True, groups=("g",)).names == {"lost": 1_000}


@pytest.mark.sampled
def test_a_million_messages_are_judged_in_linear_time() -> None:
    """Uses a tenth of a million messages, in chunks as clients send them. A quadratic checker would
    reach the timeout.
    """
    report = check_ordered(many(100_000, keys=500), drained=True)
    assert report.ok, report
    assert report.counts["deliveries"] == 100_000


def many(messages: int, keys: int) -> list[Operation]:
    """Two partitions, a split of each half way, everything given and settled in chunks of 500."""
    parts = {1: [Part(1, 0, 8, "b1")], 2: [Part(2, 0, 4, "b1"), Part(3, 4, 8, "b2")]}
    serials: Counter[str] = Counter()
    history = OrderedHistory(
        [
            Rerouted(
                process="n", type="ok", version=1, logical_partitions=8, partitions=tuple(parts[1])
            )
        ]
    )
    lps = {f"k{at}": lp_of(history, f"k{at}") for at in range(keys)}
    ends: Counter[int] = Counter()
    events: list[Operation] = [
        Rerouted(
            process="n", type="ok", version=1, logical_partitions=8, partitions=tuple(parts[1])
        )
    ]
    clock = count(1)
    for base in range(0, messages, 500):
        if base == messages // 2:
            sealed = ((1, ends[1]),)
            events.append(
                Rerouted(
                    process="n",
                    type="ok",
                    t_ns=next(clock),
                    version=2,
                    logical_partitions=8,
                    partitions=tuple(parts[2]),
                    sources=(1,),
                    sealed=sealed,
                )  # type: ignore[arg-type]
            )
        route_now = parts[1] if base < messages // 2 else parts[2]
        rows: dict[int, tuple[list[Keyed], list[Stored]]] = {
            part.number: ([], []) for part in route_now
        }
        for at in range(base, base + 500):
            key = f"k{at * 7919 % keys}"
            serials[key] += 1
            (part,) = [each for each in route_now if each.first <= lps[key] < each.end]
            rows[part.number][0].append(Keyed(key, serials[key]))
            rows[part.number][1].append(Stored(part.number, ends[part.number], at))
            ends[part.number] += 1
        for part in route_now:
            names, places = rows[part.number]
            begun = Put(
                process="p", type="invoke", subject="s", messages=tuple(names), t_ns=next(clock)
            )
            handed = tuple(
                Handed(place.sequence, *name[:1], "p", name.serial, 1, place.id)
                for name, place in zip(names, places, strict=True)
            )
            given = Deliver(
                process="c",
                type="ok",
                t_ns=next(clock),
                group="g",
                partition=part.number,
                first=part.first,
                end=part.end,
                token=1,
                version=1,
                handed=handed,
            )
            sequences = tuple(place.sequence for place in places)
            settled = Settle(
                process="c",
                type="ok",
                t_ns=next(clock),
                group="g",
                partition=part.number,
                token=1,
                sequences=sequences,
            )
            events += [
                begun,
                replace(begun, type="ok", places=tuple(places), t_ns=next(clock)),
                given,
                settled,
            ]
    return events


def lp_of(history: OrderedHistory, key: str) -> int:
    begun = Put(process="p", type="invoke", subject="s", messages=(Keyed(key, 1),))
    route_one = Rerouted(
        process="n",
        type="ok",
        version=1,
        logical_partitions=history.routes.logical_partitions,
        partitions=tuple(history.routes.parts.values()),
    )
    return OrderedHistory([route_one, begun]).lp_of_line[0]


def test_an_outage_is_known_by_its_number() -> None:
    """Two at a time, ended in another order than they began."""
    both = [
        Outage(process="n", type=kind, broker_group=group, op=op, t_ns=at)
        for kind, group, op, at in (
            ("invoke", "b1", 1, 5),
            ("invoke", "b2", 2, 6),
            ("ok", "b1", 1, 7),
            ("ok", "b2", 2, 9),
        )
    ]
    assert OrderedHistory([*lines(ONE), *both]).outages == [
        ("b1", 5, 7, "outage"),
        ("b2", 6, 9, "outage"),
    ]


def test_a_history_with_partitions_of_several_versions_knows_each_chain() -> None:
    history = OrderedHistory(
        lines(
            ONE,
            split(0),
            route(3, "2:0-4@b1 4:4-8@b1", sources=[3]),
            route(4, "5:0-8@b2", sources=[2, 4]),
        )
    )
    assert history.routes.chains[0] == (1, 2, 5)
    assert history.routes.chains[7] == (1, 3, 4, 5)
    assert history.routes.since == {1: 1, 2: 2, 3: 2, 4: 3, 5: 4}


def test_what_a_broker_group_held_follows_from_when_routes_were_published() -> None:
    second = route(2, "2:0-4@b1 3:4-8@b2", sources=[1], began_ns=10, published_ns=20)
    routes = OrderedHistory(
        lines(ONE, second, route(3, "4:0-4@b2 3:4-8@b2", sources=[2], began_ns=30, published_ns=40))
    ).routes
    low, high = frozenset(range(4)), frozenset(range(4, 8))
    assert [routes.held_by("b1", at_ns, at_ns) for at_ns in (5, 25, 45)] == [
        low | high,
        low,
        frozenset(),
    ]
    assert [routes.held_by("b2", at_ns, at_ns) for at_ns in (5, 25, 45)] == [
        frozenset(),
        high,
        low | high,
    ]
    assert routes.held_by("b1", 19, 45) == low | high
