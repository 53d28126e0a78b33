"""Verdicts of consumers that lost their messages.

    c1  poll [..7]                                  ack 7 [....ok]     late_is_stale: c2 had it by then
    c2               poll [..7]

An acknowledgement that began before the other consumer's poll was answered proves nothing: the
broker may have taken it first. Nor does one of a consumer that was given the message again.

A broker that looks verdicts up by message, and not by delivery, is found here.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Hashable, Iterator

from history.events import Ack, Anomaly, Poll

from campaign.values import Checker, Evidence


def _late(evidence: Evidence) -> Iterator[Anomaly]:
    history = evidence.history
    holders: dict[tuple[str, Hashable], tuple[int, str]] = {}
    """By group and message: when a consumer got it last, and which."""
    for event, begun in zip(history, history.beginnings, strict=True):
        if isinstance(event, Poll) and event.type == "ok":
            for record in event.records:
                for each in (record.value, (event.queue, record.sequence)):
                    holders[event.group, each] = (event.t_ns, event.process)
        elif isinstance(event, Ack) and event.type == "ok":
            begun_ns = history[begun].t_ns
            places = [(event.queue, each) for each in event.sequences]
            names: list[Hashable] = [*event.values, *places]
            for name in names:
                since_ns, holder = holders.get((event.group, name), (0, event.process))
                if holder != event.process and since_ns < begun_ns:
                    yield Anomaly(
                        "late_is_stale",
                        f"{event.process} acknowledged {name} of {event.group}, which {holder} "
                        f"had got {(begun_ns - since_ns) / 1e9:.2f} s before that",
                        (event,),
                    )


CHECKERS = (
    Checker(
        name="late_is_stale",
        what="a consumer cannot acknowledge what was handed to another one in the meantime",
        find=_late,
    ),
)
