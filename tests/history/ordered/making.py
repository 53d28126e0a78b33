"""Short notation for hand-made ordered histories; `lines(...)` joins operations and stamps them with times.

    lines(ONE, put("d1 d2", at="1:0 1:1"), give("d1@0 d2@1"), done("0 1"))

means: the route has one partition; p1 sent two messages of key d, stored at sequences 0 and 1 of partition 1; c1 got both under token 1
and acknowledged them. With eight logical partitions the keys have these logical partitions:

    d 0, f 2, o 3  |  e 4, g 5, k 6          partition 2 has [0, 4) and partition 3 [4, 8) wherever they occur here
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from history.events import Operation, Reset, Type
from history.ordered.events import Deliver, Handed, Keyed, Outage, Part, Put, Rerouted, Sealed, Settle, Stored

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
    names: str, at: str = "", *, by: str = "p1", resent: bool | None = None, end: Type | None = "ok", since_ns: int = 0, until_ns: int = 0
) -> list[Operation]:
    """`put("d1 d2", at="1:0 1:1")`: places are partition:sequence. Without an end the outcome is unknown."""
    messages = tuple(map(keyed, names.split()))
    begun = Put(process=by, type="invoke", subject="orders", messages=messages, t_ns=since_ns)
    if end is None:
        return [begun]
    numbers = [tuple(map(int, place.split(":"))) for place in at.split()]
    places = tuple(Stored(part, sequence, id_of(each)) for (part, sequence), each in zip(numbers, messages, strict=end == "ok"))
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
        Handed(int(at), *keyed(name)[:1], sent_by, keyed(name).serial, attempt, id_of(keyed(name)) if id is None else id)
        for name, at in found
    )
    return [
        Deliver(process=by, type="ok", group=group, partition=part, first=lps[0], end=lps[1], token=token, version=version, handed=handed)
    ]


def done(
    sequences: str, *, part: int = 1, token: int = 1, by: str = "c1", group: str = "g", end: Type = "ok", began_line: int | None = None
) -> list[Operation]:
    """An acknowledgement's answer; it began just now, or at the time of that line of the history, counted from 0."""
    began_ns = JUST_NOW if began_line is None else (began_line + 1) * STEP_NS
    numbers = tuple(map(int, sequences.split()))
    return [Settle(process=by, type=end, group=group, partition=part, token=token, sequences=numbers, began_ns=began_ns)]


def through(
    names: str, *, part: int = 1, token: int = 1, by: str = "c1", group: str = "g", lps: tuple[int, int] = (0, LPS)
) -> list[Operation]:
    """Messages that were delivered and acknowledged."""
    sequences = " ".join(each.split("@")[1] for each in names.split())
    return give(names, part=part, token=token, by=by, group=group, lps=lps) + done(sequences, part=part, token=token, by=by, group=group)


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
    begun = Outage(process="nemesis", type="invoke", broker_group=broker_group, kind="kill", op=since_ns, t_ns=since_ns)
    return [begun, replace(begun, type="ok", t_ns=until_ns)]


def reset(group: str) -> list[Operation]:
    """An operator's."""
    return [Reset(process="operator", type="ok", group=group)]


def lines(*parts: list[Operation]) -> list[Operation]:
    """The whole history, stamped by place unless a line brings its own time."""
    found = [event for part in parts for event in part]
    stamped = [event if event.t_ns else replace(event, t_ns=(at + 1) * STEP_NS) for at, event in enumerate(found)]
    return [
        replace(event, began_ns=event.t_ns - 1) if isinstance(event, Settle) and event.began_ns == JUST_NOW else event for event in stamped
    ]


ONE = route(1, "1:0-8@b1")
SPLIT = "2:0-4@b1 3:4-8@b2"


def split(sealed: int, *, fenced: bool = False) -> list[Operation]:
    """Version 2: partition 1 is closed at that sequence."""
    return route(2, SPLIT, sources=[1], sealed=f"1:{sealed}", fenced=[1] if fenced else [])
