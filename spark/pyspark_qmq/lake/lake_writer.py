"""Rounds: what is committed in the log and not in the tables goes into the tables.

A round of a subject begins at the positions of its table and ends with one commit. Everything that a round knows it reads again at its
beginning, so a round may die anywhere, and any number of writers may run: docs/LAKE.md says why each message is in the table once.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from pyiceberg.catalog import Catalog

from pyspark_qmq.admission import Limit, admit
from pyspark_qmq.columns import Projector
from pyspark_qmq.committed_log import CommittedLog
from pyspark_qmq.lake.day_files import DayFiles
from pyspark_qmq.lake.lake_schema import COLUMNS
from pyspark_qmq.lake.lake_table import LakeTable, open_table
from pyspark_qmq.planning import Plan, ReadTask, ranges, tasks
from pyspark_qmq.read_options import ReadOptions
from pyspark_qmq.read_ranges import look, starts
from pyspark_qmq.source_model import ALL, QueueKey, SourceQueue, Topology
from qmq.errors import Unavailable

log = logging.getLogger(__name__)

ROUND_BYTES: Final = 256 << 20
"""Stored bytes of a subject that one commit may add: what a crash makes a writer do again, and the size of a file."""
_PIECE_BYTES: Final = 64 << 20


class RoundResult(NamedTuple):
    """What a round of one subject did."""

    subject: str
    rows: int
    files: int
    is_behind: bool
    """Whether more was committed in the log than the round took."""
    is_refused: bool = False
    """Whether another writer was faster."""


@dataclass(frozen=True, slots=True)
class LakeOptions:
    namespace: str = "qmq"
    round_bytes: int = ROUND_BYTES


class LakeWriter:
    """Keeps the tables of the chosen subjects in step with the log. Used by one thread.

    `new_name` gives each file a name of its own.
    """

    def __init__(
        self,
        committed: CommittedLog,
        catalog: Catalog,
        asked: ReadOptions,
        options: LakeOptions,
        *,
        new_name: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._log = committed
        self._catalog = catalog
        self._asked = asked
        self._options = options
        self._new_name = new_name
        self._tables: dict[str, LakeTable] = {}

    def round(self) -> Iterator[RoundResult]:
        """One round of each subject that has something new.

        Raises:
            UnknownSubject, InvalidArgument: as a read of the log.
            MessagesExpired: retention deleted what a table does not have.
            NotConnected: a broker group did not answer in time.
            LogDamaged: log or table do not hold together.
        """
        topology = look(self._log, self._asked.choice)
        for subject in sorted({key.subject for key in topology.queues}):
            found = self._subject_round(subject, _only(topology, subject))
            if found is not None:
                yield found

    def run(self, stopping: threading.Event, interval_s: float, report: Callable[[RoundResult], None]) -> None:
        """Rounds until `stopping` is set; a round of a subject that is under way is finished.

        While the cluster does not answer, it is asked again after `interval_s`. Raises the other errors of `round`.
        """
        while not stopping.is_set():
            is_behind = False
            try:
                for done in self.round():
                    report(done)
                    is_behind |= done.is_behind or done.is_refused
                    if stopping.is_set():
                        return
            except Unavailable as failure:
                log.warning("the lake waits for the cluster: %s", failure)
            if not is_behind:
                stopping.wait(interval_s)

    def drain(self, report: Callable[[RoundResult], None]) -> None:
        """Rounds until the tables have what was committed when `drain` began. Raises as `round`."""
        until = {key: queue.end for key, queue in look(self._log, self._asked.choice).queues.items()}
        while any(self._reached(key) < end for key, end in until.items()):
            for done in self.round():
                report(done)

    def _reached(self, key: QueueKey) -> int:
        return self._table(key.subject).positions().get(key, 0)

    def _subject_round(self, subject: str, topology: Topology) -> RoundResult | None:
        table = self._table(subject)
        begin = self._begin(table, topology)
        end = admit(topology, begin, Limit(bytes_max=self._options.round_bytes))
        wanted = ranges(begin, end, topology.queues, skips_lost=self._asked.skips_lost)
        if not wanted:
            return None
        files = DayFiles(table, self._new_name())
        try:
            for task in tasks(self._log, topology, wanted, Plan(_PIECE_BYTES), ALL):
                self._write(task, files)
            made = files.close()
        finally:
            files.abandon()
        is_committed = table.commit([each.location for each in made], end)
        is_behind = any(end.get(key, 0) < queue.end for key, queue in topology.queues.items())
        return RoundResult(subject, sum(each.rows for each in made), len(made), is_behind, not is_committed)

    def _write(self, task: ReadTask, files: DayFiles) -> None:
        key, version = task.piece.queue, task.route_version
        versions = {(key.subject, key.partition): version} if version is not None else {}
        batches = self._log.read(task.piece, ALL, skips_lost=self._asked.skips_lost)
        for batch in Projector(COLUMNS, routes=versions).convert(batches, task.piece):
            files.write(batch)

    def _begin(self, table: LakeTable, topology: Topology) -> dict[QueueKey, int]:
        """The table's positions. A new table begins where the user says. A queue that came later is read from its beginning."""
        found = table.positions()
        if not found:
            found = {key: at for key, at in starts(self._asked, topology.queues.values(), self._log).items() if at}
            if found:
                table.commit([], found)
        return found

    def _table(self, subject: str) -> LakeTable:
        found = self._tables.get(subject)
        if found is None:
            found = self._tables[subject] = open_table(self._catalog, self._options.namespace, subject)
        return found


def _only(topology: Topology, subject: str) -> Topology:
    queues: dict[QueueKey, SourceQueue] = {key: queue for key, queue in topology.queues.items() if key.subject == subject}
    return Topology(queues, {name: routes for name, routes in topology.routes.items() if name == subject})
