"""Counts how often messages were handed out, and finds those that were handed out again after their acknowledgement.

With at least once a second delivery is no anomaly, so it is only counted. It is an anomaly if the group's acknowledgement had been answered
*before the poll began*. A poll that was under way at that moment proves nothing: the broker may have sent its messages earlier.

    poll [........7]                        fine: the first delivery
                       ack 7 [...ok]
    poll       [.....................7]     fine: the broker may have handed it out before the answer
                                      poll [...7]   delivered_after_ack
"""

from __future__ import annotations

from collections import defaultdict

from history.events import Ack, Poll, Reset
from history.past import Anomaly, History

# An acknowledgement names messages by value, or by queue and sequence.
Name = int | tuple[str, int]
EVERY_GROUP = None


class _Memory:
    """Which acknowledgements hold for each group, while the history is walked once from its beginning to its end."""

    def __init__(self) -> None:
        self._settled: defaultdict[str, dict[Name, tuple[int, Ack]]] = defaultdict(dict)
        self._reset_at: dict[str | None, int] = {}
        self._resetting: dict[tuple[str, int | None], str | None] = {}

    def settle(self, ack: Ack, begun: int, place: int) -> None:
        """An acknowledgement counts unless a reset was under way at the same time: then their order is unknown."""
        if begun > max(self._reset_at.get(ack.group, -1), self._reset_at.get(EVERY_GROUP, -1)):
            names: list[Name] = [*ack.values, *((ack.queue, sequence) for sequence in ack.sequences)]
            self._settled[ack.group].update(dict.fromkeys(names, (place, ack)))

    def reset(self, reset: Reset, place: int) -> None:
        """A reset takes effect at some moment between its invoke and its end; meanwhile nothing can be said about its group.

        Without a certain end that lasts until the same process was answered: it has to try again.
        """
        key = (reset.process, reset.op)
        if reset.type in ("invoke", "info"):
            self._resetting[key] = reset.group
        else:
            self._resetting.pop(key, None)
        if reset.type != "ok":
            return
        self._reset_at[reset.group] = place
        for group in list(self._settled) if reset.group is EVERY_GROUP else [reset.group]:
            self._settled.pop(group, None)

    def ack_before(self, poll: Poll, begun: int, names: tuple[Name, ...]) -> Ack | None:
        """The acknowledgement that was answered before this poll began. Returned once, then removed."""
        settled = self._settled.get(poll.group)
        if not settled or any(group in (poll.group, EVERY_GROUP) for group in self._resetting.values()):
            return None
        for name in names:
            place, ack = settled.get(name, (begun, None))
            if place < begun:
                for other in names:
                    settled.pop(other, None)
                return ack
        return None


def delivered_after_ack(history: History) -> list[Anomaly]:
    """Messages that were handed to a group whose acknowledgement had been answered, without a reset in between."""
    memory, found = _Memory(), []
    for place, (event, begun) in enumerate(zip(history, history.beginnings, strict=True)):
        if isinstance(event, Reset):
            memory.reset(event, place)
        elif event.type == "ok" and isinstance(event, Ack):
            memory.settle(event, begun, place)
        elif event.type == "ok" and isinstance(event, Poll):
            for sequence, value, _ in event.records:
                ack = memory.ack_before(event, begun, (value, (event.queue or "", sequence)))
                if ack is not None:
                    what = f"{value} came to {event.group} again at {event.queue} {sequence} after it was acknowledged"
                    found.append(Anomaly("delivered_after_ack", what, (ack, event)))
    return found


def delivered_twice(history: History) -> int:
    """The number of repeated deliveries of a value to a group."""
    return deliveries(history) - sum(map(len, history.seen.values()))


def deliveries(history: History) -> int:
    """The number of deliveries, including repetitions."""
    return sum(len(poll.records) for poll, _ in history.polls)


def recovered(history: History) -> int:
    """How many values were stored after all although their producer never knew."""
    return len(history.outcomes.unknown & history.seen_by_any)
