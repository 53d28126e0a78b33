"""The cluster as a task that writes sees it: where subjects are, what queues have, connections. Thin I/O; nobody waits here for long.

It is kept for the life of a process, by address: a task of a stream that runs every second should not connect anew each time.
"""

from __future__ import annotations

from typing import Final

from pyspark_qmq.servers.blocking_connection import BlockingConnection
from pyspark_qmq.servers.masters import MasterConnections
from pyspark_qmq.servers.metaservers import Metadata, call, open_channel, parse_servers
from pyspark_qmq.sink.core_requests import Ask, Locate, Look, LookedUp, Where
from pyspark_qmq.sink.dedup_lookup import look
from pyspark_qmq.sink.row_identity import RowTarget, RowWriter
from qmq.errors import NotConnected, QmqError, Unavailable, UnknownSubject
from qmq.proto.v1 import meta_pb2 as pb
from qmq.proto.v1 import meta_pb2_grpc

METADATA_MS: Final = 2_000
"""How long a question goes round the metaservers before whoever asked looks at its own clock."""
REMEMBERED_MAX: Final = 100_000

_clusters: dict[str, SinkCluster] = {}


def cluster_at(servers: str) -> SinkCluster:
    """The cluster, opened once in this process. Raises InvalidArgument."""
    found = _clusters.get(servers)
    if found is None:
        found = _clusters[servers] = SinkCluster(servers)
    return found


class SinkCluster:
    """Used by one thread."""

    def __init__(self, servers: str) -> None:
        self._servers = parse_servers(servers)
        self._metadata = Metadata(servers, METADATA_MS)
        self._masters = {is_delayed: MasterConnections(self._metadata, delayed=is_delayed) for is_delayed in (False, True)}
        self._closed: dict[tuple[str, RowTarget], int] = {}
        """Partitions that a writer saw closed, and in which epoch: rows of later ones cannot be there."""

    # --- what cores ask ------------------------------------------------------------------------------------------------

    def logical_partitions(self, subject: str, *, creates: bool) -> int:
        """How many an ordered subject has; 0: it is unordered. Raises UnknownSubject, InvalidName, NotConnected."""
        try:
            ordering = self._masters[False].locate(subject).placement.ordering
        except UnknownSubject:
            if not creates:
                raise
            self._create(subject)
            ordering = self._masters[False].locate(subject).placement.ordering
        return 0 if ordering is None else ordering.route.logical_partitions

    def answer(self, ask: Ask, writer: RowWriter) -> Where | LookedUp:
        """Raises Unavailable where asking again helps, UnknownSubject, LogDamaged."""
        return self._locate(ask) if isinstance(ask, Locate) else self._look(ask, writer)

    def _locate(self, ask: Locate) -> Where:
        found = self._masters[ask.is_delayed].locate(ask.subject)
        if found.placement.ordering is not None and not ask.is_delayed:
            return self._metadata.routes(ask.subject)
        writable = {each.group: each.is_writable for each in found.placement.routes}
        return {group: writable.get(group, False) for group in found.hosts}

    def _look(self, ask: Look, writer: RowWriter) -> LookedUp:
        to = ask.target
        channel = self.take(to)
        try:
            found = look(ask, writer, channel.call)
        except QmqError as failure:
            self._masters[to.is_delayed].lose(to.broker_group, channel, failure)
            raise
        except BaseException:
            channel.close()
            raise
        self._masters[to.is_delayed].give(to.broker_group, channel)
        if ask.is_final:
            self._remember(writer, to)
        return found

    def _remember(self, writer: RowWriter, to: RowTarget) -> None:
        if len(self._closed) >= REMEMBERED_MAX:
            self._closed.clear()
        self._closed.setdefault((writer.name, to), writer.epoch)

    def may_skip(self, writer: RowWriter, to: RowTarget) -> bool:
        """Whether a partition was seen closed in an earlier epoch of the writer's."""
        return self._closed.get((writer.name, to), writer.epoch) < writer.epoch

    def _create(self, subject: str) -> None:
        failure: QmqError = NotConnected(f"no metaserver could create {subject!r}")
        for address in self._servers:
            with open_channel(address) as channel:
                request = pb.CreateSubjectRequest(settings=pb.SubjectSettings(name=subject))
                try:
                    call(channel, meta_pb2_grpc.MetaStub, "CreateSubject", request, address)
                except Unavailable as cause:
                    failure = cause
                else:
                    return
        raise failure

    # --- connections ---------------------------------------------------------------------------------------------------

    def take(self, to: RowTarget) -> BlockingConnection:
        """A connection to a queue's master, for the caller alone. Raises NotConnected, UnknownSubject."""
        return self._masters[to.is_delayed].take(to.subject, to.broker_group, retry_ms=0)

    def give(self, to: RowTarget, channel: BlockingConnection) -> None:
        """Nothing is under way on it any more."""
        self._masters[to.is_delayed].give(to.broker_group, channel)

    def doubt(self, to: RowTarget) -> None:
        """Whoever is known as the queue's master is not, or cannot be reached."""
        self._masters[to.is_delayed].doubt(to.broker_group)

    def close(self) -> None:
        """End what is idle."""
        for each in self._masters.values():
            each.close()
        self._metadata.close()
