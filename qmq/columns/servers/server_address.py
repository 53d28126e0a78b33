"""The address of a cluster, which is sent to executors and from which a log is opened."""

from __future__ import annotations

from dataclasses import dataclass

from qmq.columns.servers.connection import ANSWER_S
from qmq.columns.servers.log import ServerLog
from qmq.columns.servers.metaservers import RETRY_MS, Metadata


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Metaservers as a comma-separated list of "host:port". `retry_ms`: how long to retry a server that does not answer."""

    servers: str
    retry_ms: int = RETRY_MS
    answer_s: float = ANSWER_S

    def open(self) -> ServerLog:
        """Open the log in this process, without calling a server yet. Raises InvalidArgument."""
        return ServerLog(Metadata(self.servers, self.retry_ms), self.answer_s)
