"""Rounds: each copies what is committed in the log and not yet in the tables.

A round of a subject begins at the positions of its table and ends with one commit. A round reads
all state again when it begins, so it may crash at any point, and any number of writers may run.
docs/LAKE.md explains why each message is in the table once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pyiceberg.catalog import Catalog

from pyspark_qmq.lake import typed
from pyspark_qmq.lake.catalog import CatalogAway, answering_catalog
from pyspark_qmq.lake.table import (
    COMPLETE_FROM,
    LakeTable,
    complete_from,
    encode_positions,
    open_table,
)
from pyspark_qmq.lake.task_runner import TaskOutput, TaskRunner, TaskSource, write_tasks
from pyspark_qmq.lake.typed import TypedTables, held_struct
from qmq.columns.model import ALL, CommittedLog, QueueKey, SourceQueue, Topology
from qmq.columns.offsets import Offsets
from qmq.columns.options import ReadOptions
from qmq.columns.planning import Limit, Plan, PlannedRange, admit, ranges, tasks
from qmq.columns.reading import address_of, forget, log_at, starts, topology_of
from qmq.errors import InvalidArgument, QmqError, Unavailable
from qmq.model import DeclaredSchema

log = logging.getLogger(__name__)

ROUND_BYTES: Final = 256 << 20
"""Stored bytes of a subject that one commit may add. Limits the work that a writer repeats after a
crash, and the size of a file.
"""
_PIECE_BYTES: Final = 64 << 20


class RoundResult(NamedTuple):
    """The result of a round for one subject."""

    subject: str
    rows: int
    files: int
    is_behind: bool
    """Whether more was committed in the log than the round took."""
    is_refused: bool = False
    """Whether another writer committed first."""
    rejected: int = 0
    """Messages in the table of rejected messages, because they do not fit the subject's schema."""


@dataclass(slots=True)
class LakeCounters:
    """Counts since the writer was made."""

    rows: dict[str, int] = field(default_factory=dict)
    """Messages committed to the tables, by subject."""
    waits: dict[str, int] = field(default_factory=lambda: {"catalog": 0, "cluster": 0})
    """Attempts to open or to run a round that failed because the catalog or the
    cluster did not answer.
    """

    def wait_for(self, what: str, failure: Unavailable) -> None:
        """Count and log a wait for `what`."""
        self.waits[what] += 1
        log.warning("the lake waits for the %s: %s", what, failure)


@dataclass(frozen=True, slots=True)
class LakeOptions:
    namespace: str = "qmq"
    round_bytes: int = ROUND_BYTES


def catalog_when_it_answers(
    open_one: Callable[[], Catalog],
    stopping: threading.Event,
    interval_s: float,
    counters: LakeCounters,
) -> Catalog | None:
    """Open a catalog; try again every `interval_s` while it does not answer. None if `stopping` is
    set first. Raises InvalidArgument.
    """
    while not stopping.is_set():
        try:
            return open_one()
        except CatalogAway as failure:
            counters.wait_for("catalog", failure)
            stopping.wait(interval_s)
    return None


class LakeWriter:
    """Keeps the tables of the chosen subjects up to date with the log. Only one thread may use a
    writer.

    `run_tasks` writes the files; the writer makes the commits. `schemas` returns the current
    versions of a subject's schema, the newest one last; with `schemas`, the tables are typed.

    Raises InvalidArgument if the read selects messages or queues, because a table has all messages
    of its subject.
    """

    def __init__(
        self,
        catalog: Catalog,
        asked: ReadOptions,
        options: LakeOptions,
        *,
        run_tasks: TaskRunner = write_tasks,
        schemas: Callable[[str], Sequence[DeclaredSchema]] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        counters: LakeCounters | None = None,
    ) -> None:
        if asked.selection != ALL or asked.choice.queues is not None:
            raise InvalidArgument(
                "a table holds all messages of its subject: leave out tags, keys, "
                "includeDirected and assign, and filter when you read"
            )
        self._catalog = catalog
        self._asked = asked
        self._options = options
        self._run_tasks = run_tasks
        self._monotonic = monotonic
        self._source = TaskSource(address_of(asked.where), asked.skips_lost)
        self._tables: dict[str, LakeTable] = {}
        self._typed = None if schemas is None else TypedTables(catalog, options.namespace, schemas)
        self.counters = LakeCounters() if counters is None else counters

    def round(self) -> Iterator[RoundResult]:
        """Run one round of each subject that has new messages. One that fails for good stops no
        other: its error is raised in the end.

        Raises:
            UnknownSubject, InvalidArgument: as a read of the log; a subject has no schema, or an
            untyped writer meets a typed table. IncompatibleSchema: a typed table cannot follow the
            subject's schema. MessagesExpired: retention deleted messages that a table does not
            have. NotConnected: a broker group did not answer in time. CatalogAway: the catalog did
            not answer. LogDamaged: the log or a table is damaged.
        """
        topology, failures = topology_of(self._log(), self._asked.choice), list[QmqError]()
        for subject in sorted({key.subject for key in topology.queues}):
            try:
                with answering_catalog():
                    found = self._subject_round(subject, _only(topology, subject))
            except Unavailable:
                raise
            except QmqError as failure:  # the other subjects come first
                failures.append(failure)
                continue
            if found is not None:
                taken = 0 if found.is_refused else found.rows
                self.counters.rows[subject] = self.counters.rows.get(subject, 0) + taken
                yield found
        if failures:
            raise failures[0]

    def run(
        self, stopping: threading.Event, interval_s: float, report: Callable[[RoundResult], None]
    ) -> None:
        """Run a round every `interval_s` until `stopping` is set. A round of a subject that has
        begun is finished.

        While the cluster or the catalog does not answer, tries again after `interval_s`. Raises the
        other errors of `round`.
        """
        while not stopping.is_set():
            is_behind, begin = False, self._monotonic()
            try:
                for done in self.round():
                    report(done)
                    is_behind |= done.is_behind or done.is_refused
                    if stopping.is_set():
                        return
            except Unavailable as failure:
                is_behind = False
                self._wait_for(
                    "catalog" if isinstance(failure, CatalogAway) else "cluster", failure
                )
            if not is_behind:
                stopping.wait(max(begin + interval_s - self._monotonic(), 0.0))

    def _wait_for(self, what: str, failure: Unavailable) -> None:
        """The last commit may or may not have been made, so the tables are opened again."""
        self.counters.wait_for(what, failure)
        self._tables.clear()
        if self._typed is not None:
            self._typed.forget()

    def drain(self, report: Callable[[RoundResult], None]) -> None:
        """Run rounds until the tables have what was committed when `drain` began.
        Raises as `round`.
        """
        until = {
            key: queue.end
            for key, queue in topology_of(self._log(), self._asked.choice).queues.items()
        }
        while any(self._reached(key) < end for key, end in until.items()):
            for done in self.round():
                report(done)

    def close(self) -> None:
        """Close the log."""
        forget(self._source.address)

    def _log(self) -> CommittedLog:
        return log_at(self._source.address)

    def _reached(self, key: QueueKey) -> int:
        try:
            with answering_catalog():
                return self._table(key.subject).positions().get(key, 0)
        except Unavailable:
            raise
        except QmqError:  # the round tells, after it has served the other subjects
            return -1

    def _subject_round(self, subject: str, topology: Topology) -> RoundResult | None:
        table = self._table(subject)
        if self._typed is not None:
            self._typed.complete(table)
        begin = self._begin(table, topology)
        limit = Limit(
            self._asked.limit.rows_max, self._asked.limit.bytes_max or self._options.round_bytes
        )
        end = admit(topology, begin, limit)
        wanted = ranges(begin, end, topology.queues, skips_lost=self._asked.skips_lost)
        if not wanted:
            return None
        output = TaskOutput(table.folder) if self._typed is None else self._typed.output(table)
        work = tasks(self._log(), topology, wanted, Plan(_PIECE_BYTES), ALL)
        made = self._run_tasks(self._source, list(work), output)
        bad = [each for each in made if each.is_rejected]
        properties = dict(typed.pending_property(each.location for each in bad)) if bad else {}
        properties[COMPLETE_FROM] = encode_positions(
            subject, _complete_from(table, begin, end, wanted)
        )
        is_committed = table.commit(
            [each.location for each in made if not each.is_rejected], end, properties
        )
        if self._typed is not None and is_committed:
            self._typed.complete(table)
        is_behind = any(end.get(key, 0) < queue.end for key, queue in topology.queues.items())
        counts = sum(each.rows for each in made), len(made)
        return RoundResult(
            subject, *counts, is_behind, not is_committed, sum(each.rows for each in bad)
        )

    def _begin(self, table: LakeTable, topology: Topology) -> dict[QueueKey, int]:
        """The table's positions. A new table begins where the user chose. A queue that was added
        later is read from its beginning.
        """
        found = table.positions()
        if not found:
            found = {
                key: at
                for key, at in starts(
                    self._asked, topology.queues.values(), self._log().find_time
                ).items()
                if at
            }
            if found and not table.commit(
                [], found, {COMPLETE_FROM: encode_positions(table.subject, found)}
            ):
                return self._begin(
                    table, topology
                )  # another writer committed first: use its positions
        return found

    def _table(self, subject: str) -> LakeTable:
        found = self._tables.get(subject)
        if found is None:
            found = open_table(self._catalog, self._options.namespace, subject)
            if self._typed is None and held_struct(found).fields:
                raise InvalidArgument(
                    f"the table of {subject!r} has decoded bodies: follow it with --typed, "
                    "or choose another --namespace"
                )
            self._tables[subject] = found
        return found


def _complete_from(
    table: LakeTable, begin: Offsets, end: Offsets, wanted: Iterable[PlannedRange]
) -> Offsets:
    known = table.complete_from()
    if known is None:  # the table is new, or `qmq lake migrate` made it
        known = table.first_sequences()
    return complete_from(known, begin, end, {each.queue: each.first for each in wanted})


def _only(topology: Topology, subject: str) -> Topology:
    queues: dict[QueueKey, SourceQueue] = {
        key: queue for key, queue in topology.queues.items() if key.subject == subject
    }
    return Topology(
        queues, {name: routes for name, routes in topology.routes.items() if name == subject}
    )
