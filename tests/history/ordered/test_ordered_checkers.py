"""The checkers of ordered histories are tested before anything is tested by them: small ones, each
with exactly what is wrong in it.

Short notation for hand-made ordered histories, a row of operations between semicolons:

    ONE; put d1 d2 1:0 1:1; give d1@0 d2@1; done 0 1

means: the route has one partition; p1 sent two messages of key d, stored at sequences 0 and 1 of
partition 1; c1 got both under token 1 and acknowledged them. `through` gives and acknowledges;
`low` does so in partition 2 and `high` in partition 3; `c2_give` gives to c2 under token 2. In
Python the same is `lines(ONE, put("d1 d2", at="1:0 1:1"), give("d1@0 d2@1"), done("0 1"))`, which
stamps the operations with times. With eight logical partitions the keys have these logical
partitions:

    d 0, f 2, o 3  |  e 4, g 5, k 6          partition 2 has [0, 4) and partition 3 [4, 8) wherever
                                             they occur here

A bad history names every anomaly that the checkers must find in it; they must find no other. A case
is drained unless it says `not drained`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import pytest
from history.events import Note, Operation, Reset, Type
from history.ordered.checkers import Pauses, check_ordered
from history.ordered.events import (
    Deliver,
    Handed,
    Keyed,
    OrderedHistory,
    Outage,
    Part,
    Put,
    Rerouted,
    Sealed,
    Settle,
    Stored,
)

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
LOW, HIGH = (0, 4), (4, 8)


class Case(NamedTuple):
    """A history, and the names of its anomalies."""

    name: str
    events: list[Operation]
    wrong: str
    drained: bool
    groups: Collection[str] = ()
    strict: Collection[str] = ()
    latest: Collection[str] = ()


D1 = put("d1", at="1:0")
TWICE = [*put("d1 d2 d3", at="1:0 1:1 1:2")[:1], *D1[1:]]
"""p1 sent three, and got the answer for the first; the others are on their way when partition 1 is
fenced.
"""
SCENES: dict[str, list[Operation]] = {
    "NOTE": [Note(process="nemesis", type="info", f="kill", text="b1", t_ns=1)],
    "ONE": ONE,
    "D1": D1,
    "D1_BEGUN": D1[:1],
    "D1_ANSWERED": D1[1:],
    "D123": put("d1 d2 d3", at="1:0 1:1 1:2"),
    "GIVEN": give("d1@0 d2@1 d3@2"),
    "DONE": done("0 1 2"),
    "PARENT": put("d1 g1", at="1:0 1:1"),
    "CHILDREN": put("d2 g2", at="2:0 3:0"),
    "TWICE": TWICE,
    "RESENT": put("d2 d3", at="2:0 2:1", resent=True)[1:],
    "SEEN_TWICE": through("d1@0 d2@1 d3@2") + through("d2@0 d3@1", part=2, lps=LOW),
}
C2: dict[str, Any] = {"token": 2, "by": "c2"}
VERBS: dict[str, Callable[..., list[Operation]]] = {
    "put": put,
    "resent": lambda *words: put(*words, resent=True)[1:],
    "give": give,
    "c2_give": partial(give, **C2),
    "done": done,
    "c2_done": partial(done, **C2),
    "through": through,
    "c2_through": partial(through, **C2),
    "low": partial(through, part=2, lps=LOW),
    "high": partial(through, part=3, lps=HIGH),
    "route": route,
    "split": split,
    "outage": outage,
    "outage_begun": lambda *words: outage(*words)[:1],
    "reset": reset,
}


def value_of(word: str) -> Any:
    """A number, also of seconds as nanoseconds; a range; or the word itself."""
    if word.endswith("s") and word[:-1].isdecimal():
        return int(word[:-1]) * S
    known = {"low": LOW, "high": HIGH, "None": None, "True": True}
    return known[word] if word in known else int(word) if word.lstrip("-").isdecimal() else word


def operations(text: str) -> list[Operation]:
    """A scene by its name, or one of `VERBS` with its words: `put d1 d2 1:0 1:1 end=info`."""
    verb, *words = text.split()
    if verb in SCENES:
        return SCENES[verb]
    plain = [word for word in words if "=" not in word]
    named: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        named[name] = value_of(value)
        if name in ("sources", "fenced") and value != "True":
            named[name] = [int(each) for each in value.split(",")]
        elif name == "sealed":
            named[name] = value.replace(",", " ")
    arguments: list[Any] = [" ".join(plain)]
    if verb in ("put", "resent"):
        places = [word for word in plain if ":" in word]
        arguments = [" ".join(word for word in plain if ":" not in word), " ".join(places)]
    elif verb == "route":
        arguments = [int(plain[0]), " ".join(plain[1:])]
    elif verb in ("split", "outage", "outage_begun"):
        arguments = [value_of(word) for word in plain]
    return VERBS[verb](*arguments, **named)


def cases(table: str) -> list[Case]:
    """Of each case a line `NAME => ANOMALIES | OPTION=WORDS`, and below it its operations, between
    semicolons or line ends.
    """
    found = []
    for block in re.split(r"\n(?=\S)", table.strip()):
        head, *rows = block.splitlines()
        title, *options = head.split(" | ")
        name, _, wrong = title.partition(" => ")
        told = [each for row in rows for each in row.split(";")]
        named: dict[str, Any] = {
            option: words.split(",")
            for option, _, words in (each.partition("=") for each in options)
        }
        drained = named.pop("not drained", None) is None
        found.append(Case(name, lines(*map(operations, told)), wrong, drained, **named))
    return found


GOOD = cases("""
nothing happened
    ONE
one message goes through
    ONE; D1; through d1@0
three messages of a key, one after the other
    ONE; D123; through d1@0; through d2@1; through d3@2
keys need no order between them
    ONE; put d1 g1 d2 1:0 1:1 1:2; give g1@1; give d1@0 d2@2; done 1 0 2
two producers of one key need no order
    ONE; D1; put d1 1:1 by=p2; through d1@0; give d1@1 sent_by=p2; done 1
given before the producer has its answer
    ONE; D1_BEGUN; through d1@0; D1_ANSWERED
two groups, each in its time | groups=g,h
    ONE; D123; GIVEN; DONE; give d1@0 d2@1 d3@2 group=h; done 0 1 2 group=h
notes are for people
    NOTE; ONE; D1; through d1@0
not drained: the tail is on its way | not drained
    ONE; D123; through d1@0
an unknown put was stored
    ONE; outage b1 1 10; put d1 end=info; through d1@0
an unfinished put was not stored
    ONE; put d1 end=None; put d2 1:0; through d2@0
an unfinished put was stored
    ONE; put d1 end=None; put d2 1:1; through d1@0 d2@1
a consumer dies, the next begins at the first that is not settled
    ONE; D123; GIVEN; done 0; c2_through d2@1 d3@2
a consumer dies behind its acknowledgement
    ONE; D123; GIVEN; c2_through d3@2
its answer was lost, all is replayed
    ONE; D123; GIVEN; done 0 1 2 end=info; c2_through d1@0 d2@1 d3@2
a failed message is tried again
    ONE; D123; give d1@0 d2@1; give d2@1 attempt=2; give d3@2; DONE
a replay under the same token
    ONE; D123; GIVEN; give d1@0 d2@1 d3@2; DONE
a lane is cut in two
    ONE; PARENT; give d1@0; done 0; through g1@1 token=3 by=c2 lps=high
a stopped consumer wakes up: its deliveries no longer count
    ONE; D123; give d1@0; c2_give d1@0 d2@1; give d2@1; done 0 1 end=fail; c2_done 0 1
    c2_through d3@2
an acknowledgement was under way when the lane was lost
    ONE; D123; GIVEN; c2_give d3@2; done 0 1 began_line=3; done 2 end=fail; c2_done 2
a reset brings it back
    ONE; D123; GIVEN; DONE; reset g; through d1@0 d2@1 d3@2 token=2
a group that began at the end has nothing before | latest=g
    ONE; D123; through d3@2
a group that began at the end, behind a split | latest=g
    ONE; PARENT; split 2; CHILDREN; low d2@0; high g2@0
a split: one half continues while the other is read
    ONE; PARENT; split 2; CHILDREN; through d1@0; low d2@0; through g1@1; high g2@0
a split with a strict gate | strict=g
    ONE; PARENT; split 2; CHILDREN; through d1@0 g1@1; low d2@0; high g2@0
a merge
    route 1 2:0-4@b1 3:4-8@b1; put d1 g1 2:0 3:0; route 2 4:0-8@b2 sources=2,3 sealed=2:1,3:1
    put d2 g2 4:0 4:1; low d1@0; high g1@0; through d2@0 g2@1 part=4
an untouched partition continues over a change
    route 1 2:0-4@b1 3:4-8@b1; put d1 g1 2:0 3:0; route 2 4:0-4@b2 3:4-8@b1 sources=2 sealed=2:1
    put d2 g2 4:0 3:1; high g1@0 g2@1; low d1@0; through d2@0 part=4 lps=low
the next version is read behind an acknowledgement that no consumer received
    ONE; PARENT; split 2; CHILDREN; give d1@0 g1@1; low d2@0; high g2@0
a fence: what nobody knew of is stored twice, in order
    ONE; TWICE; split -1 fenced=True; RESENT; route 2 2:0-4@b1 3:4-8@b2 sources=1 sealed=1:3
    SEEN_TWICE
a fence: the old partition had only some of it
    ONE; TWICE; split -1; RESENT; through d1@0 d2@1; low d2@0 d3@1
a fence: the second copy was not answered either
    ONE; TWICE; split -1; SEEN_TWICE
a put is slow while its partition is closed | not drained
    route 1 1:0-8@b1; put d1 2:0 since_ns=1s until_ns=9s
    route 2 2:0-4@b1 3:4-8@b2 sources=1 sealed=1:0 began_ns=2s published_ns=8s
a put is slow while its group has no master | not drained
    ONE; put d1 1:0 since_ns=1s until_ns=9s; outage b1 2s 8s
a put fails right behind an outage | not drained
    ONE; outage b1 2s 3s; put d1 end=info since_ns=4s until_ns=4000000009
an outage without an end excuses all that follows | not drained
    ONE; outage_begun b1 1s 2s; put d1 1:0 since_ns=3s until_ns=30s
""")

BAD = cases("""
never given => lost | groups=g
    ONE; D1
the last of three was never given => lost
    ONE; D123; through d1@0 d2@1
one of two groups misses one => lost
    ONE; D123; GIVEN; DONE; through d1@0 d2@1 group=h
the tail of a closed partition is passed over => lost
    ONE; PARENT; split 2; put d2 2:0; through d1@0; low d2@0
given, its acknowledgement refused, and never again => unsettled
    ONE; D1; give d1@0; done 0 end=fail
two refused at the end => unsettled unsettled
    ONE; D123; through d1@0; give d2@1 d3@2; done 1 2 end=fail
refused twice => unsettled
    ONE; D1; give d1@0; c2_give d1@0; done 0 end=fail; c2_done 0 end=fail
from nowhere => phantom
    ONE; give d1@0
from nowhere, among others => phantom
    ONE; D1; through d1@0 d7@1
from a producer that never sent it => phantom
    ONE; D1; through d1@0; give d1@1 sent_by=p9
certainly failed, and given => phantom
    ONE; outage b1 1 10; put d1 end=fail; through d1@0
a newer one first => skipped
    ONE; D123; through d1@0 d3@2; through d2@1 token=2
the second comes before the first, which never comes => lost skipped
    ONE; D123; through d2@1 d3@2
the next consumer leaves one out => skipped
    ONE; D123; through d1@0; c2_through d3@2; through d2@1 token=3
an older one comes between newer ones => skipped torn_replay
    ONE; D123; put d4 1:3; give d1@0 d3@2; give d2@1 token=2; give d4@3 token=2
order breaks over a split => skipped early
    ONE; PARENT; split 2; put d2 2:0; low d2@0; through d1@0 g1@1
the next consumer begins too late => torn_replay
    ONE; D123; GIVEN; done 0 1 end=fail; c2_give d3@2; through d1@0 d2@1 d3@2 token=3
... since the acknowledgement began later => torn_replay zombie_ack
    ONE; D123; give d1@0; c2_give d2@1; done 0 began_line=5; c2_through d3@2
a replay leaves one out => torn_replay
    ONE; D123; GIVEN; c2_give d1@0 d3@2; through d2@1 d3@2 token=3
a replay under the same token leaves one out => torn_replay
    ONE; D123; GIVEN; give d1@0; give d3@2; DONE
a lost lane's acknowledgement counts => zombie_ack
    ONE; D1; give d1@0; c2_give d1@0; done 0; c2_done 0 end=fail
... in a lane that covers a part of it => zombie_ack
    ONE; PARENT; give d1@0 g1@1; c2_give g1@1 lps=high; done 1; done 0
... of the same consumer => zombie_ack
    ONE; D1; give d1@0; give d1@0 token=2; done 0; done 0 token=2 end=info
... of both messages => zombie_ack zombie_ack
    ONE; PARENT; give d1@0 g1@1; c2_through d1@0 g1@1; done 0 1
settled, and given again => came_back
    ONE; D1; through d1@0; c2_through d1@0
settled, and given again twice => came_back came_back
    ONE; D1; through d1@0; c2_give d1@0; give d1@0 token=3
settled, and given again in a replay of others => came_back
    ONE; D123; GIVEN; done 0; c2_through d1@0 d2@1 d3@2
settled, and given again after another group's reset => came_back
    ONE; D1; through d1@0; reset h; through d1@0 token=2
two consumers with one token => shared_token
    ONE; PARENT; give d1@0; give g1@1 by=c2; done 0; done 1 by=c2
one token for two ranges => shared_token
    ONE; PARENT; through d1@0 lps=low; through g1@1 lps=high
three with one token => shared_token shared_token
    ONE; put d1 g1 e1 1:0 1:1 1:2; give d1@0; give g1@1 by=c2; give e1@2 by=c3
a child is read before its parent is settled => torn_replay torn_replay early early
    ONE; PARENT; split 2; CHILDREN; give d1@0 g1@1; low d2@0; high g2@0; done 1; done 0
... of another key in the range => early
    ONE; put d1 f1 1:0 1:1; split 2; put d2 2:0; through d1@0; low d2@0; through f1@1
... and nobody ever settles that => unsettled early
    ONE; put d1 f1 1:0 1:1; split 2; put d2 2:0; through d1@0; give f1@1; done 1 end=fail; low d2@0
... two versions on => early
    ONE; put d1 f1 1:0 1:1; split 2; route 3 4:0-4@b2 3:4-8@b2 sources=2 sealed=2:0; put d2 4:0
    through d1@0; through d2@0 part=4 lps=low; through f1@1
... of a merge => early
    route 1 2:0-4@b1 3:4-8@b1; put d1 g1 2:0 3:0; route 2 4:0-8@b2 sources=2,3; put d2 4:0
    low d1@0; through d2@0 part=4; high g1@0
... with a strict gate, the other half's => early | strict=g
    ONE; PARENT; split 2; CHILDREN; through d1@0; low d2@0; through g1@1; high g2@0
... while a fenced partition has more to come => early
    ONE; TWICE; split -1; RESENT; through d1@0; low d2@0 d3@1; through d2@1
two messages were told one place => lost two_at_one_place
    ONE; D1; put g1 1:0; through d1@0
a place shows another message => two_at_one_place
    ONE; D1; through d1@0; put g1 end=None; give g1@0
three at one place => two_at_one_place two_at_one_place
    ONE; put d1 g1 e1 1:0 1:0 1:0; through d1@0; give g1@0; give e1@0
stored behind the command message => behind_seal
    ONE; PARENT; split 1; through d1@0 g1@1
stored where the command message lies => behind_seal
    ONE; D1; split 0; through d1@0
behind a command message that came late => behind_seal behind_seal
    ONE; D123; split -1; route 2 2:0-4@b1 3:4-8@b2 sealed=1:1; GIVEN; DONE
given from behind the command message, never answered => behind_seal
    ONE; put d1 end=None; split 0; through d1@5
in a partition of other keys => wrong_partition
    route 1 2:0-4@b1 3:4-8@b1; put d1 3:0; high d1@0
in a partition that no route has => wrong_partition
    ONE; put d1 9:0; through d1@0 part=9
both halves changed places => wrong_partition wrong_partition
    route 1 2:0-4@b1 3:4-8@b1; put d1 g1 3:0 2:0; high d1@0; low g1@0
the second lies before the first => log_order
    ONE; put d1 d2 1:1 1:0; through d1@1 d2@0
the second send lies before the first => log_order
    ONE; put d1 1:7; put d2 1:3; through d1@7 d2@3
the second lies in an older partition => skipped log_order
    ONE; put d1 2:0; split 1; put d2 1:0; through d2@0; low d1@0
two lines out of order => log_order log_order
    ONE; put d1 d2 g1 g2 1:1 1:0 1:3 1:2; through d1@1 d2@0 g1@3 g2@2
stored twice in one partition => stored_twice stored_twice
    ONE; D1; through d1@0 d1@1
stored twice without a fence => stored_twice stored_twice
    ONE; TWICE; split 3; RESENT; SEEN_TWICE
stored twice and not sent again => stored_twice
    ONE; D1; split -1; through d1@0; low d1@0
the second copy has another id => stored_twice
    ONE; TWICE; split -1; RESENT; through d1@0 d2@1; give d2@0 part=2 lps=low id=7; low d3@1
the replay in the log leaves one out => torn_replay stored_twice
    ONE; TWICE; split -1; resent d2 2:0; put d4 2:1; through d1@0 d2@1 d3@2; low d2@0 d4@1
the second copies changed places => stored_twice
    ONE; TWICE; split -1; resent d2 d3 2:1 2:0; through d1@0 d2@1 d3@2; low d3@0 d2@1
a put is slow, and nothing happened => stalled | not drained
    ONE; put d1 1:0 since_ns=1s until_ns=3s
a put fails, and nothing happened => stalled | not drained
    ONE; put d1 end=fail since_ns=1s until_ns=1000000001
a put is slow while another group has no master => stalled | not drained
    route 1 2:0-4@b1 3:4-8@b2; outage b2 1s 9s; put d1 2:0 since_ns=1s until_ns=9s
a put is slow while another partition is closed => stalled | not drained
    route 1 2:0-4@b1 3:4-8@b1; route 2 2:0-4@b1 4:4-8@b1 sources=3 began_ns=1s published_ns=8s
    put d1 2:0 since_ns=1s until_ns=9s
a put is slow long after a change => stalled | not drained
    ONE; route 2 2:0-4@b1 3:4-8@b2 sources=1 began_ns=1s published_ns=2s
    put d1 2:0 since_ns=8s until_ns=12s
two keys are slow, each told once => stalled stalled | not drained
    ONE; put d1 g1 1:0 1:1 since_ns=1s until_ns=4s; put d2 1:2 since_ns=1s until_ns=5s
""")


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
    (case,) = [case for case in BAD if case.name == "a lost lane's acknowledgement counts"]
    (found,) = check_ordered(case.events, drained=True).anomalies
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
            lines(ONE, [replace(event, places=()) for event in D1 if isinstance(event, Put)]),
            "must say where",
        ),
        (lines(ONE, put("d1", at="1:0"), done("0")), "was not given"),
    ],
)
def test_a_history_that_proves_nothing_is_refused(events: list[Operation], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_ordered(events, drained=True)


def test_late_and_repeated_deliveries_are_counted() -> None:
    table = """late
    ONE; put d1 d2 1:0 1:1; give d1@0; c2_give d1@0 d2@1; give d2@1; done 0 1 end=fail; c2_done 0 1
"""
    counts = check_ordered(cases(table)[0].events, drained=True).counts
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


@pytest.mark.longest
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
    serials: Counter[str] = Counter()
    keys_of_lines = tuple(Keyed(f"k{at}", 1) for at in range(keys))
    begun = Put(process="p", type="invoke", subject="s", messages=keys_of_lines)
    lps = OrderedHistory([*ONE, begun]).lp_of_line
    ends: Counter[int] = Counter()
    events = [*ONE]
    route_now = [Part(1, 0, 8, "b1")]
    clock = count(1)
    for base in range(0, messages, 500):
        if base == messages // 2:
            events += [replace(event, t_ns=next(clock)) for event in split(ends[1])]
            route_now = [Part(2, 0, 4, "b1"), Part(3, 4, 8, "b2")]
        rows: dict[int, tuple[list[Keyed], list[Stored]]] = {
            part.number: ([], []) for part in route_now
        }
        for at in range(base, base + 500):
            number = at * 7919 % keys
            key, lp = f"k{number}", lps[number]
            serials[key] += 1
            (part,) = [each for each in route_now if each.first <= lp < each.end]
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
