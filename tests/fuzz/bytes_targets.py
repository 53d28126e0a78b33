"""Targets that read what is on the wire or in files. Checksums are put right first, or an input would hardly ever come behind one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from struct import Struct
from typing import Any, Final

import msgspec
from google_crc32c import value as crc32c
from qmq_replication import wire as replica_wire
from qmq_replication.links import PeerHello, ProofStep

from qmq.backup.cluster_items import decode_items
from qmq.backup.manifest import decode_manifest as decode_backup_manifest
from qmq.delay import schedule
from qmq.delay.dispatch_log import decode_records
from qmq.errors import QmqError
from qmq.log import checkpoint, command_messages, commit_mark
from qmq.log.actions import decode_actions
from qmq.log.envelopes import unwrap, walk_bytes
from qmq.log.follower import check_stretch, unpack_runs
from qmq.log.segment_index import UNREADABLE, decode_index, with_checksum
from qmq.tiering.segment_catalog import decode_catalog
from qmq.tiering.stored_segment import BadManifest
from qmq.tiering.stored_segment import decode_manifest as decode_segment_manifest
from qmq.wire import frame_payloads
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Envelope
from qmq.wire.batch_columns import check_region
from qmq.wire.frame import FrameReader

PAYLOADS: Final[tuple[Callable[[bytes], Any], ...]] = (
    frame_payloads.Hello.unpack,
    frame_payloads.Reauth.unpack,
    frame_payloads.Welcome.unpack,
    frame_payloads.Attach.unpack,
    frame_payloads.Attached.unpack,
    frame_payloads.Fetch.unpack,
    frame_payloads.Find.unpack,
    frame_payloads.FoundBatches.unpack,
    frame_payloads.LaneAttach.unpack,
    frame_payloads.LaneAttached.unpack,
    frame_payloads.unpack_lane_pull,
    frame_payloads.unpack_lane_delivery,
    frame_payloads.unpack_lane_settle,
    frame_payloads.unpack_produced,
    frame_payloads.unpack_one_produced,
    frame_payloads.unpack_pull,
    frame_payloads.unpack_delivery,
    frame_payloads.unpack_fetched,
    frame_payloads.unpack_session,
    frame_payloads.unpack_detach,
    frame_payloads.unpack_error,
    frame_payloads.unpack_settle,
    frame_payloads.unpack_begun,
    frame_payloads.unpack_settled,
)
"""The first byte of an input chooses one."""


_REPLICA_HEAD: Final = Struct("<BII")


def frames(data: bytes) -> None:
    """A stream of frames, in pieces: the first byte says how long."""
    reader, piece, at = FrameReader(buffer_bytes=4_096), (data[0] if data else 0) + 1, 1
    with suppress(QmqError):
        while at < len(data):
            buffer = reader.get_buffer()
            part = data[at : at + min(piece, len(buffer))]
            buffer[: len(part)] = part
            at += len(part)
            for frame in reader.received(len(part)):
                bytes(frame.payload)


def payloads(data: bytes) -> None:
    """The payloads of frames."""
    with suppress(QmqError):
        PAYLOADS[(data[0] if data else 0) % len(PAYLOADS)](data[1:])


def replica_messages(data: bytes) -> None:
    """Messages between replicas. The first two bytes give the length of the head and the kind of message."""
    if len(data) < 2:
        return
    number, head, rest = data[1] % 12, data[2 : 2 + data[0]], data[2 + data[0] :]
    start = _REPLICA_HEAD.pack(number, len(head), crc32c(bytes((number,)) + head))
    with suppress(QmqError):
        replica_wire.unpack(memoryview(start + head + rest))


def runs(data: bytes) -> None:
    """Entries that a master sends."""
    with suppress(QmqError):
        found = unpack_runs(data)
        check_stretch(found, 0, 10)


def handshakes(data: bytes) -> None:
    """The proofs in handshakes between replicas."""
    for kind in (PeerHello, ProofStep):
        with suppress(QmqError):
            kind.unpack(memoryview(data))


def _read_all(view: BatchView) -> None:
    reads = (
        lambda: view.subject,
        view.bodies,
        view.keys,
        view.logical_partitions,
        view.tags,
        view.tag_hashes,
        view.headers,
        view.create_times_ms,
        view.due_times_ms,
        view.message_ids,
    )
    for read in reads:
        with suppress(QmqError):
            read()


def batches(data: bytes) -> None:
    """Whole batches, as they are."""
    with suppress(QmqError):
        _read_all(BatchView.parse(data))


def regions(data: bytes) -> None:
    """A producer's batch, with a correct checksum."""
    with suppress(QmqError):
        check_region(data, crc32c(data))
        _read_all(BatchView(Envelope(0, ENVELOPE_BYTES + len(data), crc32c(data), 1, 1, 1, 1, 1), data))
    with suppress(QmqError):
        command_messages.read(data, 7)


def logs(data: bytes) -> None:
    """A segment of a log."""
    with suppress(QmqError):
        for _ in walk_bytes(lambda at, size: data[at : at + size], 0, lambda: len(data)):
            pass


def actions(data: bytes) -> None:
    """Entries of the action log."""
    with suppress(QmqError):
        decode_actions(data)
    with suppress(QmqError):
        unwrap(data)


def checked_files(data: bytes) -> None:
    """Small files with magic bytes and a checksum, the first byte says which: each as it is, and with both put right."""
    if not data:
        return
    magic, decode = CHECKED[data[0] % len(CHECKED)]
    for each in (data[1:], with_checksum(magic, data[1:])):
        with suppress(QmqError, BadManifest):
            decode(each)


def dispatch_logs(data: bytes) -> None:
    """Records of a dispatch log, the first with its checksum."""
    for each in (data, crc32c(data).to_bytes(4, "little") + data):
        with suppress(QmqError):
            for _ in decode_records(each):
                pass


def schedule_marks(data: bytes) -> None:
    """The state of a schedule."""
    with suppress(QmqError):
        try:
            state = msgspec.msgpack.decode(data)
        except UNREADABLE:
            return
        schedule.restore(60_000, state)


def backed_up_items(data: bytes) -> None:
    """The coordination store's keys in a backup."""
    with suppress(QmqError):
        decode_items(data)


def _manifest_of_backup(data: bytes) -> object:
    return decode_backup_manifest("20270101T000000Z", data)


CHECKED: Final[tuple[tuple[bytes, Callable[[bytes], object]], ...]] = (
    (b"QMC1", checkpoint.decode),
    (b"QMM1", commit_mark.decode),
    (b"QMX1", decode_index),
    (b"QMT1", decode_catalog),
    (b"QMG1", decode_segment_manifest),
    (b"QMK1", _manifest_of_backup),
)
BYTES_TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    each.__name__: each
    for each in (
        frames,
        payloads,
        replica_messages,
        runs,
        handshakes,
        batches,
        regions,
        logs,
        actions,
        checked_files,
        backed_up_items,
        dispatch_logs,
        schedule_marks,
    )
}
