"""Converts RocketMQ's messages, names and bodies to QMQ's, and QMQ's to RocketMQ's. Pure.

    RocketMQ              QMQ
    topic                 subject
    message group         key of an ordered subject
    tag                   tag
    keys                  header `rocketmq-keys`, with spaces between them; the first is the key, if
                          the subject is unordered
    user properties       headers of the same names
    message id            header `rocketmq-id`
    message type          header `rocketmq-type`
    delivery timestamp    due time of a delayed message; header `rocketmq-due-ms`
    trace context         header `traceparent`
    born host             header `rocketmq-born-host`
    recovery duration     header `rocketmq-check-after-ms`, of a transaction

A message without a group, on an ordered subject, has its message id as the key: such messages
spread over all partitions, and none waits for another. A message of QMQ's own clients has none of
the `rocketmq-` headers: its id is QMQ's, its key is its message group (ordered) or its one key, and
its born timestamp is its create time.

Names of topics and consumer groups:

    topic `orders`                        subject `orders`
    topic `orders` of namespace `shop`    subject `shop.orders`

The name of a RocketMQ topic has no dot, so the dot separates the namespace. The same applies to
names of groups.

The gateway decompresses a body before it stores it, so that every kind of consumer can read it, and
QMQ compresses the whole batch. Delivered bodies are not compressed and have an MD5 digest, because
all clients write this digest in the same way (some write leading zeros of a CRC-32, others do not).
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from qmq import limits
from qmq.client.consuming.message import StoredMessage
from qmq.client.producing.delayed import DelayedMessage, time_ms
from qmq.errors import InvalidName
from qmq.gateway.status import Refused
from qmq.model import PREFIX, check_name
from qmq.process.event_loop import TIME_MS_MAX, TIME_MS_MIN
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.text import whole_number

SEPARATOR: Final = "."


def subject_of_topic(topic: api.Resource) -> str:
    """The QMQ subject of a topic. Raises Refused."""
    try:
        return _joined("subject", topic)
    except InvalidName as failure:
        raise Refused(api.ILLEGAL_TOPIC, failure.message) from failure


def group_of_resource(group: api.Resource) -> str:
    """The QMQ name of a consumer group. Raises Refused."""
    try:
        return _joined("group", group)
    except InvalidName as failure:
        raise Refused(api.ILLEGAL_CONSUMER_GROUP, failure.message) from failure


def name_of(kind: Any, number: int) -> str:
    """The name of a value of an enum of RocketMQ's protocol; the number itself if this release does
    not know it.
    """
    return str(kind.Name(number)) if number in kind.values() else str(number)


def _joined(kind: str, resource: api.Resource) -> str:
    parts = [each for each in (resource.resource_namespace, resource.name) if each]
    return check_name(kind, SEPARATOR.join(parts) if resource.name else "")


def topic_of_subject(subject: str) -> api.Resource:
    """The inverse of `subject_of_topic`."""
    namespace, _, name = subject.rpartition(SEPARATOR)
    return api.Resource(resource_namespace=namespace, name=name)


_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
"""zlib detects the header, gzip's or zlib's:
older clients send the one, newer clients the other.
"""


def check_digest(body: bytes, digest: api.Digest) -> None:
    """Raises Refused if the body is not what its sender computed the digest of."""
    told = digest.checksum.strip().upper()
    if not told or digest.type == api.DIGEST_TYPE_UNSPECIFIED:
        return
    if digest.type == api.CRC32:
        is_right = told.lstrip("0") == f"{zlib.crc32(body):X}".lstrip("0")
    elif digest.type == api.MD5:
        is_right = told == _md5(body)
    else:
        is_right = told == hashlib.sha1(body, usedforsecurity=False).hexdigest().upper()
    if not is_right:
        raise Refused(
            api.MESSAGE_CORRUPTED,
            (
                f"the body does not have the {name_of(api.DigestType, digest.type)} digest "
                f"{told}: send it again"
            ),
        )


def digest_of(body: bytes) -> api.Digest:
    """The MD5 digest that a consumer receives with the body."""
    return api.Digest(type=api.MD5, checksum=_md5(body))


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest().upper()


def plain_body(body: bytes, encoding: api.Encoding.ValueType, body_bytes_max: int) -> bytes:
    """Decompresses the body that a client sent. Raises Refused for an unknown encoding, a broken
    body, or more than `body_bytes_max`.
    """
    if encoding != api.GZIP:
        return body
    unpacker = zlib.decompressobj(_ANY_HEADER)
    try:
        found = unpacker.decompress(body, body_bytes_max + 1)
    except zlib.error as failure:
        raise Refused(
            api.MESSAGE_CORRUPTED,
            f"the body cannot be decompressed, although its encoding is GZIP: {failure}",
        ) from failure
    if len(found) > body_bytes_max:
        raise Refused(
            api.MESSAGE_BODY_TOO_LARGE,
            (
                f"the body has more than {body_bytes_max} bytes when it is decompressed: send a "
                "smaller one"
            ),
        )
    if not unpacker.eof:
        raise Refused(api.MESSAGE_CORRUPTED, "the compressed body ends too early: send it again")
    return found


OURS: Final = "rocketmq-"
ID: Final = "rocketmq-id"
KEYS: Final = "rocketmq-keys"
TYPE: Final = "rocketmq-type"
DUE_MS: Final = "rocketmq-due-ms"
BORN_HOST: Final = "rocketmq-born-host"
CHECK_AFTER_MS: Final = "rocketmq-check-after-ms"
TRACE: Final = "traceparent"
KEY_SEPARATOR: Final = " "
PROPERTIES_MAX: Final = 128
PROPERTY_BYTES_MAX: Final = 16 * 1024
"""RocketMQ's own limits for the properties of an application."""
RESERVED: Final = frozenset(
    (
        *(
            "KEYS",
            "TAGS",
            "WAIT",
            "DELAY",
            "RETRY_TOPIC",
            "REAL_TOPIC",
            "REAL_QID",
            "TRAN_MSG",
            "PGROUP",
            "MIN_OFFSET",
        ),
        *(
            "MAX_OFFSET",
            "BUYER_ID",
            "ORIGIN_MESSAGE_ID",
            "TRANSFER_FLAG",
            "CORRECTION_FLAG",
            "MQ2_FLAG",
            "RECONSUME_TIME",
        ),
        *(
            "MSG_REGION",
            "UNIQ_KEY",
            "MAX_RECONSUME_TIMES",
            "CONSUME_START_TIME",
            "INSTANCE_ID",
            "CORRELATION_ID",
            "REPLY_TO_CLIENT",
        ),
        *(
            "TTL",
            "ARRIVE_TIME",
            "PUSH_REPLY_TIME",
            "CLUSTER",
            "MSG_TYPE",
            "__SHARDINGKEY",
            "__transactionId__",
        ),
    )
)
"""Names of properties that RocketMQ sets itself, and refuses from applications."""
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f]")

PLAIN_TYPES: Final = (api.NORMAL, api.DELAY, api.TRANSACTION)
"""The message types that an unordered subject accepts."""
ORDERED_TYPES: Final = (api.NORMAL, api.FIFO, api.DELAY, api.TRANSACTION)
"""The message types that an ordered subject accepts."""
_TYPES: Final = dict(api.MessageType.items())


@dataclass(frozen=True, slots=True)
class TopicMessage:
    """A message on its way from a client to QMQ. `due_ms` is in milliseconds since 1970; it is None
    for a message without delay.
    """

    subject: str
    body: bytes
    message_id: str
    kind: api.MessageType.ValueType
    group: str
    """The message group; "" for none."""
    keys: tuple[str, ...]
    tag: str
    due_ms: int | None
    headers: Mapping[str, str]

    def key(self, *, is_ordered: bool) -> str | None:
        """The message's key in QMQ."""
        if is_ordered:
            return self.group or self.message_id
        return self.keys[0] if self.keys else None


def message_from_client(message: api.Message, body_bytes_max: int) -> TopicMessage:
    """Convert a message that a client sent. Raises Refused."""
    system = message.system_properties
    if not system.message_id:
        raise Refused(
            api.ILLEGAL_MESSAGE_ID, "the message has no id: clients give each message one"
        )
    check_digest(message.body, system.body_digest)
    due_ms = (
        _milliseconds(system.delivery_timestamp) if system.HasField("delivery_timestamp") else None
    )
    kind = _kind_of(system, is_delayed=due_ms is not None)
    _check_tag(system)
    for each in system.keys:
        if (
            not each
            or KEY_SEPARATOR in each
            or _CONTROLS.search(each)
            or len(each.encode()) > limits.KEY_BYTES_MAX
        ):
            raise Refused(
                api.ILLEGAL_MESSAGE_KEY,
                (
                    f"a message key has 1 to {limits.KEY_BYTES_MAX} bytes, without spaces and "
                    "control characters"
                ),
            )
    return TopicMessage(
        subject_of_topic(message.topic),
        plain_body(message.body, system.body_encoding, body_bytes_max),
        system.message_id,
        kind,
        system.message_group,
        tuple(system.keys),
        system.tag,
        due_ms,
        _headers_of(message, kind, due_ms),
    )


def _check_tag(system: api.SystemProperties) -> None:
    tag = system.tag
    if not system.HasField("tag"):
        return
    if (
        not tag.strip()
        or "|" in tag
        or _CONTROLS.search(tag)
        or len(tag.encode()) > limits.TAG_BYTES_MAX
    ):
        raise Refused(
            api.ILLEGAL_MESSAGE_TAG,
            (
                f"a tag has 1 to {limits.TAG_BYTES_MAX} bytes, without `|` and control "
                "characters, and is not blank"
            ),
        )


def _kind_of(system: api.SystemProperties, *, is_delayed: bool) -> api.MessageType.ValueType:
    """The message's type. If the client leaves the type out,
    it follows from the message's other fields.
    """
    found = system.message_type
    if found == api.MESSAGE_TYPE_UNSPECIFIED:
        found = api.FIFO if system.message_group else api.DELAY if is_delayed else api.NORMAL
    if found not in ORDERED_TYPES:
        raise Refused(
            api.UNSUPPORTED,
            (
                f"messages of type {name_of(api.MessageType, found)} are not supported: "
                "docs/ROCKETMQ.md lists the types"
            ),
        )
    is_timed = found == api.DELAY or (found == api.FIFO and is_delayed)
    if (found == api.FIFO) != bool(system.message_group) or is_timed != is_delayed:
        what = (
            f"type {api.MessageType.Name(found)}, message group {system.message_group!r}, "
            f"{'a' if is_delayed else 'no'} delivery timestamp"
        )
        raise Refused(api.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, f"these cannot be combined: {what}")
    return found


def _headers_of(
    message: api.Message, kind: api.MessageType.ValueType, due_ms: int | None
) -> dict[str, str]:
    system, properties = message.system_properties, message.user_properties
    for name in properties:
        if (
            name.startswith((OURS, PREFIX))
            or not name
            or name in RESERVED
            or _CONTROLS.search(name)
        ):
            raise Refused(
                api.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"the property {name[:64]!r}: RocketMQ's own names, "
                f"those that begin with {OURS!r} or {PREFIX!r}, "
                "empty ones and those with control characters are not for applications",
            )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if len(properties) > PROPERTIES_MAX or size > PROPERTY_BYTES_MAX:
        raise Refused(
            api.MESSAGE_PROPERTIES_TOO_LARGE,
            (
                f"{len(properties)} properties of {size} bytes: a message has at most "
                f"{PROPERTIES_MAX}, of {PROPERTY_BYTES_MAX} bytes together"
            ),
        )
    found = {**message.user_properties, ID: system.message_id, TYPE: api.MessageType.Name(kind)}
    if system.keys:
        found[KEYS] = KEY_SEPARATOR.join(system.keys)
    if system.born_host:
        found[BORN_HOST] = system.born_host
    if due_ms is not None:
        found[DUE_MS] = str(due_ms)
    if system.trace_context and TRACE not in found:
        found[TRACE] = system.trace_context
    if kind == api.TRANSACTION and system.HasField("orphaned_transaction_recovery_duration"):
        found[CHECK_AFTER_MS] = str(length_ms(system.orphaned_transaction_recovery_duration))
    return found


def message_for_client(
    stored: StoredMessage,
    topic: api.Resource,
    *,
    is_ordered: bool,
    handle: str = "",
    invisible_ms: int = 0,
) -> api.Message:
    """Convert a stored message for a consumer."""
    headers = {name: value.decode(errors="replace") for name, value in stored.headers.items()}
    key = (stored.key_bytes or b"").decode(errors="backslashreplace")
    is_foreign = ID not in headers
    native_kind = api.FIFO if is_ordered and key else api.NORMAL
    kind = native_kind if is_foreign else _TYPES.get(headers.get(TYPE, ""), api.NORMAL)
    system = api.SystemProperties(
        message_id=headers.get(ID) or str(stored.id),
        message_type=kind,
        body_digest=digest_of(stored.body),
        body_encoding=api.IDENTITY,
        born_timestamp=timestamp_of(stored.create_time_ms),
        born_host=headers.get(BORN_HOST, ""),
        store_timestamp=timestamp_of(stored.append_time_ms),
        queue_offset=stored.sequence,
        delivery_attempt=stored.attempt,
    )
    if stored.tags:
        system.tag = stored.tags[0]
    if is_foreign:
        system.keys.extend([key] if key and not is_ordered else [])
    else:
        system.keys.extend(headers[KEYS].split(KEY_SEPARATOR) if KEYS in headers else [])
    if kind == api.FIFO:
        system.message_group = key
    due_ms = whole_number(headers.get(DUE_MS, ""), TIME_MS_MAX)
    if due_ms is not None:
        system.delivery_timestamp.CopyFrom(timestamp_of(due_ms))
    if TRACE in headers:
        system.trace_context = headers[TRACE]
    if handle:
        system.receipt_handle = handle
        system.invisible_duration.CopyFrom(duration_of(invisible_ms))
    properties = {name: value for name, value in headers.items() if not name.startswith(OURS)}
    return api.Message(
        topic=topic, user_properties=properties, system_properties=system, body=stored.body
    )


def half_message_for_client(half: DelayedMessage) -> api.Message:
    """Convert a half message for the producer that is asked about it.
    The caller must have read its body.
    """
    headers = {name: value.decode(errors="replace") for name, value in half.headers.items()}
    body = half.body or b""
    system = api.SystemProperties(
        message_id=headers.get(ID, str(half.message_id)),
        message_type=api.TRANSACTION,
        body_digest=digest_of(body),
        body_encoding=api.IDENTITY,
        born_timestamp=timestamp_of(time_ms(half.create_time)),
        born_host=headers.get(BORN_HOST, ""),
        keys=headers[KEYS].split(KEY_SEPARATOR) if KEYS in headers else [],
    )
    if half.tags:
        system.tag = half.tags[0]
    if TRACE in headers:
        system.trace_context = headers[TRACE]
    properties = {name: value for name, value in headers.items() if not name.startswith(OURS)}
    return api.Message(
        topic=topic_of_subject(half.subject),
        user_properties=properties,
        system_properties=system,
        body=body,
    )


def timestamp_of(moment_ms: int) -> Timestamp:
    """Convert milliseconds since 1970."""
    moment_ms = min(max(moment_ms, TIME_MS_MIN), TIME_MS_MAX)  # a sender may have any clock
    return Timestamp(seconds=moment_ms // 1000, nanos=moment_ms % 1000 * 1_000_000)


def duration_of(length_ms: int) -> Duration:
    """Convert a length in milliseconds."""
    return Duration(seconds=length_ms // 1000, nanos=length_ms % 1000 * 1_000_000)


def _milliseconds(time: Timestamp) -> int:
    """Milliseconds, rounded up so that no message is early."""
    return time.seconds * 1000 + -(-time.nanos // 1_000_000)


def length_ms(duration: Duration) -> int:
    """Milliseconds, rounded up."""
    return duration.seconds * 1000 + -(-duration.nanos // 1_000_000)
