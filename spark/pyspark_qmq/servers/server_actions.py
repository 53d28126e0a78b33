"""Reads the committed action log of a broker group from its master, for reports about lag and latency.

It makes a few reads of some MiB over the control port: action logs are small, and reports are not urgent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from pyspark_qmq.servers.metaservers import Metadata
from pyspark_qmq.servers.retry_deadline import patiently
from qmq import limits
from qmq.batch import ENVELOPE_BYTES, Envelope, Kind, parse_envelope
from qmq.batch_columns import check_region
from qmq.errors import CorruptBatch, InvalidArgument, LogDamaged, MessagesExpired, NotConnected
from qmq.proto.v1 import control_pb2 as pb

READ_BYTES: Final = 4 * limits.MIB
_ACTIONS_LOG: Final = 1


class Servers(Protocol):
    """The address of a cluster; implemented by `ServerAddress`."""

    @property
    def servers(self) -> str: ...

    @property
    def retry_ms(self) -> int:
        """How long to retry a server that does not answer."""
        ...


def action_groups(address: Servers) -> list[str]:
    """The broker groups without the delay groups. Raises NotConnected, InvalidArgument."""
    metadata = Metadata(address.servers, address.retry_ms)
    try:
        return sorted(group.broker_group for group in metadata.cluster() if not group.is_delay)
    finally:
        metadata.close()


def committed_actions(address: Servers, broker_group: str) -> Iterator[tuple[Envelope, bytes]]:
    """Yields all committed entries of the group's action log, oldest first: kinds ACTIONS and SNAPSHOT, with their regions (`unwrap` them).

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
                raise MessagesExpired(f"retention deleted the action log of {broker_group} at {position} while it was read: read again")
            if not answer.entries:
                return
            yield from _entries(answer.entries, broker_group)
            position = answer.position + len(answer.entries)
    finally:
        metadata.close()


def _read(metadata: Metadata, group: str, position: int) -> pb.ReadLogResponse:
    request = pb.ReadLogRequest(log=_ACTIONS_LOG, position=position, bytes_max=READ_BYTES, only_committed=True)

    def once() -> pb.ReadLogResponse:
        found: pb.ReadLogResponse = metadata.control(*_master(metadata, group), "ReadLog", request)
        return found

    return patiently(once, metadata.retry_ms)


def _master(metadata: Metadata, name: str) -> tuple[str, str, str]:
    """The control address of the group's master, the group and the master. Raises NotConnected, InvalidArgument."""
    groups = {group.broker_group: group for group in metadata.cluster()}
    if name not in groups:
        raise InvalidArgument(f"there is no broker group {name!r}: there are {', '.join(sorted(groups)) or 'none'}")
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
            raise LogDamaged(f"an entry of the action log of {group} arrived damaged: {cause.message}") from cause
        if envelope.kind in (Kind.ACTIONS, Kind.SNAPSHOT):
            yield envelope, region
        at += envelope.total_bytes
