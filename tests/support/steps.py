"""Steps as a broker writes them, and what waits after them."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.log.actions import SettleAction
from qmq.log.queue import Queue
from qmq.log.step_record import Effect, record_of
from qmq.log.step_state import EffectState
from qmq.log.store import Store
from qmq.model import STEPS
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns
from qmq.wire.frame_payloads import Verdict


def effect(
    subject: str,
    bodies: Sequence[bytes],
    *,
    keys: Sequence[bytes] | None = None,
    is_ordered: bool = False,
    first: int = 0,
    number: int = 0,
) -> Effect:
    """Messages for a target, as their producer's batch `number`."""
    columns = Columns(list(bodies), keys=list(keys) if keys is not None else None)
    _, region = encode(
        subject.encode(), columns, producer_id=99, batch_sequence=number, create_time_ms=5
    )
    return Effect(subject, is_ordered, first, len(bodies), region)


def acknowledged(queue: Queue, group: str, consumer: str, first: int, last: int) -> SettleAction:
    """The settlement of a step: pull sequences of one consumer."""
    where = (queue.id.subject, queue.id.partition, group, consumer)
    return SettleAction(*where, 7, ((first, last, int(Verdict.ACK), 0),))


def waiting_effects(store: Store, subject: str) -> list[tuple[int, int]]:
    """(sequence of its step, number) of each effect of a target that waits, found by reading every
    step from the log.
    """
    queue = store.open_queue(STEPS, 0)
    assert queue.steps is not None
    target = queue.steps.targets.get(subject)
    if target is None:
        return []
    found = list[tuple[int, int]]()
    for _, entry in queue.index.scan(queue.index.find_sequence(target.sequence)):
        if entry.base_sequence < target.sequence:
            continue
        for each in record_of(store.read(queue, entry)[1]).effects:
            if each.subject == subject:
                found += [
                    (entry.base_sequence, number)
                    for number in range(each.first, each.end)
                    if queue.steps.state_of(subject, number) is EffectState.WAITING
                ]
    return found
