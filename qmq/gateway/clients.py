"""The live clients: those with a Telemetry stream, and those that sent a heartbeat.

An identity has at most SESSIONS_MAX clients. One more takes the place of the client that was silent
for longest and has no stream; a client that is named by more than CLIENT_ID_CHARS_MAX characters is
refused.

A client is alive while its stream is open, and for two minutes after its last heartbeat: messages
that it received with automatic renewal stay invisible to other clients during that time.

*Who a client is.* An access key, a signature with its secret key, and the QMQ principal of the
access key.

    authorization: MQv2-HMAC-SHA1 Credential=ACCESSKEY, SignedHeaders=x-mq-date-time, Signature=HEX
    x-mq-date-time: 20261124T120000Z          the signed text; the signature is HMAC-SHA1 with the
                                              secret key

QMQ keeps only the digests of tokens, but checking a signature requires the secret key. The gateway
therefore has a file with the secret keys, and a token of QMQ for each key, with which it sends and
receives for that client: rules, quotas and the audit log see the token's principal.

    [{"access_key": "shop", "secret_key": "...", "token": "qmq_..."}, ...]

The signature covers only a time that the client states, as RocketMQ defines it: anyone who can read
a request can forge others. Use TLS.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from qmq.errors import InvalidArgument
from qmq.gateway.status import Refused
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.text import parse_json

IDLE_MS: Final = 120_000
SESSIONS_MAX: Final = 100_000
CLIENT_ID_CHARS_MAX: Final = 255

Write = Callable[[calls.TelemetryCommand], Awaitable[None]]


@dataclass(slots=True, eq=False)
class ClientSession:
    """One client. `streams` are its open Telemetry streams,
    `published` the subjects to which it sends.
    """

    client_id: str
    heard_ms: int
    streams: list[TelemetryStream] = field(default_factory=list)
    published: set[str] = field(default_factory=set)


class TelemetryStream:
    """The gateway's end of a Telemetry stream. It writes one command after another, and calls
    `note` with each command. `end` cancels the task that serves the stream.
    """

    def __init__(
        self,
        write: Write,
        note: Callable[[calls.TelemetryCommand], None],
        end: Callable[[], object],
    ) -> None:
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
        """True while a command waits for gRPC,
        which takes no more for a client that does not read.
        """
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

    def touch(self, client_id: str) -> ClientSession:
        """Record a sign of life of the client, and return its session. Raises Refused for a long
        name, or if all places have streams.
        """
        if len(client_id) > CLIENT_ID_CHARS_MAX:
            raise Refused(
                api.CLIENT_ID_REQUIRED,
                f"a client id has at most {CLIENT_ID_CHARS_MAX} characters, not {len(client_id)}",
            )
        now_ms = self._monotonic_ms()
        session = self._sessions.pop(client_id, None)
        if session is None:
            self._make_room()
            session = ClientSession(client_id, now_ms)
        self._sessions[client_id] = session
        session.heard_ms = now_ms
        return session

    def is_alive(self, client_id: str) -> bool:
        """True if the client has an open stream,
        or sent a heartbeat within the last two minutes.
        """
        session = self._sessions.get(client_id)
        return session is not None and (
            bool(session.streams) or self._monotonic_ms() - session.heard_ms < IDLE_MS
        )

    @property
    def alive(self) -> int:
        """The number of clients that are alive."""
        return sum(self.is_alive(each) for each in self._sessions)

    @property
    def published(self) -> set[str]:
        """The subjects to which clients with an open stream publish."""
        return set().union(*(each.published for each in self._sessions.values() if each.streams))

    def producers_of(self, subject: str) -> list[TelemetryStream]:
        """The newest stream of each client that publishes to the subject, where nothing is being
        written: the gateway can ask there about a transaction.
        """
        newest = (
            each.streams[-1]
            for each in self._sessions.values()
            if each.streams and subject in each.published
        )
        return [each for each in newest if not each.is_writing]

    def end(self, client_id: str) -> None:
        """Forget a client that reports its end."""
        self._sessions.pop(client_id, None)

    def _make_room(self) -> None:
        if len(self._sessions) < SESSIONS_MAX:
            return
        silent = next(
            (each.client_id for each in self._sessions.values() if not each.streams), None
        )
        if silent is None:
            raise Refused(
                api.TOO_MANY_REQUESTS,
                (
                    f"this gateway serves {SESSIONS_MAX} clients of this access key: use another "
                    "gateway"
                ),
            )
        del self._sessions[silent]


AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"
_SIGNED: Final = re.compile(
    r"MQv2-HMAC-SHA1 +Credential=(?P<access_key>[^,/\s]+)[^,]*, "
    r"*SignedHeaders=x-mq-date-time, *Signature=(?P<hex>[0-9a-fA-F]{40})"
)
_NOBODYS: Final = b""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """One client's access key and secret key,
    and the QMQ token that the gateway uses for this client.
    """

    access_key: str
    secret_key: str
    token: str

    def __repr__(self) -> str:
        return f"ClientKeys({self.access_key})"


class GatewayCredentials:
    """The keys of all clients that this gateway knows."""

    def __init__(self, keys: Mapping[str, ClientKeys]) -> None:
        self.keys = keys

    @classmethod
    def load(cls, path: Path) -> GatewayCredentials:
        """Read the file. Raises InvalidArgument if the file cannot be used; the error text never
        contains a secret.
        """
        try:
            found = parse_json(path.read_bytes())
        except (OSError, ValueError) as cause:
            raise InvalidArgument(
                f"the keys of RocketMQ's clients cannot be read from {path}: {type(cause).__name__}"
            ) from None
        if not isinstance(found, list) or not found or not all(map(_is_complete, found)):
            raise InvalidArgument(
                f"{path} is not a list of objects with access_key, secret_key and token, all "
                "strings"
            )
        keys = {
            each["access_key"]: ClientKeys(each["access_key"], each["secret_key"], each["token"])
            for each in found
        }
        if len(keys) < len(found):
            raise InvalidArgument(f"{path} contains an access key twice")
        return cls(keys)

    def authenticate(self, headers: Mapping[str, str]) -> ClientKeys:
        """Find the keys that signed the call. Raises Refused, with the same words for an unknown
        access key and for a wrong signature.
        """
        found = _SIGNED.fullmatch(headers.get(AUTHORIZATION, "").strip())
        date_time = headers.get(DATE_TIME, "")
        if found is None or not date_time:
            raise Refused(
                api.UNAUTHORIZED,
                "the call is not signed: give the client an access key and its secret key",
            )
        keys = self.keys.get(found["access_key"])
        secret = keys.secret_key.encode() if keys is not None else _NOBODYS
        expected = hmac.new(secret, date_time.encode(), hashlib.sha1).hexdigest()
        if not hmac.compare_digest(expected, found["hex"].lower()) or keys is None:
            raise Refused(
                api.UNAUTHORIZED,
                "the access key is not known here, or the secret key is not its own",
            )
        return keys


def claimed_access_key(headers: Mapping[str, str]) -> str:
    """The access key that a call names, whether its signature is right or not; "" for none."""
    found = _SIGNED.fullmatch(headers.get(AUTHORIZATION, "").strip())
    return "" if found is None else f"access key {found['access_key']}"


def _is_complete(found: Any) -> bool:
    names = ("access_key", "secret_key", "token")
    return isinstance(found, dict) and all(
        isinstance(found.get(each), str) and found[each] for each in names
    )
