"""A replica proves that it belongs to its group: it knows the group's secret from the coordination store. Pure.

    dialling replica                   listening replica
    Hello(group, replica, to, nonce)   ─▶
                                   ◀─  Challenge(nonce)
    Proof of "dials"               ─▶
                                   ◀─  Proof of "listens": from now on messages are accepted

A proof is an HMAC (RFC 2104) with SHA-256 over both names, the group, both nonces and the direction. A recorded proof is therefore valid
for no other connection, and cannot be sent back to its sender. The secret itself never travels between replicas. Later messages are not
signed: only TLS protects against an attacker who can write into an established connection.
"""

from __future__ import annotations

import hmac
import json
from typing import Final, NamedTuple

from qmq.errors import ProtocolViolation
from qmq.wire.frame_payloads import is_text

VERSION: Final = 2
"""The handshake's version. Increase it with every change of replica_messages.py: a replica refuses messages with unknown fields."""
DIALS: Final = "dials"
LISTENS: Final = "listens"


class PeerHello(NamedTuple):
    """The first message between replicas: the sender, the replica that it wants to reach, and a fresh nonce."""

    group: str
    replica: str
    to: str = ""
    nonce: str = ""

    def pack(self) -> bytes:
        return json.dumps({"version": VERSION, **self._asdict()}).encode()

    @classmethod
    def unpack(cls, payload: memoryview) -> PeerHello:
        """Raises ProtocolViolation."""
        found = _fields(payload)
        if found.get("version") != VERSION:
            raise ProtocolViolation(f"this replica speaks version {VERSION}, the other {found.get('version')}")
        return cls(*[_text(found, name) for name in cls._fields])


class ProofStep(NamedTuple):
    """A later step of the handshake: a nonce, or a proof."""

    nonce: str = ""
    proof: str = ""

    def pack(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def unpack(cls, payload: memoryview) -> ProofStep:
        """Raises ProtocolViolation."""
        found = _fields(payload)
        return cls(*[_text(found, name) for name in cls._fields])


def prove(secret: bytes, who: str, hello: PeerHello, challenge: str) -> str:
    """The proof of the replica that dials, or of the one that listens."""
    said = json.dumps(["qmq replica", who, *hello, challenge]).encode()
    return hmac.new(secret, said, "sha256").hexdigest()


def is_proof(proof: str, secret: bytes, who: str, hello: PeerHello, challenge: str) -> bool:
    """True if the proof is correct. Without a secret, no proof is correct."""
    return bool(secret) and hmac.compare_digest(proof.encode(), prove(secret, who, hello, challenge).encode())


def _fields(payload: memoryview) -> dict[str, object]:
    try:
        found = json.loads(bytes(payload))
    except (ValueError, RecursionError) as cause:
        raise ProtocolViolation(f"not a replica's hello: {cause}") from None
    if not isinstance(found, dict):
        raise ProtocolViolation("not a replica's hello")
    return found


def _text(found: dict[str, object], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise ProtocolViolation(f"not a replica's hello: {name} is missing")
    if not is_text(value):
        raise ProtocolViolation(f"not a replica's hello: {name} holds half of a surrogate pair, which is no character")
    return value
