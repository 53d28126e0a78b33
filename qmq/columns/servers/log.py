"""The committed log served by brokers (implements `qmq.columns.model.CommittedLog`).

Rules:
* A queue's end is the position up to which its master shows messages to applications: the answer to
  a FETCH for no messages.
* The queues of an ordered subject come from the route history. The history is read after the ends,
  and once more for partitions that were new, so if a target has messages, its sources appear
  closed. A metaserver that is behind may name a target later, but never shows a source as open too
  long, because the broker itself reports the closing.
* If a broker group does not answer within the retry time, the result is NotConnected, because the
  ends of its queues are unknown.

The action log is for reports about lag and latency. It is read by a few requests of some MiB over
the control port: action logs are small, and reports are not urgent.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from qmq import limits
from qmq.columns.model import (
    QueueKey,
    QueuePiece,
    ReaderReport,
    ReadSelection,
    Routes,
    SourceBatch,
    SourceQueue,
    Topology,
)
from qmq.columns.servers.connection import ANSWER_S, BlockingConnection
from qmq.columns.servers.metaservers import RETRY_MS, Metadata, patiently
from qmq.columns.servers.reading import MasterConnections, ServerPieceReader, numbers_of
from qmq.errors import (
    CorruptBatch,
    InvalidArgument,
    LogDamaged,
    MessagesExpired,
    NotConnected,
    QmqError,
    UnknownSubject,
)
from qmq.proto.v1 import control_pb2 as pb
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import ENVELOPE_BYTES, Envelope, Kind, parse_envelope
from qmq.wire.batch_columns import check_region
from qmq.wire.frame import FrameKind


class ServerLog:
    """The committed messages of a cluster. Not thread-safe."""

    def __init__(self, metadata: Metadata, answer_s: float = ANSWER_S) -> None:
        self.metadata = metadata
        self._masters = MasterConnections(metadata, answer_s=answer_s)
        self._is_ordered: dict[str, bool] = {}
        """Cached per subject, because it never changes while the subject exists."""
        self._missing: set[str] = set()
        """Subjects that did not exist when last asked for: similar names are looked for once."""
        self._known: dict[str, Routes] = {}
        self._queues: dict[QueueKey, SourceQueue] = {}

    # --- subjects and topology --------------------------------------------------------------------

    def subjects(self) -> list[str]:
        """The names of all subjects, sorted. Raises NotConnected."""
        found = self.metadata.reach(lambda ms: self.metadata.list_subjects(retry_ms=ms))
        return sorted(each.settings.name for each in found)

    def topology(self, subjects: list[str], report: ReaderReport | None = None) -> Topology:
        """The current queues and routes of these subjects. Raises UnknownSubject, NotConnected."""
        queues: dict[QueueKey, SourceQueue] = {}
        routes: dict[str, Routes] = {}
        for subject in dict.fromkeys(subjects):
            try:
                if self._has_order(subject):
                    routes[subject], found = self._ordered(subject, report)
                    queues.update(found)
                else:
                    keys = [
                        QueueKey(subject, 0, host) for host in self._masters.locate(subject).hosts
                    ]
                    queues.update(_queues(self._numbers(keys, report)))
            except UnknownSubject:
                self._is_ordered.pop(subject, None)  # if it comes back, it may be of another kind
                self._known.pop(subject, None)
                self.metadata.forget_routes(subject)
                raise
        self._queues.update(queues)
        return Topology(queues, routes)

    def _has_order(self, subject: str) -> bool:
        """Whether the subject is ordered. Raises UnknownSubject with similar names."""
        if subject not in self._is_ordered:
            try:
                found = self.metadata.reach(
                    lambda retry_ms: self._masters.locate(subject, retry_ms=retry_ms)
                )
            except UnknownSubject as failure:
                if subject in self._missing:
                    raise
                self._missing.add(subject)
                raise self._unknown(subject) from failure
            self._missing.discard(subject)
            self._is_ordered[subject] = found.placement.ordering is not None
        return self._is_ordered[subject]

    def _unknown(self, subject: str) -> UnknownSubject:
        names: list[str] = []
        with suppress(QmqError):
            names = self.subjects()
        near = difflib.get_close_matches(subject, names, 3)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"subjects: {', '.join(names[:20]) or 'none'}"
        )
        return UnknownSubject(f"there is no subject {subject!r}: {hint}")

    def _ordered(
        self, subject: str, report: ReaderReport | None
    ) -> tuple[Routes, dict[QueueKey, SourceQueue]]:
        before = self._known.get(subject) or self.metadata.routes(subject)
        found = self._numbers(_keys(subject, before), report)
        routes = self._known[subject] = self.metadata.routes(subject)
        found |= self._numbers(set(_keys(subject, routes)) - set(found), report)
        sealed = dict(routes.sealed_at)
        sealed |= {
            key.partition: numbers.end_sequence
            for key, numbers in found.items()
            if numbers.is_sealed
        }
        return replace(routes, sealed_at=sealed), _queues(found, sealed)

    # --- numbers ----------------------------------------------------------------------------------

    def _numbers(
        self, keys: Iterable[QueueKey], report: ReaderReport | None = None
    ) -> dict[QueueKey, wire.Fetched]:
        """The numbers of each queue. Raises NotConnected, UnknownSubject."""
        by_group: dict[str, list[QueueKey]] = {}
        for key in keys:
            by_group.setdefault(key.broker_group, []).append(key)
        found: dict[QueueKey, wire.Fetched] = {}
        for group, several in by_group.items():
            answers = self._masters.ask(
                several[0].subject,
                group,
                lambda channel, asked=several: _ask_numbers(channel, asked, report),  # type: ignore[misc]
            )
            found.update(zip(several, answers, strict=True))
        return found

    def find_time(self, queue: QueueKey, time_ms: int) -> int:
        """The first sequence appended at or after a time; the queue's end if there is none. Raises
        UnknownSubject, NotConnected.
        """
        request = numbers_of(queue, max(time_ms, 1)).pack()
        payload = self._masters.call(queue.subject, queue.broker_group, FrameKind.FETCH, request)
        return wire.unpack_fetched(payload)[0].next_sequence

    # --- reading ----------------------------------------------------------------------------------

    def pieces(self, queue: QueueKey, first: int, end: int, bytes_max: int) -> list[QueuePiece]:
        """Split `first` to `end` - 1 into pieces of about `bytes_max` stored bytes, assuming
        messages of equal size. Raises NotConnected."""
        if first >= end:
            return []
        found = self._queues.get(queue)
        if found is None:
            found = self._queues[queue] = _queues(self._numbers([queue]))[queue]
        per_message = found.stored_bytes / max(found.end - found.start, 1)
        count = min(max(ceil(per_message * (end - first) / max(bytes_max, 1)), 1), end - first)
        marks = [first + (end - first) * each // count for each in range(count + 1)]
        return [QueuePiece(queue, marks[each], marks[each + 1]) for each in range(count)]

    def read(
        self, piece: QueuePiece, selection: ReadSelection, *, skips_lost: bool
    ) -> Iterator[SourceBatch]:
        """Yields the piece's batches in ascending order.
        Raises MessagesExpired, NotConnected, LogDamaged.
        """
        return ServerPieceReader(self._masters, piece, selection, skips_lost=skips_lost).read()

    def close(self) -> None:
        self._masters.close()
        self.metadata.close()


def _keys(subject: str, routes: Routes) -> list[QueueKey]:
    return [
        QueueKey(subject, each.number, each.broker_group) for each in routes.partitions.values()
    ]


def _queues(
    found: Mapping[QueueKey, wire.Fetched], sealed: Mapping[int, int] | None = None
) -> dict[QueueKey, SourceQueue]:
    """The queues for the topology. A sealed queue ends at its command message, even if an earlier
    answer named another end.
    """
    queues: dict[QueueKey, SourceQueue] = {}
    for key, numbers in found.items():
        end, is_sealed = numbers.end_sequence, numbers.is_sealed
        if sealed is not None and key.partition in sealed:
            end, is_sealed = sealed[key.partition], True
        queues[key] = SourceQueue(
            key,
            min(numbers.start_sequence, end),
            end,
            numbers.stored_bytes,
            numbers.last_append_ms,
            is_sealed,
        )
    return queues


def _ask_numbers(
    channel: BlockingConnection, keys: list[QueueKey], report: ReaderReport | None
) -> list[wire.Fetched]:
    """Send all requests without waiting for answers, which arrive in the same order."""
    for key in keys:
        channel.send(FrameKind.FETCH, numbers_of(key, report=report).pack())
    return [wire.unpack_fetched(channel.receive().payload)[0] for _ in keys]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Metaservers as a comma-separated list of "host:port". `retry_ms`: how long to retry a server
    that does not answer. `first_ms`: the same for a driver's first question (default: the same).
    """

    servers: str
    retry_ms: int = RETRY_MS
    answer_s: float = ANSWER_S
    first_ms: int | None = None

    def open(self) -> ServerLog:
        """Open the log in this process, without calling a server yet. Raises InvalidArgument."""
        return ServerLog(Metadata(self.servers, self.retry_ms, self.first_ms), self.answer_s)


# --- action logs ----------------------------------------------------------------------------------

READ_BYTES: Final = 4 * limits.MIB
_ACTIONS_LOG: Final = 1


def action_groups(address: ServerAddress) -> list[str]:
    """The broker groups without the delay groups. Raises NotConnected, InvalidArgument."""
    metadata = Metadata(address.servers, address.retry_ms)
    try:
        return sorted(group.broker_group for group in metadata.cluster() if not group.is_delay)
    finally:
        metadata.close()


def committed_actions(
    address: ServerAddress, broker_group: str
) -> Iterator[tuple[Envelope, bytes]]:
    """Yields all committed entries of the group's action log, oldest first: kinds ACTIONS and
    SNAPSHOT, with their regions (`unwrap` them).

    It ends at the log's end at the time of the last read.

    Raises:
        InvalidArgument: there is no such group.
        NotConnected: its master was not found for `retry_ms`.
        LogDamaged: a checksum is wrong.
        MessagesExpired: retention deleted entries that were not yet read; start again.
    """
    metadata = Metadata(address.servers, address.retry_ms)
    try:
        position = 0
        while True:
            answer = _read(metadata, broker_group, position)
            if position and answer.position != position:
                raise MessagesExpired(
                    f"retention deleted the action log of {broker_group} at {position} while "
                    "it was read: read again"
                )
            if not answer.entries:
                return
            yield from _entries(answer.entries, broker_group)
            position = answer.position + len(answer.entries)
    finally:
        metadata.close()


def _read(metadata: Metadata, group: str, position: int) -> pb.ReadLogResponse:
    request = pb.ReadLogRequest(
        log=_ACTIONS_LOG, position=position, bytes_max=READ_BYTES, only_committed=True
    )

    def once() -> pb.ReadLogResponse:
        found: pb.ReadLogResponse = metadata.control(*_master(metadata, group), "ReadLog", request)
        return found

    return patiently(once, metadata.retry_ms)


def _master(metadata: Metadata, name: str) -> tuple[str, str, str]:
    """The control address of the group's master, the group and the master.
    Raises NotConnected, InvalidArgument.
    """
    groups = {group.broker_group: group for group in metadata.cluster()}
    if name not in groups:
        raise InvalidArgument(
            f"there is no broker group {name!r}: there are {', '.join(sorted(groups)) or 'none'}"
        )
    for replica in groups[name].replicas:
        if replica.replica == groups[name].master:
            return replica.control_address, name, replica.replica
    raise NotConnected(f"broker group {name!r} has no master at the moment")


def _entries(data: bytes, group: str) -> Iterator[tuple[Envelope, bytes]]:
    at = 0
    while at < len(data):
        try:
            envelope = parse_envelope(data, at)
            region = data[at + ENVELOPE_BYTES : at + envelope.total_bytes]
            check_region(region, envelope.region_crc)
        except CorruptBatch as cause:
            raise LogDamaged(
                f"an entry of the action log of {group} arrived damaged: {cause.message}"
            ) from cause
        if envelope.kind in (Kind.ACTIONS, Kind.SNAPSHOT):
            yield envelope, region
        at += envelope.total_bytes
