"""The corpus: for each target inputs that take different ways through the code, one a line, in base64; and how many inputs were tried.

Inputs that fuzzing begins with: the golden files, and requests as clients make them.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final

import msgspec
from qmq_replication.history import EpochRun
from qmq_replication.links import PeerHello, ProofStep
from qmq_replication.ready import Ack, Append, LogReset, Mismatch, Probe, ProbeReply, Promise, PromiseRequest, Refusal, TakeOver

from qmq.backup.manifest import encode_items
from qmq.delay import schedule
from qmq.delay.dispatch_log import DispatchMark, encode_record
from qmq.delay.schedule import ScheduleState
from qmq.log.envelopes import unwrap, walk_bytes
from qmq.log.follower import pack_runs
from qmq.log.recent_writes import WriteRun
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.batch import ENVELOPE_BYTES

FOLDER: Final = Path(__file__).parent / "corpus"
COUNTS: Final = FOLDER / "counts.json"
TARGET_BYTES_MAX: Final = 40 << 10
"""The limit for the inputs of one target. The longest inputs are left out."""


def inputs_of(target: str) -> list[bytes]:
    """The kept inputs of a target."""
    path = FOLDER / f"{target}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


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
    log, actions = (_entries((GOLDEN / name).read_bytes()) for name in ("message.log", "action.log"))
    resource = api.Resource(name="orders", resource_namespace="shop")
    system = api.SystemProperties(message_id="0", tag="late", keys=["a", "b"], message_group="g", message_type=api.FIFO)
    message = api.Message(topic=resource, body=b"hello", system_properties=system, user_properties={"a": "b"})
    settings = api.Settings(
        client_type=api.SIMPLE_CONSUMER,
        publishing=api.Publishing(topics=[resource]),
        subscription=api.Subscription(group=resource, subscriptions=[api.SubscriptionEntry(topic=resource)]),
    )
    subject = pb.SubjectSettings(name="orders", broker_groups=["a", "b"], order="strict", fencing="lease", flush="default", retention_ms=1)
    return {
        "frames": [bytes((size,)) + (GOLDEN / "frames.bin").read_bytes() for size in (0, 7, 255)],
        "replica_messages": _replica_messages(),
        "runs": [b"".join(pack_runs([WriteRun(0, 0, 0, sum(map(len, log)), tuple(log))]))],
        "handshakes": [PeerHello("g", "a", "b", "00").pack(), ProofStep("00", "11").pack()],
        "backed_up_items": [encode_items({"/qmq/a": b"1", "/qmq/b": b""})],
        "dispatch_logs": [encode_record(DispatchMark.DELIVERED, bytes(8))[4:]],
        "schedule_marks": [msgspec.msgpack.encode(ScheduleState(schedule.VERSION, 60_000, 1, 0, 1, b"\x90", b"", b"", {"a": 1}))],
        "logs": [(GOLDEN / "message.log").read_bytes()],
        "batches": log,
        "regions": [each[ENVELOPE_BYTES:] for each in log],
        "actions": [unwrap(each[ENVELOPE_BYTES:]) for each in actions],
        "checked_files": [bytes((number,)) + (GOLDEN / "committed.qmm").read_bytes()[8:] for number in range(6)],
        "sends": [calls.SendMessageRequest(messages=[message]).SerializeToString()],
        "settings": [settings.SerializeToString()],
        "subjects": [subject.SerializeToString()],
        "texts": [bytes((number,)) + each.encode() for number, each in enumerate(_TEXTS)],
        "filters": [b"Ta || b", b"Sprice BETWEEN 1 AND 2.5 AND (name IS NOT NULL OR NOT tag IN ('a', 'b'))"],
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
    return [each.head + each.region for each in walk_bytes(lambda at, size: data[at : at + size], 0, lambda: len(data))]
