"""One connection to a broker's data port: requests out, answers back, in any order.

Every request has a callback, called exactly once: with the answering frame, or with a QmqError. A request whose connection ended, or whose
time is up, ends with an error whose outcome is *unknown*: it may have been done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from qmq.errors import ClientClosed, DeadlineExceeded, NotConnected, Outcome, ProtocolViolation, QmqError
from qmq.wire import frame as frames
from qmq.wire import messages as wire
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.stream import FrameStream

SWEEP_S: Final = 0.1
CONNECT_TIMEOUT_S: Final = 5.0

OnAnswer = Callable[[Frame | QmqError], None]


class Connection:
    """A connection that stands. Make it with `connect`; once it ends it does not come back."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.inflight_bytes_max = 0
        self.on_closed: list[Callable[[], None]] = []
        self.on_writable: list[Callable[[], None]] = []
        self._pending: dict[int, tuple[OnAnswer, float]] = {}
        self._next_id = 1
        self._sweeper: asyncio.TimerHandle | None = None
        self._cause: QmqError | None = None
        self.ended = asyncio.Event()
        self.stream = FrameStream(
            on_frames=self._on_frames, on_closed=self._closed, on_writable=self._writable, on_violation=self._violated
        )

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self.stream.is_open and self._cause is None

    def request(self, kind: int, on_answer: OnAnswer, *buffers: bytes, timeout_s: float, deadline_ms: int = 0) -> None:
        """Send a request with the next write; `on_answer` is called once, later."""
        number = self._next_id
        self._next_id = number + 1 if number < 0xFFFF_FFFF else 1
        self._pending[number] = (on_answer, self.loop.time() + timeout_s)
        head = frames.header(kind, number, sum(map(len, buffers)), deadline_ms)
        if self.stream.put(head, *buffers):
            self.loop.call_soon(self.stream.flush)

    async def call(self, kind: int, payload: bytes, *, timeout_s: float, deadline_ms: int = 0) -> Frame:
        """Send a request and wait for its answer, whose payload is copied. Raises the error that came back."""
        future: asyncio.Future[Frame] = self.loop.create_future()

        def answered(answer: Frame | QmqError) -> None:
            if future.done():
                return
            if isinstance(answer, QmqError):
                future.set_exception(answer)
            else:
                future.set_result(answer._replace(payload=memoryview(bytes(answer.payload))))

        self.request(kind, answered, payload, timeout_s=timeout_s, deadline_ms=deadline_ms)
        return await future

    # --- what comes in -------------------------------------------------------------------------------------------------

    def _on_frames(self, received: list[Frame]) -> None:
        for each in received:
            found = self._pending.pop(each.request_id, None)
            if each.kind == FrameKind.ERROR:
                failure = wire.unpack_error(each.payload)
                if found is None:
                    self._cause = failure
                    self.stream.close()
                else:
                    found[0](failure)
            elif found is not None:
                found[0](each)

    def _violated(self, violation: ProtocolViolation) -> None:
        self._cause = violation

    def _writable(self) -> None:
        for each in self.on_writable:
            each()

    def _closed(self, cause: Exception | None) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        reason = self._cause or cause or "the broker closed it"
        failure = NotConnected(f"the connection to {self.address} ended: {reason}", outcome=Outcome.UNKNOWN)
        self._cause = self._cause or failure
        pending, self._pending = self._pending, {}
        for on_answer, _ in pending.values():
            on_answer(failure)
        for each in self.on_closed:
            each()
        self.ended.set()

    # --- time ----------------------------------------------------------------------------------------------------------

    def start_sweeping(self) -> None:
        """Watch over the requests' times."""
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now = self.loop.time()
        late = [number for number, (_, until) in self._pending.items() if until < now]
        for number in late:
            on_answer, _ = self._pending.pop(number)
            on_answer(DeadlineExceeded(f"no answer from {self.address} in time", outcome=Outcome.UNKNOWN))
        self.start_sweeping()

    def close(self) -> None:
        """End it; what waits for an answer fails with NotConnected."""
        if self._cause is None:
            self._cause = ClientClosed("the client was closed")
        self.stream.close()


async def connect(address: str, client: str) -> Connection:
    """Open a connection and greet. Raises NotConnected, ProtocolViolation."""
    host, _, port = address.rpartition(":")
    connection = Connection(address)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await connection.loop.create_connection(lambda: connection.stream, host.strip("[]"), int(port))
            hello = wire.Hello(wire.PROTOCOL_VERSION, client).pack()
            answer = await connection.call(FrameKind.HELLO, hello, timeout_s=CONNECT_TIMEOUT_S)
    except (OSError, ValueError, TimeoutError) as cause:
        connection.close()
        raise NotConnected(f"no broker answers at {address} ({cause or 'timed out'}): is it running?") from cause
    except QmqError:
        connection.close()
        raise
    welcome = wire.Welcome.unpack(answer.payload)
    connection.inflight_bytes_max = welcome.inflight_bytes_max
    connection.stream.reader.frame_bytes_max = welcome.frame_bytes_max
    connection.start_sweeping()
    return connection
