"""Brings batches over one connection to a broker group: sends from the task's thread, answers come in by a thread of the connection's own.

So many requests are under way, to all broker groups at once, and a broker that takes its time for one holds up no other. The thread
receives only while an answer is due (a connection that is idle must not run into its timeout), and hands each one to `events`.
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
    """What became of a try; `is_broken`: the connection ended, and with it all that was under way."""

    connection: SinkConnection
    request_id: int
    failure: QmqError | None
    is_broken: bool = False


class SinkConnection:
    """`to` is any queue of the broker group."""

    def __init__(self, to: RowTarget, channel: BlockingConnection, events: SimpleQueue[SinkAnswer]) -> None:
        self.to = to
        self.channel = channel
        self.under_way: dict[int, tuple[Packet, int]] = {}
        """By request id: the packet, and which try of it."""
        self._events = events
        self._due = threading.Semaphore(0)
        self._is_ending = False
        self._thread = threading.Thread(target=self._receive, name=f"answers of {to.broker_group}", daemon=True)
        self._thread.start()

    def send(self, packet: Packet, buffers: tuple[bytes, ...]) -> None:
        """Raises NotConnected, DeadlineExceeded: nobody knows what became of it."""
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
        """Stop receiving; whether the connection may be used by somebody else: nothing is under way on it."""
        self._is_ending = True
        is_free = self.channel.is_open and not self.under_way
        if not is_free:
            self.channel.close()
        self._due.release()
        self._thread.join()
        return is_free
