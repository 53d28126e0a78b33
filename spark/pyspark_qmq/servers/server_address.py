"""Where a cluster is: what travels to executors, and a log is opened from."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark_qmq.servers.blocking_connection import TIMING, ConnectionTiming
from pyspark_qmq.servers.metaservers import RETRY_MS, Metadata
from pyspark_qmq.servers.server_log import ServerLog


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Metaservers as "host:port", with commas between several; `retry_ms`: how long whatever does not answer is tried again."""

    servers: str
    retry_ms: int = RETRY_MS
    timing: ConnectionTiming = TIMING

    def open(self) -> ServerLog:
        """In this process; nobody is asked yet. Raises InvalidArgument."""
        return ServerLog(Metadata(self.servers, self.retry_ms), self.timing)
