"""Streams the log into an archive: each micro-batch becomes a manifest.

Spark keeps the stream's offsets in a checkpoint, and repeats a micro-batch after a crash. That is not enough: a crash between writing the
files and writing Spark's commit log would write rows twice. So the manifests decide. A micro-batch is a set of offset ranges, and ranges
that are already archived are skipped, whichever query and epoch archived them. If the checkpoint is lost, torn, or older or newer than the
manifests, a new one starts where the manifests end.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pyspark_qmq import offsets
from pyspark_qmq.jobs import archive_files
from pyspark_qmq.jobs.archive_disk import ArchiveDisk
from pyspark_qmq.jobs.archive_folder import ArchiveFolder
from pyspark_qmq.jobs.archive_manifest import Archive, Manifest
from pyspark_qmq.jobs.archive_ranges import Ranges, between
from pyspark_qmq.log_opening import address_of, log_at
from pyspark_qmq.offsets import Offsets
from pyspark_qmq.read_options import parse
from pyspark_qmq.read_ranges import look, starts
from pyspark_qmq.source_model import QueueKey, SourceQueue
from pyspark_qmq.source_schema import default_schema
from qmq.errors import ClientClosed, LogDamaged

SELECTING: Final = ("tags", "tagsall", "keys", "keyfrom", "keyuntil", "includedirected")
"""Options that select messages of a subject, in lower case."""
_CHOOSING: Final = ("subscribe", "subscribepattern", "assign")
_STARTING: Final = ("startingoffsets", "startingtimestamp")


class Taking:
    """Archives each micro-batch. All steps are idempotent; the process may crash between any two."""

    def __init__(self, folder: ArchiveFolder, disk: ArchiveDisk, notes: CheckpointNotes, start: Offsets) -> None:
        """`start`: the stream's start if it has no checkpoint."""
        self._folder = folder
        self._disk = disk
        self._notes = notes
        self._start = start
        self.made: list[Manifest] = []
        """The manifests added by this process."""
        self.failure: BaseException | None = None
        """The original error that ended the stream; Spark wraps it."""
        self._turn = threading.Lock()
        self._is_over = False

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        """Called by `foreachBatch`, in another thread."""
        with self._turn:
            if self._is_over:
                raise ClientClosed("the archive was closed")
            try:
                self._take(rows, self._ranges(epoch), self._notes.ends_of(epoch), f"query {self._notes.query_id()}, epoch {epoch}")
            except BaseException as failure:
                self.failure = failure
                raise

    def end(self) -> None:
        """Wait for the current step to finish, and prevent further ones."""
        with self._turn:
            self._is_over = True

    def _ranges(self, epoch: int) -> Ranges:
        start = self._notes.ends_of(epoch - 1) if epoch > 0 else self._start
        found = between(start, self._notes.ends_of(epoch))
        behind = self._folder.latest().reached
        for key, wanted in found.items():
            if key in behind and wanted[0][0] > behind[key]:
                raise LogDamaged(f"{key}: the archive ends at {behind[key]}, the stream continues at {wanted[0][0]}: start it again")
        return found

    def _take(self, rows: DataFrame, wanted: Ranges, reached: Offsets, origin: str) -> None:
        while lacking := self._folder.latest().lacks(wanted):
            attempt = self._folder.attempt()
            archive_files.write_rows(rows if lacking == wanted else archive_files.within(rows, lacking), attempt)
            files = archive_files.written_files(rows.sparkSession, attempt, self._disk)
            archive_files.check_within(files, lacking)
            made = self._folder.commit(attempt, Manifest("archive", lacking, reached, files, origin=origin))
            if made is not None:
                self.made.append(made)
                return


class CheckpointNotes:
    """Spark's notes in the checkpoint of a query with one source."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def query_id(self) -> str:
        """The query's id, which stays the same as long as the checkpoint."""
        return str(json.loads((self._folder / "metadata").read_bytes())["id"])

    def ends_of(self, epoch: int) -> dict[QueueKey, int]:
        """The end offsets of an epoch, which Spark notes before it runs the epoch. Raises LogDamaged."""
        path = self._folder / "offsets" / str(epoch)
        try:
            version, _, *sources = path.read_text().split("\n")
            if version != "v1" or len(sources) != 1:
                raise ValueError(f"version {version!r} with {len(sources)} sources")
            return offsets.of_json(json.loads(sources[0]))
        except (OSError, ValueError, AttributeError) as cause:
            raise LogDamaged(f"{path} does not have the end of epoch {epoch} ({cause}): remove {self._folder} and start again") from cause

    def fits(self, archive: Archive) -> bool:
        """Whether a stream can continue from this checkpoint: it is intact, and its offsets are not beyond the archive's end."""
        try:
            planned, done = _numbers(self._folder / "offsets"), _numbers(self._folder / "commits")
            if not planned:
                return False
            self.query_id()
            known = [self.ends_of(each) for each in planned[-2:]]
            if any(not (self._folder / "commits" / str(each)).read_bytes().startswith(b"v1") for each in done[-1:]):
                return False
        except (OSError, ValueError, KeyError, LogDamaged):
            return False
        begins = known[-1] if done and done[-1] == planned[-1] else known[0] if len(known) > 1 else {}
        return all(archive.reached.get(key, 0) >= sequence for key, sequence in begins.items())


def _numbers(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in folder.glob("[0-9]*") if each.name.isdigit())


def run_stream(
    spark: SparkSession, folder: ArchiveFolder, disk: ArchiveDisk, options: Mapping[str, str], trigger: Mapping[str, Any]
) -> list[Manifest]:
    """Archive the stored messages, or continue until a signal. Returns the added manifests. Raises QmqError, PySparkException."""
    given = {name.lower(): value for name, value in options.items()}
    folder.identify({name: given[name] for name in SELECTING if name in given})
    checkpoint = folder.checkpoint(_name({name: given[name] for name in _CHOOSING if name in given}))
    notes = CheckpointNotes(checkpoint)
    if not notes.fits(folder.latest()):
        shutil.rmtree(checkpoint, ignore_errors=True)
    start = _starting(given, folder.latest())
    taking = Taking(folder, disk, notes, start)
    source = {name: value for name, value in given.items() if name not in _STARTING}
    source["startingoffsets"] = json.dumps(offsets.to_json(start))
    rows = spark.readStream.format("qmq").schema(_schema()).options(**source).load()
    query = rows.writeStream.foreachBatch(taking).option("checkpointLocation", str(checkpoint)).trigger(**trigger).start()
    try:
        wait(query)
    except Exception as wrapped:
        raise taking.failure or wrapped from wrapped
    finally:
        taking.end()
    return taking.made


class Query(Protocol):
    """The used part of Spark's StreamingQuery."""

    def awaitTermination(self, timeout: int | None = None) -> bool | None:  # noqa: N802 - the name is Spark's
        """Whether the query ended within the given seconds. Raises the query's error."""
        ...

    def stop(self) -> None: ...


def wait(query: Query) -> None:
    """Wait until a query ends, or stop it at Ctrl-C or SIGTERM. Raises the query's error."""
    with _asked_to_stop() as asked:
        while not asked.is_set():
            if query.awaitTermination(1):
                return
    query.stop()


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """An event set by a signal, so that no exception interrupts arbitrary code. Without effect outside the main thread."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _schema() -> StructType:
    return default_schema(with_headers=True)


def _name(choice: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(choice, sort_keys=True).encode()).hexdigest()[:16]


def _starting(options: Mapping[str, str], archive: Archive) -> dict[QueueKey, int]:
    """The starting offsets: the archive's ends; for other queues, as the options say, by default the oldest message."""
    if not any(name in options for name in _STARTING):
        options = {**options, "startingoffsets": offsets.EARLIEST}
    asked = parse(options, is_stream=True)
    log = log_at(address_of(asked.where))
    found = starts(asked, look(log, asked.choice).queues.values(), log)
    return found | {key: sequence for key, sequence in archive.reached.items() if key in found}


def queues_of(options: Mapping[str, str]) -> dict[QueueKey, SourceQueue]:
    """The committed ranges of the selected queues. Raises UnknownSubject, NotConnected, LogDamaged."""
    asked = parse({name: value for name, value in options.items() if name.lower() not in _STARTING}, is_stream=True)
    return dict(sorted(look(log_at(address_of(asked.where)), asked.choice).queues.items()))


def waiting(options: Mapping[str, str], archive: Archive) -> dict[QueueKey, int]:
    """The number of committed sequences of each queue that are not archived yet. Raises what `queues_of` raises."""
    return {key: max(queue.end - archive.reached.get(key, queue.start), 0) for key, queue in queues_of(options).items()}
