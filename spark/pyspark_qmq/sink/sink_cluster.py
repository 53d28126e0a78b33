"""A write task's view of the cluster: locations of subjects, contents of queues, connections. Thin I/O without long waits.

A process caches the cluster by address for as long as it runs, so that a stream with a task every second does not reconnect each time.
"""

from __future__ import annotations

from contextlib import closing
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
"""How long metaservers are asked before the caller checks its own deadline."""
REMEMBERED_MAX: Final = 100_000

_clusters: dict[str, SinkCluster] = {}


def cluster_at(servers: str) -> SinkCluster:
    """The cluster, opened once per process. Raises InvalidArgument."""
    found = _clusters.get(servers)
    if found is None:
        found = _clusters[servers] = SinkCluster(servers)
    return found


class SinkCluster:
    """A cluster's connections. Not thread-safe."""

    def __init__(self, servers: str) -> None:
        self._servers = parse_servers(servers)
        self._metadata = Metadata(servers, METADATA_MS)
        self._masters = {is_delayed: MasterConnections(self._metadata, delayed=is_delayed) for is_delayed in (False, True)}
        self._closed: dict[tuple[str, RowTarget], int] = {}
        """Partitions that a writer saw closed, with the epoch; they cannot have rows of later epochs."""

    # --- answers for cores ------------------------------------------------------------------------------------------------

    def logical_partitions(self, subject: str, *, creates: bool) -> int:
        """The number of an ordered subject's logical partitions; 0: unordered. Raises UnknownSubject, InvalidName, NotConnected."""
        try:
            ordering = self._masters[False].locate(subject).placement.ordering
        except UnknownSubject:
            if not creates:
                raise
            self._create(subject)
            ordering = self._masters[False].locate(subject).placement.ordering
        return 0 if ordering is None else ordering.route.logical_partitions

    def answer(self, ask: Ask, writer: RowWriter) -> Where | LookedUp:
        """Answer a core's question. Raises UnknownSubject, LogDamaged, and Unavailable if a retry may help."""
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
        """Whether a partition was seen closed in an earlier epoch of the writer."""
        return self._closed.get((writer.name, to), writer.epoch) < writer.epoch

    def _create(self, subject: str) -> None:
        failure: QmqError = NotConnected(f"no metaserver could create {subject!r}")
        for address in self._servers:
            with closing(open_channel(address)) as channel:
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
        """Take a connection to a queue's master. Raises NotConnected, UnknownSubject."""
        return self._masters[to.is_delayed].take(to.subject, to.broker_group, retry_ms=0)

    def give(self, to: RowTarget, channel: BlockingConnection) -> None:
        """Return a connection without requests in flight."""
        self._masters[to.is_delayed].give(to.broker_group, channel)

    def doubt(self, to: RowTarget) -> None:
        """Forget the queue's known master."""
        self._masters[to.is_delayed].doubt(to.broker_group)

    def close(self) -> None:
        """Close idle connections."""
        for each in self._masters.values():
            each.close()
        self._metadata.close()
