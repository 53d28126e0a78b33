"""The live clients: those with a Telemetry stream, and those that sent a heartbeat.

A client is alive while its stream is open, and for two minutes after its last heartbeat: messages that it received with automatic renewal
stay invisible to other clients during that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from qmq.proto.rocketmq import service_pb2 as calls

IDLE_MS: Final = 120_000
SESSIONS_MAX: Final = 100_000

Write = Callable[[calls.TelemetryCommand], Awaitable[None]]


@dataclass(slots=True, eq=False)
class ClientSession:
    """One client. `streams` are its open Telemetry streams, `published` the subjects to which it sends."""

    client_id: str
    heard_ms: int
    streams: list[TelemetryStream] = field(default_factory=list)
    published: set[str] = field(default_factory=set)


class TelemetryStream:
    """The gateway's end of a Telemetry stream. It writes one command after another, and calls `note` with each command."""

    def __init__(self, write: Write, note: Callable[[calls.TelemetryCommand], None]) -> None:
        self._write, self._note = write, note
        self._lock = asyncio.Lock()

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

    def __len__(self) -> int:
        return len(self._sessions)

    def hear(self, client_id: str) -> ClientSession:
        """Record a sign of life of the client, and return its session."""
        now_ms = self._monotonic_ms()
        session = self._sessions.get(client_id)
        if session is None:
            if len(self._sessions) >= SESSIONS_MAX:
                self._forget_idle(now_ms)
            session = self._sessions[client_id] = ClientSession(client_id, now_ms)
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
    def has_producers(self) -> bool:
        """True if any client with an open stream publishes."""
        return any(each.published and each.streams for each in self._sessions.values())

    def producers_of(self, subject: str) -> list[ClientSession]:
        """The clients that publish to the subject and have an open stream: the gateway can ask them about a transaction."""
        return [each for each in self._sessions.values() if each.streams and subject in each.published]

    def end(self, client_id: str) -> None:
        """Forget a client that reports its end."""
        self._sessions.pop(client_id, None)

    def _forget_idle(self, now_ms: int) -> None:
        for each in list(self._sessions.values()):
            if not each.streams and now_ms - each.heard_ms >= IDLE_MS:
                del self._sessions[each.client_id]
