"""Small ordered histories, good and bad. A bad one names every anomaly that the checkers must find in it; they must find no other.

A case is drained unless it says `drained=False`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from history.events import Note, Operation
from history.ordered.making import ONE, done, give, lines, outage, put, reset, route, split, through

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
"""p1 sent three, and got the answer for the first; the others are on their way when partition 1 is fenced."""
RESENT = put("d2 d3", at="2:0 2:1", resent=True)[1:]
SEEN_TWICE = [*through("d1@0 d2@1 d3@2", lps=(0, 8)), *through("d2@0 d3@1", part=2, token=1, lps=LOW)]

GOOD = [
    Case("nothing happened", lines(ONE)),
    Case("one message goes through", lines(ONE, D1, through("d1@0"))),
    Case("three messages of a key, one after the other", lines(ONE, D123, through("d1@0"), through("d2@1"), through("d3@2"))),
    Case("keys need no order between them", lines(ONE, put("d1 g1 d2", at="1:0 1:1 1:2"), give("g1@1"), give("d1@0 d2@2"), done("1 0 2"))),
    Case(
        "two producers of one key need no order",
        lines(ONE, D1, put("d1", at="1:1", by="p2"), through("d1@0"), give("d1@1", sent_by="p2"), done("1")),
    ),
    Case("given before the producer has its answer", lines(ONE, D1[:1], through("d1@0"), D1[1:])),
    Case(
        "two groups, each in its time",
        lines(ONE, D123, GIVEN, DONE, give("d1@0 d2@1 d3@2", group="h"), done("0 1 2", group="h")),
        groups=("g", "h"),
    ),
    Case("notes are for people", [Note(process="nemesis", type="info", f="kill", text="b1", t_ns=1), *lines(ONE, D1, through("d1@0"))]),
    Case("not drained: the tail is on its way", lines(ONE, D123, through("d1@0")), drained=False),
    Case("an unknown put was stored", lines(ONE, outage("b1", 1, 10), put("d1", end="info"), through("d1@0"))),
    Case("an unfinished put was not stored", lines(ONE, put("d1", end=None), put("d2", at="1:0"), through("d2@0"))),
    Case("an unfinished put was stored", lines(ONE, put("d1", end=None), put("d2", at="1:1"), through("d1@0 d2@1"))),
    Case(
        "a consumer dies, the next begins at the first that is not settled",
        lines(ONE, D123, GIVEN, done("0"), through("d2@1 d3@2", token=2, by="c2")),
    ),
    Case("a consumer dies behind its acknowledgement", lines(ONE, D123, GIVEN, through("d3@2", token=2, by="c2"))),
    Case(
        "its answer was lost, all is replayed",
        lines(ONE, D123, GIVEN, done("0 1 2", end="info"), through("d1@0 d2@1 d3@2", token=2, by="c2")),
    ),
    Case("a failed message is tried again", lines(ONE, D123, give("d1@0 d2@1"), give("d2@1", attempt=2), give("d3@2"), DONE)),
    Case("a replay under the same token", lines(ONE, D123, GIVEN, give("d1@0 d2@1 d3@2"), DONE)),
    Case("a lane is cut in two", lines(ONE, PARENT, give("d1@0"), done("0"), through("g1@1", token=3, by="c2", lps=HIGH))),
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
            ONE, D123, GIVEN, give("d3@2", token=2, by="c2"), done("0 1", began_line=3), done("2", end="fail"), done("2", token=2, by="c2")
        ),
    ),
    Case("a reset brings it back", lines(ONE, D123, GIVEN, DONE, reset("g"), through("d1@0 d2@1 d3@2", token=2))),
    Case("a group that began at the end has nothing before", lines(ONE, D123, through("d3@2")), latest=("g",)),
    Case(
        "a group that began at the end, behind a split",
        lines(ONE, PARENT, split(2), CHILDREN, through("d2@0", part=2, lps=LOW), through("g2@0", part=3, lps=HIGH)),
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
        lines(ONE, PARENT, split(2), CHILDREN, through("d1@0 g1@1"), through("d2@0", part=2, lps=LOW), through("g2@0", part=3, lps=HIGH)),
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
        lines(ONE, PARENT, split(2), CHILDREN, give("d1@0 g1@1"), through("d2@0", part=2, lps=LOW), through("g2@0", part=3, lps=HIGH)),
    ),
    Case(
        "a fence: what nobody knew of is stored twice, in order",
        lines(ONE, TWICE, split(-1, fenced=True), RESENT, route(2, "2:0-4@b1 3:4-8@b2", sources=[1], sealed="1:3"), SEEN_TWICE),
    ),
    Case(
        "a fence: the old partition had only some of it",
        lines(ONE, TWICE, split(-1), RESENT, through("d1@0 d2@1"), through("d2@0 d3@1", part=2, lps=LOW)),
    ),
    Case("a fence: the second copy was not answered either", lines(ONE, TWICE, split(-1), SEEN_TWICE)),
    Case(
        "a put is slow while its partition is closed",
        lines(
            route(
                1,
                "1:0-8@b1",
            ),
            put("d1", at="2:0", since_ns=S, until_ns=9 * S),
            route(2, "2:0-4@b1 3:4-8@b2", sources=[1], sealed="1:0", began_ns=2 * S, published_ns=8 * S),
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
        lines(ONE, outage("b1", 2 * S, 3 * S), put("d1", end="info", since_ns=4 * S, until_ns=4 * S + 9)),
        drained=False,
    ),
    Case(
        "an outage without an end excuses all that follows",
        lines(ONE, outage("b1", S, 2 * S)[:1], put("d1", at="1:0", since_ns=3 * S, until_ns=30 * S)),
        drained=False,
    ),
]

BAD = [
    Case("never given", lines(ONE, D1), "lost", groups=("g",)),
    Case("the last of three was never given", lines(ONE, D123, through("d1@0 d2@1")), "lost"),
    Case("one of two groups misses one", lines(ONE, D123, GIVEN, DONE, through("d1@0 d2@1", group="h")), "lost"),
    Case(
        "the tail of a closed partition is passed over",
        lines(ONE, PARENT, split(2), put("d2", at="2:0"), through("d1@0"), through("d2@0", part=2, lps=LOW)),
        "lost",
    ),
    Case("given, its acknowledgement refused, and never again", lines(ONE, D1, give("d1@0"), done("0", end="fail")), "unsettled"),
    Case("two refused at the end", lines(ONE, D123, through("d1@0"), give("d2@1 d3@2"), done("1 2", end="fail")), "unsettled unsettled"),
    Case(
        "refused twice",
        lines(ONE, D1, give("d1@0"), give("d1@0", token=2, by="c2"), done("0", end="fail"), done("0", token=2, by="c2", end="fail")),
        "unsettled",
    ),
    Case("from nowhere", lines(ONE, give("d1@0")), "phantom"),
    Case("from nowhere, among others", lines(ONE, D1, through("d1@0 d7@1")), "phantom"),
    Case("from a producer that never sent it", lines(ONE, D1, through("d1@0"), give("d1@1", sent_by="p9")), "phantom"),
    Case("certainly failed, and given", lines(ONE, outage("b1", 1, 10), put("d1", end="fail"), through("d1@0")), "phantom"),
    Case("a newer one first", lines(ONE, D123, through("d1@0 d3@2"), through("d2@1", token=2)), "skipped"),
    Case("the second comes before the first, which never comes", lines(ONE, D123, through("d2@1 d3@2")), "lost skipped"),
    Case(
        "the next consumer leaves one out",
        lines(ONE, D123, through("d1@0"), through("d3@2", token=2, by="c2"), through("d2@1", token=3)),
        "skipped",
    ),
    Case(
        "an older one comes between newer ones",
        lines(ONE, D123, put("d4", at="1:3"), give("d1@0 d3@2"), give("d2@1", token=2), give("d4@3", token=2)),
        "skipped torn_replay",
    ),
    Case(
        "order breaks over a split",
        lines(ONE, PARENT, split(2), put("d2", at="2:0"), through("d2@0", part=2, lps=LOW), through("d1@0 g1@1")),
        "skipped early",
    ),
    Case(
        "the next consumer begins too late",
        lines(ONE, D123, GIVEN, done("0 1", end="fail"), give("d3@2", token=2, by="c2"), through("d1@0 d2@1 d3@2", token=3)),
        "torn_replay",
    ),
    Case(
        "... since the acknowledgement began later",
        lines(ONE, D123, give("d1@0"), give("d2@1", token=2, by="c2"), done("0", began_line=5), through("d3@2", token=2, by="c2")),
        "torn_replay zombie_ack",
    ),
    Case(
        "a replay leaves one out",
        lines(ONE, D123, GIVEN, give("d1@0 d3@2", token=2, by="c2"), through("d2@1 d3@2", token=3)),
        "torn_replay",
    ),
    Case("a replay under the same token leaves one out", lines(ONE, D123, GIVEN, give("d1@0"), give("d3@2"), DONE), "torn_replay"),
    Case(
        "a lost lane's acknowledgement counts",
        lines(ONE, D1, give("d1@0"), give("d1@0", token=2, by="c2"), done("0"), done("0", token=2, by="c2", end="fail")),
        "zombie_ack",
    ),
    Case(
        "... in a lane that covers a part of it",
        lines(ONE, PARENT, give("d1@0 g1@1"), give("g1@1", token=2, by="c2", lps=HIGH), done("1"), done("0")),
        "zombie_ack",
    ),
    Case(
        "... of the same consumer",
        lines(ONE, D1, give("d1@0"), give("d1@0", token=2), done("0"), done("0", token=2, end="info")),
        "zombie_ack",
    ),
    Case(
        "... of both messages",
        lines(ONE, PARENT, give("d1@0 g1@1"), through("d1@0 g1@1", token=2, by="c2"), done("0 1")),
        "zombie_ack zombie_ack",
    ),
    Case("settled, and given again", lines(ONE, D1, through("d1@0"), through("d1@0", token=2, by="c2")), "came_back"),
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
    Case("one token for two ranges", lines(ONE, PARENT, through("d1@0", lps=LOW), through("g1@1", lps=HIGH)), "shared_token"),
    Case(
        "three with one token",
        lines(ONE, put("d1 g1 e1", at="1:0 1:1 1:2"), give("d1@0"), give("g1@1", by="c2"), give("e1@2", by="c3")),
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
        lines(ONE, TWICE, split(-1), RESENT, through("d1@0"), through("d2@0 d3@1", part=2, lps=LOW), through("d2@1")),
        "early",
    ),
    Case("two messages were told one place", lines(ONE, D1, put("g1", at="1:0"), through("d1@0")), "lost two_at_one_place"),
    Case("a place shows another message", lines(ONE, D1, through("d1@0"), put("g1", end=None), give("g1@0")), "two_at_one_place"),
    Case(
        "three at one place",
        lines(ONE, put("d1 g1 e1", at="1:0 1:0 1:0"), through("d1@0"), give("g1@0"), give("e1@0")),
        "two_at_one_place two_at_one_place",
    ),
    Case("stored behind the command message", lines(ONE, PARENT, split(1), through("d1@0 g1@1")), "behind_seal"),
    Case("stored where the command message lies", lines(ONE, D1, split(0), through("d1@0")), "behind_seal"),
    Case(
        "behind a command message that came late",
        lines(ONE, D123, split(-1), route(2, "2:0-4@b1 3:4-8@b2", sealed="1:1"), GIVEN, DONE),
        "behind_seal behind_seal",
    ),
    Case(
        "given from behind the command message, never answered", lines(ONE, put("d1", end=None), split(0), through("d1@5")), "behind_seal"
    ),
    Case("in a partition of other keys", lines(route(1, AGAIN), put("d1", at="3:0"), through("d1@0", part=3, lps=HIGH)), "wrong_partition"),
    Case("in a partition that no route has", lines(ONE, put("d1", at="9:0"), through("d1@0", part=9)), "wrong_partition"),
    Case(
        "both halves changed places",
        lines(route(1, AGAIN), put("d1 g1", at="3:0 2:0"), through("d1@0", part=3, lps=HIGH), through("g1@0", part=2, lps=LOW)),
        "wrong_partition wrong_partition",
    ),
    Case("the second lies before the first", lines(ONE, put("d1 d2", at="1:1 1:0"), through("d1@1 d2@0")), "log_order"),
    Case("the second send lies before the first", lines(ONE, put("d1", at="1:7"), put("d2", at="1:3"), through("d1@7 d2@3")), "log_order"),
    Case(
        "the second lies in an older partition",
        lines(ONE, put("d1", at="2:0"), split(1), put("d2", at="1:0"), through("d2@0"), through("d1@0", part=2, lps=LOW)),
        "skipped log_order",
    ),
    Case(
        "two lines out of order",
        lines(ONE, put("d1 d2 g1 g2", at="1:1 1:0 1:3 1:2"), through("d1@1 d2@0 g1@3 g2@2")),
        "log_order log_order",
    ),
    Case("stored twice in one partition", lines(ONE, D1, through("d1@0 d1@1")), "stored_twice stored_twice"),
    Case("stored twice without a fence", lines(ONE, TWICE, split(3), RESENT, SEEN_TWICE), "stored_twice stored_twice"),
    Case("stored twice and not sent again", lines(ONE, D1, split(-1), through("d1@0"), through("d1@0", part=2, lps=LOW)), "stored_twice"),
    Case(
        "the second copy has another id",
        lines(ONE, TWICE, split(-1), RESENT, through("d1@0 d2@1"), give("d2@0", part=2, lps=LOW, id=7), through("d3@1", part=2, lps=LOW)),
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
    Case("a put is slow, and nothing happened", lines(ONE, put("d1", at="1:0", since_ns=S, until_ns=3 * S)), "stalled", drained=False),
    Case("a put fails, and nothing happened", lines(ONE, put("d1", end="fail", since_ns=S, until_ns=S + 1)), "stalled", drained=False),
    Case(
        "a put is slow while another group has no master",
        lines(route(1, "2:0-4@b1 3:4-8@b2"), outage("b2", S, 9 * S), put("d1", at="2:0", since_ns=S, until_ns=9 * S)),
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
        lines(ONE, put("d1 g1", at="1:0 1:1", since_ns=S, until_ns=4 * S), put("d2", at="1:2", since_ns=S, until_ns=5 * S)),
        "stalled stalled",
        drained=False,
    ),
]


def late_hour(events: list[Operation], by_ns: int) -> list[Operation]:
    """The same events, shifted in time."""
    return [replace(event, t_ns=event.t_ns + by_ns) for event in events]
