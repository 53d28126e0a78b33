"""The live clients: those with a Telemetry stream, and those that sent a heartbeat.

An identity has at most SESSIONS_MAX clients. One more takes the place of the client that was silent for longest and has no stream; a client
that is named by more than CLIENT_ID_CHARS_MAX characters is refused.

A client is alive while its stream is open, and for two minutes after its last heartbeat: messages that it received with automatic renewal
stay invisible to other clients during that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from qmq.gateway.status import Refused
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls

IDLE_MS: Final = 120_000
SESSIONS_MAX: Final = 100_000
CLIENT_ID_CHARS_MAX: Final = 255

Write = Callable[[calls.TelemetryCommand], Awaitable[None]]


@dataclass(slots=True, eq=False)
class ClientSession:
    """One client. `streams` are its open Telemetry streams, `published` the subjects to which it sends."""

    client_id: str
    heard_ms: int
    streams: list[TelemetryStream] = field(default_factory=list)
    published: set[str] = field(default_factory=set)


class TelemetryStream:
    """The gateway's end of a Telemetry stream. It writes one command after another, and calls `note` with each command. `end` cancels the
    task that serves the stream.
    """

    def __init__(self, write: Write, note: Callable[[calls.TelemetryCommand], None], end: Callable[[], object]) -> None:
        self._write, self._note, self._end = write, note, end
        self._lock = asyncio.Lock()
        self.is_cut = False

    def cut(self) -> None:
        """End the stream: the client opens another one."""
        if not self.is_cut:
            self.is_cut = True
            self._end()

    @property
    def is_writing(self) -> bool:
        """True while a command waits for gRPC, which takes no more for a client that does not read."""
        return self._lock.locked()

    async def send(self, command: calls.TelemetryCommand) -> None:
        """Send a command; returns when gRPC has taken it."""
        async with self._lock:
            await self._write(command)
        self._note(command)


class ClientSessions:
    """All clients that this gateway knows. Times are milliseconds of a monotonic clock."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._sessions: dict[str, ClientSession] = {}
        """The client that was silent for longest is first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def hear(self, client_id: str) -> ClientSession:
        """Record a sign of life of the client, and return its session. Raises Refused for a long name, or if all places have streams."""
        if len(client_id) > CLIENT_ID_CHARS_MAX:
            raise Refused(api.CLIENT_ID_REQUIRED, f"a client id has at most {CLIENT_ID_CHARS_MAX} characters, not {len(client_id)}")
        now_ms = self._monotonic_ms()
        session = self._sessions.pop(client_id, None)
        if session is None:
            self._make_room()
            session = ClientSession(client_id, now_ms)
        self._sessions[client_id] = session
        session.heard_ms = now_ms
        return session

    def is_alive(self, client_id: str) -> bool:
        """True if the client has an open stream, or sent a heartbeat within the last two minutes."""
        session = self._sessions.get(client_id)
        return session is not None and (bool(session.streams) or self._monotonic_ms() - session.heard_ms < IDLE_MS)

    @property
    def alive(self) -> int:
        """The number of clients that are alive."""
        return sum(self.is_alive(each) for each in self._sessions)

    @property
    def published(self) -> set[str]:
        """The subjects to which clients with an open stream publish."""
        return set().union(*(each.published for each in self._sessions.values() if each.streams))

    def producers_of(self, subject: str) -> list[TelemetryStream]:
        """The newest stream of each client that publishes to the subject, where nothing is being written: the gateway can ask there about a
        transaction.
        """
        newest = (each.streams[-1] for each in self._sessions.values() if each.streams and subject in each.published)
        return [each for each in newest if not each.is_writing]

    def end(self, client_id: str) -> None:
        """Forget a client that reports its end."""
        self._sessions.pop(client_id, None)

    def _make_room(self) -> None:
        if len(self._sessions) < SESSIONS_MAX:
            return
        silent = next((each.client_id for each in self._sessions.values() if not each.streams), None)
        if silent is None:
            raise Refused(api.TOO_MANY_REQUESTS, f"this gateway serves {SESSIONS_MAX} clients of this access key: use another gateway")
        del self._sessions[silent]
