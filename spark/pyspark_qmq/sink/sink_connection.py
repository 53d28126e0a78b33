"""Sends batches over one connection to a broker group from the task's thread; another thread of the connection receives the answers.

So requests to all broker groups are in flight together, and a slow broker does not delay the others. The thread receives only while an
answer is expected (an idle connection must not time out), and puts each answer into `events`.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import NamedTuple

from pyspark_qmq.servers.blocking_connection import BlockingConnection
from pyspark_qmq.sink.packets import Packet
from pyspark_qmq.sink.row_identity import RowTarget
from qmq.errors import QmqError
from qmq.wire.frame import FrameKind


class SinkAnswer(NamedTuple):
    """The outcome of a send. `is_broken`: the connection ended with all requests in flight."""

    connection: SinkConnection
    request_id: int
    failure: QmqError | None
    is_broken: bool = False


class SinkConnection:
    """A connection to a broker group; `to` is any of its queues."""

    def __init__(self, to: RowTarget, channel: BlockingConnection, events: SimpleQueue[SinkAnswer]) -> None:
        self.to = to
        self.channel = channel
        self.under_way: dict[int, tuple[Packet, int]] = {}
        """The packet and the number of its attempt, by request id."""
        self._events = events
        self._due = threading.Semaphore(0)
        self._is_ending = False
        self._thread = threading.Thread(target=self._receive, name=f"answers of {to.broker_group}", daemon=True)
        self._thread.start()

    def send(self, packet: Packet, buffers: tuple[bytes, ...]) -> None:
        """Send a packet. Raises NotConnected or DeadlineExceeded, after which the outcome is unknown."""
        request_id = self.channel.send(FrameKind.PRODUCE, *buffers)
        self.under_way[request_id] = packet, packet.attempts
        self._due.release()

    def _receive(self) -> None:
        while True:
            self._due.acquire()
            if self._is_ending:
                return
            failure: QmqError | None = None
            request_id = 0
            try:
                request_id = self.channel.receive().request_id
            except QmqError as cause:
                failure, request_id = cause, self.channel.answered_id
            if not self.channel.is_open:
                self._events.put(SinkAnswer(self, 0, failure, is_broken=True))
                return
            self._events.put(SinkAnswer(self, request_id, failure))

    def end(self) -> bool:
        """Stop receiving. Returns whether the connection can be reused because no request is in flight."""
        self._is_ending = True
        is_free = self.channel.is_open and not self.under_way
        if not is_free:
            self.channel.close()
        self._due.release()
        self._thread.join()
        return is_free
