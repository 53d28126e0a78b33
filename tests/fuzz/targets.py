"""Targets that read what is on the wire or in files. Checksums are put right first, or an input
would hardly ever come behind one.

Targets that read requests: gRPC of RocketMQ's clients and of the administration, texts, and the
command line's arguments.

The fuzz targets by name. A target accepts any bytes and must not raise. A target catches the errors
that its callers expect: QmqError, the gateway's Refused, usage errors of the command line.

The corpus: for each target inputs that take different ways through the code, one a line, in base64;
and how many inputs were tried.

Inputs that fuzzing begins with: the golden files, and requests as clients make them.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, Final

import msgspec
import typer
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c
from qmq_coordination.etcd.channel import parse_endpoint
from qmq_replication import wire as replica_wire
from qmq_replication.history import EpochRun
from qmq_replication.links import PeerHello, ProofStep
from qmq_replication.ready import (
    Ack,
    Append,
    LogReset,
    Mismatch,
    Probe,
    ProbeReply,
    Promise,
    PromiseRequest,
    Refusal,
    TakeOver,
)
from typer._click.exceptions import ClickException

from qmq.backup.manifest import decode_items, encode_items
from qmq.backup.manifest import decode_manifest as decode_backup_manifest
from qmq.cli.app import app
from qmq.cli.arguments import parse_delays, parse_duration, parse_when
from qmq.cli.output import CommandGroup
from qmq.delay import recurrence, schedule
from qmq.delay.admin import ListMark
from qmq.delay.buckets import DispatchMark, decode_records, encode_record
from qmq.delay.schedule import ScheduleState
from qmq.errors import QmqError
from qmq.gateway.config import check_client_type, settings_for_consumer, settings_for_producer
from qmq.gateway.filters import filter_of_request
from qmq.gateway.messages import group_of_resource, message_from_client, subject_of_topic
from qmq.gateway.sending import parse_recall_handle
from qmq.gateway.status import Refused
from qmq.log import checkpoint, command_messages, commit_mark
from qmq.log.actions import decode_actions
from qmq.log.envelopes import walk_bytes
from qmq.log.follower import check_stretch, pack_runs, unpack_runs
from qmq.log.recent_writes import WriteRun
from qmq.log.segment_index import UNREADABLE, decode_index, with_checksum
from qmq.meta.access import kind_of, operation_of
from qmq.model import DelayedId, GroupSettings, MessageId, check_client, check_group, check_name
from qmq.operations.text import parse_key
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.v1 import meta_pb2 as pb
from qmq.security.access_rules import check_pattern, check_principal_pattern
from qmq.security.principal import Principal
from qmq.tiering.stored_segment import BadManifest, decode_catalog
from qmq.tiering.stored_segment import decode_manifest as decode_segment_manifest
from qmq.wire import frame_payloads
from qmq.wire.batch import ENVELOPE_BYTES, BatchView, Envelope, unwrap
from qmq.wire.batch_columns import check_region
from qmq.wire.frame import FrameReader
from qmq.wire.subject_settings import config_of

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
    """Messages between replicas. The first two bytes give the length of the head and the kind of
    message.
    """
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
        _read_all(
            BatchView(Envelope(0, ENVELOPE_BYTES + len(data), crc32c(data), 1, 1, 1, 1, 1), data)
        )
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
    """Small files with magic bytes and a checksum, the first byte says which: each as it is, and
    with both put right.
    """
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


BODY_BYTES_MAX: Final = 1 << 20
TEXTS: Final[tuple[Callable[[str], Any], ...]] = (
    parse_duration,
    parse_delays,
    parse_when,
    parse_key,
    parse_recall_handle,
    MessageId.parse,
    DelayedId.parse,
    ListMark.parse,
    Principal.parse,
    check_principal_pattern,
    check_client,
    check_group,
    operation_of,
    kind_of,
    lambda text: check_name("subject", text),
    lambda text: check_pattern("subject", text),
    lambda text: parse_endpoint(text, has_tls_files=False),
    lambda text: recurrence.check(text, "Europe/Berlin"),
    lambda text: recurrence.check("0 9 * * *", text),
)
"""The first byte of an input chooses one."""


def texts(data: bytes) -> None:
    """Texts that people and clients write: durations, times, ids, keys, patterns."""
    with suppress(QmqError):
        TEXTS[(data[0] if data else 0) % len(TEXTS)](data[1:].decode(errors="replace"))


def filters(data: bytes) -> None:
    """A subscription's filter: tags, or SQL92, as the first byte says."""
    kind = api.SQL if data[:1] == b"S" else api.TAG
    with suppress(Refused):
        filter_of_request(
            api.FilterExpression(type=kind, expression=data[1:].decode(errors="replace"))
        )


def sends(data: bytes) -> None:
    """Messages that RocketMQ's clients send."""
    with suppress(DecodeError):
        for message in calls.SendMessageRequest.FromString(data).messages:
            with suppress(QmqError, Refused):
                message_from_client(message, BODY_BYTES_MAX)


def settings(data: bytes) -> None:
    """The settings that RocketMQ's clients send."""
    with suppress(DecodeError):
        told = api.Settings.FromString(data)
        for read in (
            lambda: check_client_type(told.client_type),
            lambda: settings_for_producer(told, BODY_BYTES_MAX),
            lambda: settings_for_consumer(told, GroupSettings(), is_fifo=True),
            lambda: [subject_of_topic(each) for each in told.publishing.topics],
            lambda: [
                filter_of_request(each.expression) for each in told.subscription.subscriptions
            ],
            lambda: group_of_resource(told.subscription.group),
        ):
            with suppress(QmqError, Refused):
                read()


def subjects(data: bytes) -> None:
    """Settings of a subject that an operator asks for."""
    with suppress(DecodeError, QmqError):
        config_of(pb.SubjectSettings.FromString(data))


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def arguments(data: bytes) -> None:
    """Arguments of the command line, separated by line ends. The command is parsed but does not
    run.
    """
    words = data.decode(errors="replace").split("\n")
    with (
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
        suppress(ClickException, typer.Exit, typer.Abort, QmqError),
    ):
        command, context = _command(), None
        name = "qmq"
        while True:
            context = command.make_context(name, words, parent=context)
            if not isinstance(command, CommandGroup):
                return
            words = [*context._protected_args, *context.args]
            if not words:  # as after "--": no command is named
                return
            found_name, found, words = command.resolve_command(context, words)
            if found is None:
                return
            name, command = found_name or "", found


REQUEST_TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    each.__name__: each for each in (texts, filters, sends, settings, subjects, arguments)
}


Target = Callable[[bytes], None]
TARGETS: Final[Mapping[str, Target]] = {**BYTES_TARGETS, **REQUEST_TARGETS}


FOLDER: Final = Path(__file__).parent / "corpus"
COUNTS: Final = FOLDER / "counts.json"
TARGET_BYTES_MAX: Final = 40 << 10
"""The limit for the inputs of one target. The longest inputs are left out."""


def inputs_of(target: str) -> list[bytes]:
    """The kept inputs of a target."""
    path = FOLDER / f"{target}.txt"
    return (
        [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []
    )


def keep(target: str, inputs: list[bytes]) -> None:
    """Replace the inputs of a target, shortest first."""
    lines, size = [], 0
    for each in sorted(set(inputs), key=lambda each: (len(each), each)):
        line = base64.b64encode(each).decode()
        size += len(line) + 1
        if size > TARGET_BYTES_MAX:
            break
        lines.append(line + "\n")
    (FOLDER / f"{target}.txt").write_text("".join(lines))


def counts() -> dict[str, int]:
    """How many inputs each target was given, over all runs of tools/run fuzz."""
    return dict(json.loads(COUNTS.read_text())) if COUNTS.exists() else {}


def add_count(target: str, tried: int) -> None:
    """Add the inputs of one run."""
    found = counts()
    found[target] = found.get(target, 0) + tried
    COUNTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


GOLDEN: Final = Path(__file__).parents[1] / "golden"
_TEXTS: Final = (
    "1h30m",
    "1s,5s,1m",
    "2027-01-01T09:00:00+01:00",
    "0x00ff",
    "0 9 * * 1-5",
    "Europe/Berlin",
    "https://etcd-1:2379",
    "user:alice",
    "orders.*",
    "1a1fc9507d2e86db-0-0",
)
_LINES: Final = (
    "produce\norders\nhello\n--key\nk",
    "consume\norders\n--group\nbilling\n--count\n10",
    "route\nsplit\norders\n3\n--wait",
    "subject\ncreate\norders\n--order\nstrict\n--retention\n2d",
    "delay\nlist\norders\n--from\n2027-01-01T09:00:00Z",
    "backup\nverify\n--help",
)


def seeds_of(target: str) -> list[bytes]:
    """The first inputs of a target. Some targets have none."""
    log, actions = (
        _entries((GOLDEN / name).read_bytes()) for name in ("message.log", "action.log")
    )
    resource = api.Resource(name="orders", resource_namespace="shop")
    system = api.SystemProperties(
        message_id="0", tag="late", keys=["a", "b"], message_group="g", message_type=api.FIFO
    )
    message = api.Message(
        topic=resource, body=b"hello", system_properties=system, user_properties={"a": "b"}
    )
    settings = api.Settings(
        client_type=api.SIMPLE_CONSUMER,
        publishing=api.Publishing(topics=[resource]),
        subscription=api.Subscription(
            group=resource, subscriptions=[api.SubscriptionEntry(topic=resource)]
        ),
    )
    subject = pb.SubjectSettings(
        name="orders",
        broker_groups=["a", "b"],
        order="strict",
        fencing="lease",
        flush="default",
        retention_ms=1,
    )
    return {
        "frames": [bytes((size,)) + (GOLDEN / "frames.bin").read_bytes() for size in (0, 7, 255)],
        "replica_messages": _replica_messages(),
        "runs": [b"".join(pack_runs([WriteRun(0, 0, 0, sum(map(len, log)), tuple(log))]))],
        "handshakes": [PeerHello("g", "a", "b", "00").pack(), ProofStep("00", "11").pack()],
        "backed_up_items": [encode_items({"/qmq/a": b"1", "/qmq/b": b""})],
        "dispatch_logs": [encode_record(DispatchMark.DELIVERED, bytes(8))[4:]],
        "schedule_marks": [
            msgspec.msgpack.encode(
                ScheduleState(schedule.VERSION, 60_000, 1, 0, 1, b"\x90", b"", b"", {"a": 1})
            )
        ],
        "logs": [(GOLDEN / "message.log").read_bytes()],
        "batches": log,
        "regions": [each[ENVELOPE_BYTES:] for each in log],
        "actions": [unwrap(each[ENVELOPE_BYTES:]) for each in actions],
        "checked_files": [
            bytes((number,)) + (GOLDEN / "committed.qmm").read_bytes()[8:] for number in range(6)
        ],
        "sends": [calls.SendMessageRequest(messages=[message]).SerializeToString()],
        "settings": [settings.SerializeToString()],
        "subjects": [subject.SerializeToString()],
        "texts": [bytes((number,)) + each.encode() for number, each in enumerate(_TEXTS)],
        "filters": [
            b"Ta || b",
            b"Sprice BETWEEN 1 AND 2.5 AND (name IS NOT NULL OR NOT tag IN ('a', 'b'))",
        ],
        "arguments": [each.encode() for each in _LINES],
    }.get(target, [])


def _replica_messages() -> list[bytes]:
    place = [0, 0]
    messages = (
        Probe(1),
        ProbeReply(1, "a", True, 1, 1, True),
        PromiseRequest(1),
        Promise(1, 1, 1, True),
        Append(1, 1, 1, 1, (), 1, 1, False, None),
        Ack(1, 1, 1, 1, place),
        Mismatch(1, 1, 1, 0, 0, (EpochRun(1, 1),), place),
        LogReset(1, 1, 1, 1, place, 1),
        Refusal(2),
        TakeOver(1),
    )
    heads = [msgspec.msgpack.encode(each) for each in messages]
    return [bytes((len(head), number)) + head for number, head in enumerate(heads)]


def _entries(data: bytes) -> list[bytes]:
    return [
        each.head + each.region
        for each in walk_bytes(lambda at, size: data[at : at + size], 0, lambda: len(data))
    ]
