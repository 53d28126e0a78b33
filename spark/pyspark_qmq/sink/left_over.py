"""Looks for rows that an earlier attempt of an epoch stored and that no task of this attempt has,
and for rows of the query where they must not be. Pure.

A task compares its rows with those of the same Spark partition (`row_distribution.py`). If the
repeated epoch has fewer tasks, nobody has the partitions of the others: their rows are in other
tasks now, which have stored them a second time. So when all tasks are done, the driver looks for
rows

* of the next `BEYOND` Spark partitions. Spark starts tasks in the order of their partitions, so an
  attempt that stored rows of any later partition stored rows of one of these, too;
* of each Spark partition in the subjects that only other partitions have now. A partition without
  any row is left out: its source may have lost them (`failOnDataLoss=false`), which loses and
  repeats nothing here.

In the first epoch of a run, each task looks beyond its own Spark partition, before it sends a row:

* If any Spark partition has rows of later epochs, all rows of this epoch are stored, those of this
  task, too, although the task may find no later row of its own (`has_later_rows`).
* If the subject has no row of the query, and another subject has, the checkpoint belongs to that
  one (`refuse_other_subject`). Who writes under a `qmq.txnId` is not asked: a name may have many
  subjects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from pyspark_qmq.sink.requests import Ask, Glance, Locate, Look, LookedUp, Where
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from qmq.columns.model import Routes
from qmq.errors import AccessDenied, InvalidArgument, Unavailable, UnknownSubject

BEYOND: Final = 16
"""Spark partitions, about as many as the cores that one attempt may have used more than another."""
Answer = Callable[[Ask | Glance, RowWriter], Where | LookedUp]
Destination = tuple[str, bool]
"""A subject, and whether the rows are delayed."""


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """What a task of this attempt wrote."""

    writer: RowWriter
    rows: int
    destinations: frozenset[Destination]


def refuse_left_over(
    answer: Answer, tasks: Sequence[WrittenRows], destinations: Iterable[Destination] = ()
) -> None:
    """`tasks`: all tasks of the epoch. `destinations`: more than those of the tasks. Raises
    InvalidArgument, and as `answer`.
    """
    if not tasks:
        return
    epoch = tasks[0].writer
    known = {each.writer.partition: each for each in tasks}
    for subject, is_delayed in sorted(
        {*destinations, *[to for each in tasks for to in each.destinations]}
    ):
        try:
            where = answer(Locate(subject, is_delayed), epoch)
        except (UnknownSubject, AccessDenied):
            # The subject of rows that name none, and each row names one.
            continue
        for partition in range(len(tasks) + BEYOND):
            task, writer = known.get(partition), replace(epoch, partition=partition)
            if task is not None and (not task.rows or (subject, is_delayed) in task.destinations):
                continue
            for queue in _queues(where, subject, is_delayed):
                if _has_rows(answer(Look(queue), writer)):
                    raise _left_over(writer, subject, len(tasks))


def has_later_rows(answer: Answer, writer: RowWriter, destination: Destination) -> bool:
    """Whether a Spark partition of the query has rows of epochs behind `writer`'s. Raises as
    `answer`.
    """
    return any(found.has_later for found in _newest(answer, writer, destination))


def refuse_other_subject(
    answer: Answer,
    at_once: Answer,
    writer: RowWriter,
    destinations: Sequence[Destination],
    others: Callable[[], Iterable[str]],
) -> None:
    """`at_once`: the same as `answer` without waiting, for subjects that the query does not need.
    `destinations`: the subject to which it writes now, and its delayed rows if it may have some.
    `others`: the names of all subjects, asked for only in case of doubt. Raises InvalidArgument,
    and as `answer` and `others`.
    """
    if any(found.has_any for each in destinations for found in _newest(answer, writer, each)):
        return
    subject = destinations[0][0]
    for other in others():
        with suppress(Unavailable):
            if other != subject and any(
                found.has_any for found in _newest(at_once, writer, (other, False))
            ):
                raise InvalidArgument(
                    f"this query stored rows in {other!r}, and now begins with epoch "
                    f"{writer.epoch} in {subject!r}, where none of its rows are: its checkpoint "
                    f"belongs to {other!r}, and the rows of earlier epochs would be missing in "
                    f"{subject!r}. Write to {other!r}, or start with a new checkpoint; to go on in "
                    f"{subject!r} without the earlier rows, choose a qmq.txnId"
                )


def _newest(answer: Answer, writer: RowWriter, destination: Destination) -> Iterator[LookedUp]:
    """What is newest in each open queue, of the first Spark partitions."""
    subject, is_delayed = destination
    with suppress(UnknownSubject, AccessDenied):
        where = answer(Locate(subject, is_delayed), writer)
        for partition in range(BEYOND):
            for queue in _queues(where, subject, is_delayed, only_open=True):
                found = answer(Glance(queue), replace(writer, partition=partition))
                assert isinstance(found, LookedUp)
                yield found


def _queues(
    where: Where | LookedUp, subject: str, is_delayed: bool, *, only_open: bool = False
) -> list[RowTarget]:
    assert not isinstance(where, LookedUp)
    if isinstance(where, Routes):
        parts = where.partitions.values()
        closed = {source for part in parts for source in part.sources} if only_open else set()
        return [
            RowTarget(subject, part.number, part.broker_group)
            for part in parts
            if part.number not in closed
        ]
    return [RowTarget(subject, 0, group, is_delayed) for group in where]


def _has_rows(found: Where | LookedUp) -> bool:
    assert isinstance(found, LookedUp)
    return bool(found.runs or len(found.rows) or found.ids)


def _left_over(writer: RowWriter, subject: str, tasks: int) -> InvalidArgument:
    return InvalidArgument(
        f"an earlier attempt of epoch {writer.epoch} stored rows of Spark partition "
        f"{writer.partition} in {subject!r}, which this attempt with {tasks} Spark partitions "
        "does not have. All rows of the epoch are stored, and these ones perhaps twice: the source "
        "cut the epoch into other tasks, as Spark's file sources do with another number of cores. "
        "To continue, choose a new qmq.txnId: the epoch's rows are then stored once more. "
        "To avoid this, repartition by a column and sort, or keep the cores and options"
    )
