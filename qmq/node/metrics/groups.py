"""A broker's consumer groups: their lag, and deliveries and settlements.

A group has one row for a subject, over all the subject's partitions here, and over all its consumers if it is a broadcast group. Only the
master knows the lag; a slave has no such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from qmq.broker.admin import lag_ms, messages_end
from qmq.broker.broker import Broker
from qmq.broker.dispatch.sessions import QueueGroup
from qmq.broker.metrics import GroupCounters
from qmq.errors import LogDamaged
from qmq.log.lane_state import GroupLaneState
from qmq.log.queue import Queue
from qmq.metrics.figures import COUNTER, GAUGE, SLICE, Figure, Reading, rows_of
from qmq.model import base_group

_GROUP: Final = ("broker_group", "subject", "group")

LAG: Final = Figure(
    "qmq_group_lag_messages",
    GAUGE,
    _GROUP,
    "Messages that the group has not settled; of an ordered subject, all from the oldest unsettled one on.",
)
LAG_S: Final = Figure(
    "qmq_group_lag_seconds", GAUGE, _GROUP, "Age of the oldest message that the group has not settled; 0 if there is none."
)
UNACKED: Final = Figure(
    "qmq_group_unacked_messages", GAUGE, _GROUP, "Messages that were handed to the group's consumers and are not settled yet."
)
REQUEUED: Final = Figure("qmq_group_requeued_messages", GAUGE, _GROUP, "Returned messages that wait to be handed out again.")
DYING: Final = Figure("qmq_group_dying_messages", GAUGE, _GROUP, "Messages on their way to the dead-letter queue.")
CONSUMERS: Final = Figure(
    "qmq_group_consumers", GAUGE, _GROUP, "Consumers with a valid lease; of an ordered subject, lanes that consumers hold."
)
WAITING: Final = Figure("qmq_group_waiting_pulls", GAUGE, _GROUP, "Pulls that wait for messages, or for room in the connection.")
PARKED_KEYS: Final = Figure("qmq_group_parked_keys", GAUGE, _GROUP, "Keys of an ordered subject that the group has set aside.")
PARKED: Final = Figure("qmq_group_parked_messages", GAUGE, _GROUP, "Messages of those keys.")
PAUSED: Final = Figure("qmq_group_paused", GAUGE, _GROUP, "1 if an operator paused the group: it gets no messages.")

PULLED: Final = Figure("qmq_pulled_messages_total", COUNTER, _GROUP, "Messages handed out.")
PULLED_BYTES: Final = Figure("qmq_pulled_bytes_total", COUNTER, _GROUP, "Bytes of the batches that contain these messages.")
RETRIED: Final = Figure("qmq_retried_messages_total", COUNTER, _GROUP, "Messages handed out again after an earlier attempt.")
FILTERED: Final = Figure(
    "qmq_filtered_messages_total", COUNTER, _GROUP, "Messages that the tags of the group's consumers left out: they count as done."
)
ACKED: Final = Figure("qmq_acked_messages_total", COUNTER, _GROUP, "Messages that consumers acknowledged.")
NACKED: Final = Figure("qmq_nacked_messages_total", COUNTER, _GROUP, "Messages that consumers reported as failed.")
RELEASED: Final = Figure("qmq_released_messages_total", COUNTER, _GROUP, "Messages that consumers returned without having worked on them.")
DEAD: Final = Figure("qmq_dead_messages_total", COUNTER, _GROUP, "Messages that failed for good: they go to the group's dead-letter queue.")
UNCOPIED: Final = Figure(
    "qmq_dead_messages_uncopied_total", COUNTER, _GROUP, "Dead messages without a copy in the dead-letter queue: the log says why."
)
LEASES_LOST: Final = Figure(
    "qmq_leases_lost_total", COUNTER, _GROUP, "Leases of consumers, and of lanes, that ended because the consumer was silent."
)
GRANTED: Final = Figure("qmq_lanes_granted_total", COUNTER, _GROUP, "Lanes of ordered subjects that were granted to consumers.")

_TALLIES: Final[tuple[tuple[Figure, Callable[[GroupCounters], int]], ...]] = (
    (PULLED, lambda counters: counters.pulled),
    (PULLED_BYTES, lambda counters: counters.pulled_bytes),
    (RETRIED, lambda counters: counters.retried),
    (FILTERED, lambda counters: counters.filtered),
    (ACKED, lambda counters: counters.acked),
    (NACKED, lambda counters: counters.nacked),
    (RELEASED, lambda counters: counters.released),
    (DEAD, lambda counters: counters.dead),
    (UNCOPIED, lambda counters: counters.uncopied),
    (LEASES_LOST, lambda counters: counters.leases_lost),
    (GRANTED, lambda counters: counters.lanes_granted),
)
Names = tuple[str, str]
"""A subject and a group."""


@dataclass(slots=True)
class Behind:
    """The lag of a group on a subject."""

    lag: int = 0
    lag_s: float = 0.0
    unacked: int = 0
    requeued: int = 0
    dying: int = 0
    consumers: int = 0
    waiting: int = 0
    parked_keys: int = 0
    parked: int = 0
    is_paused: bool = False


_BEHIND: Final[tuple[tuple[Figure, Callable[[Behind], float]], ...]] = (
    (LAG, lambda each: each.lag),
    (LAG_S, lambda each: each.lag_s),
    (UNACKED, lambda each: each.unacked),
    (REQUEUED, lambda each: each.requeued),
    (DYING, lambda each: each.dying),
    (CONSUMERS, lambda each: each.consumers),
    (WAITING, lambda each: each.waiting),
    (PARKED_KEYS, lambda each: each.parked_keys),
    (PARKED, lambda each: each.parked),
    (PAUSED, lambda each: each.is_paused),
)


class GroupsSource:
    """`group` is the broker group's name."""

    figures: Final = (*[figure for figure, _ in _BEHIND], *[figure for figure, _ in _TALLIES])

    def __init__(self, broker: Broker, group: str) -> None:
        self._broker = broker
        self._group = group

    def read(self) -> Iterator[Reading | None]:
        if self._broker.is_serving:
            yield from self._behind()
        yield from self._counted()

    def _behind(self) -> Iterator[Reading | None]:
        found: dict[Names, Behind] = {}
        now_ms = self._broker.clock.time_ms()
        for number, state in enumerate(self._broker.dispatch.groups):
            names = (state.queue.id.subject, base_group(state.name))
            _add_share(found.setdefault(names, Behind()), state, now_ms)
            if number % SLICE == 0:
                yield None
        for queue in [each for each in self._broker.store.queues.values() if each.lanes]:
            for name, lanes in list(queue.lanes.items()):
                _add_lanes(found.setdefault((queue.id.subject, name), Behind()), queue, lanes, now_ms)
            yield None
        for names in self._broker.lanes.waiting():
            found.setdefault(names, Behind()).waiting += 1
        yield None
        for names, each in found.items():
            each.is_paused = self._broker.rules.is_paused(*names, "", "")
        labels, ordered = self._labels(found), list(found.values())
        yield None
        for figure, of in _BEHIND:
            yield Reading(figure, rows_of(labels, map(of, ordered)))
            yield None

    def _labels(self, found: Iterable[Names]) -> list[tuple[str, ...]]:
        return [(self._group, *names) for names in found]

    def _counted(self) -> Iterator[Reading | None]:
        counters = self._broker.counters
        found = dict(counters.groups)
        labels = self._labels(found)
        for figure, of in _TALLIES:
            yield Reading(figure, rows_of(labels, map(of, found.values())))
            yield None


def _add_share(behind: Behind, state: QueueGroup, now_ms: int) -> None:
    queue, share = state.queue, state.share
    unacked, requeued, dying = share.unacked(), share.waiting_again(), share.dying_messages()
    behind.lag += max(queue.visible_sequence - max(share.next_sequence, queue.start_sequence), 0) + unacked + requeued + dying
    behind.lag_s = max(behind.lag_s, _lag_s(queue, share.settled_before(), now_ms))
    behind.unacked += unacked
    behind.requeued += requeued
    behind.dying += dying
    behind.consumers += len(share.holders)
    behind.waiting += len(state.waiters)


def _add_lanes(behind: Behind, queue: Queue, lanes: GroupLaneState, now_ms: int) -> None:
    behind.consumers += len(lanes.holders)
    behind.parked_keys += sum([bool(parked.sequences) for parked in lanes.parked.values()])
    behind.parked += sum([len(parked.sequences) for parked in lanes.parked.values()])
    if not lanes.progress:
        return
    done_before = lanes.done_before()
    behind.lag += max(messages_end(queue) - max(done_before, queue.start_sequence), 0)
    behind.lag_s = max(behind.lag_s, _lag_s(queue, done_before, now_ms))


def _lag_s(queue: Queue, done_before: int, now_ms: int) -> float:
    try:
        return lag_ms(queue, done_before, now_ms) / 1000
    except LogDamaged:
        return 0.0  # consumers of the queue get the error
