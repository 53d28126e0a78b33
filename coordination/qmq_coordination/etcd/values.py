"""Converts values to etcd's messages and back. Pure. Keys are text here and bytes in etcd. A
namespace is put before every key that goes out and taken off every key that comes in, so that
several clusters can share one etcd. UTF-8 keeps the order of code points, so both sides agree on
the order of keys and on prefixes.
"""

from __future__ import annotations

from typing import Final

from qmq.errors import CoordinationError
from qmq.proto.etcd import etcd_pb2 as pb
from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    Delete,
    Get,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    WatchEvent,
)

_RESULTS: Final = {
    "=": pb.Compare.EQUAL,
    "!=": pb.Compare.NOT_EQUAL,
    "<": pb.Compare.LESS,
    ">": pb.Compare.GREATER,
}
_NO_END: Final = b"\0"
"""As the end of a range: after the last key. As the begin of a range: the first key (etcd has no
empty key).
"""


def range_end(prefix: bytes) -> bytes:
    """The first key after all that begin with `prefix`, in etcd's form."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else _NO_END


class Converter:
    """Converts values, and adds and removes the namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def key(self, key: str) -> bytes:
        """A key in etcd's form. Raises CoordinationError for an empty key, as etcd does."""
        if not key:
            raise CoordinationError("a key must not be empty")
        return self._namespace + key.encode()

    def span(self, key: str, *, is_prefix: bool) -> tuple[bytes, bytes]:
        """`key` and `range_end` of a request: for one key, or for all keys with a prefix."""
        if not is_prefix:
            return self.key(key), b""
        prefix = self._namespace + key.encode()
        return prefix or _NO_END, range_end(prefix)

    def item(self, kv: pb.KeyValue) -> KeyValue:
        """A key and its value from etcd's message."""
        return KeyValue(
            self._text(kv.key),
            kv.value,
            kv.create_revision,
            kv.mod_revision,
            kv.version,
            LeaseId(kv.lease),
        )

    def _text(self, key: bytes) -> str:
        return key[len(self._namespace) :].decode(errors="surrogateescape")

    def event(self, event: pb.Event) -> WatchEvent:
        """A change from etcd's message."""
        is_gone = event.type == pb.Event.DELETE
        return WatchEvent(
            self._text(event.kv.key),
            event.kv.mod_revision,
            None if is_gone else self.item(event.kv),
        )

    def compare(self, compare: Compare) -> pb.Compare:
        """A comparison in etcd's form."""
        found = pb.Compare(key=self.key(compare.key), result=_RESULTS[compare.op])
        if compare.target is CompareTarget.VALUE:
            assert isinstance(compare.value, bytes)
            found.target, found.value = pb.Compare.VALUE, compare.value
            return found
        assert isinstance(compare.value, int)
        if compare.target is CompareTarget.VERSION:
            found.target, found.version = pb.Compare.VERSION, compare.value
        elif compare.target is CompareTarget.CREATE:
            found.target, found.create_revision = pb.Compare.CREATE, compare.value
        else:
            found.target, found.mod_revision = pb.Compare.MOD, compare.value
        return found

    def operation(self, operation: Operation) -> pb.RequestOp:
        """An operation of a transaction in etcd's form."""
        if isinstance(operation, Put):
            return pb.RequestOp(request_put=self.put(operation))
        key, end = self.span(operation.key, is_prefix=operation.is_prefix)
        if isinstance(operation, Get):
            return pb.RequestOp(request_range=pb.RangeRequest(key=key, range_end=end))
        return pb.RequestOp(request_delete_range=self.delete(operation, with_deleted=True))

    def put(self, put: Put) -> pb.PutRequest:
        """A put in etcd's form."""
        return pb.PutRequest(key=self.key(put.key), value=put.value, lease=put.lease)

    def delete(self, delete: Delete, *, with_deleted: bool = False) -> pb.DeleteRangeRequest:
        """A deletion in etcd's form; with `wants_deleted`, its answer has the deleted items."""
        key, end = self.span(delete.key, is_prefix=delete.is_prefix)
        return pb.DeleteRangeRequest(key=key, range_end=end, prev_kv=with_deleted)

    def result(self, response: pb.ResponseOp) -> tuple[KeyValue, ...]:
        """The items that an operation of a transaction read or deleted."""
        if response.HasField("response_range"):
            return tuple(self.item(kv) for kv in response.response_range.kvs)
        return tuple(self.item(kv) for kv in response.response_delete_range.prev_kvs)
