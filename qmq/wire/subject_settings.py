"""A subject's settings as a protobuf message, and back. Clients and servers use it."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from qmq_ordering.hashing import LOGICAL_PARTITIONS

from qmq.errors import InvalidArgument
from qmq.limits import BODY_BYTES_MAX
from qmq.model import Fencing, Order, SubjectConfig, SubjectFlush
from qmq.proto.v1 import meta_pb2 as pb
from qmq.wire.number_fields import request_of

_E = TypeVar("_E", bound=Enum)


def settings_of(config: SubjectConfig, *, partitions: int = 0) -> pb.SubjectSettings:
    """Encode a subject's settings. `partitions`: how many partitions a new ordered subject gets; 0
    leaves the choice to the metaserver. Raises InvalidArgument for a number that is too large.
    """
    return request_of(
        pb.SubjectSettings,
        name=config.name,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        body_bytes_max=config.body_bytes_max,
        broker_groups=config.groups,
        order=config.order.value,
        logical_partitions=config.logical_partitions,
        fencing=config.fencing.value if config.order is not Order.NONE else "",
        partitions=partitions,
        flush=config.flush.value,
    )


def config_of(settings: pb.SubjectSettings) -> SubjectConfig:
    """Decode a subject's settings. Raises InvalidName, InvalidArgument."""
    order = _one_of(Order, settings.order, "order")
    lps = (settings.logical_partitions or LOGICAL_PARTITIONS) if order is not Order.NONE else 0
    return SubjectConfig(
        settings.name,
        settings.retention_ms if settings.HasField("retention_ms") else None,
        settings.retention_bytes if settings.HasField("retention_bytes") else None,
        settings.body_bytes_max or BODY_BYTES_MAX,
        tuple(settings.broker_groups),
        order=order,
        logical_partitions=lps,
        fencing=_one_of(Fencing, settings.fencing or Fencing.LEASE.value, "fencing"),
        flush=flush_of(settings.flush),
    )


def changes_of(request: pb.AlterSubjectRequest) -> dict[str, int | None]:
    """The fields of SubjectConfig that the request changes.
    Raises InvalidArgument if there are none.
    """
    found: dict[str, int | None] = {
        name: getattr(request, name) or None
        for name in ("retention_ms", "retention_bytes")
        if request.HasField(name)
    }
    if request.HasField("body_bytes_max"):
        found["body_bytes_max"] = request.body_bytes_max
    if not found:
        raise InvalidArgument(
            f"nothing of subject {request.subject!r} is to change: give a retention or the "
            "largest body"
        )
    return found


def flush_of(text: str) -> SubjectFlush:
    """Decode when a subject's producers are answered. Raises InvalidArgument."""
    return _one_of(SubjectFlush, text or SubjectFlush.DEFAULT.value, "flush")


def _one_of(kind: type[_E], text: str, name: str) -> _E:
    try:
        return kind(text)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise InvalidArgument(f"a subject's {name} is one of {known}, not {text!r}") from None
