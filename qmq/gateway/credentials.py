"""Authenticates RocketMQ clients: an access key, a signature with its secret key, and the QMQ principal of the access key.

    authorization: MQv2-HMAC-SHA1 Credential=ACCESSKEY, SignedHeaders=x-mq-date-time, Signature=HEX
    x-mq-date-time: 20261124T120000Z          the signed text; the signature is HMAC-SHA1 with the secret key

QMQ keeps only the digests of tokens, but checking a signature requires the secret key. The gateway therefore has a file with the secret
keys, and a token of QMQ for each key, with which it sends and receives for that client: rules, quotas and the audit log see the token's
principal.

    [{"access_key": "shop", "secret_key": "...", "token": "qmq_..."}, ...]

The signature covers only a time that the client states, as RocketMQ defines it: anyone who can read a request can forge others. Use TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qmq.errors import InvalidArgument
from qmq.gateway.status import Refused
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.text import parse_json

AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"
_SIGNED: Final = re.compile(
    r"MQv2-HMAC-SHA1 +Credential=(?P<access_key>[^,/\s]+)[^,]*, *SignedHeaders=x-mq-date-time, *Signature=(?P<hex>[0-9a-fA-F]{40})"
)
_NOBODYS: Final = b""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """One client's access key and secret key, and the QMQ token that the gateway uses for this client."""

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
        """Read the file. Raises InvalidArgument if the file cannot be used; the error text never contains a secret."""
        try:
            found = parse_json(path.read_bytes())
        except (OSError, ValueError) as cause:
            raise InvalidArgument(f"the keys of RocketMQ's clients cannot be read from {path}: {type(cause).__name__}") from None
        if not isinstance(found, list) or not found or not all(map(_is_complete, found)):
            raise InvalidArgument(f"{path} is not a list of objects with access_key, secret_key and token, all strings")
        keys = {each["access_key"]: ClientKeys(each["access_key"], each["secret_key"], each["token"]) for each in found}
        if len(keys) < len(found):
            raise InvalidArgument(f"{path} contains an access key twice")
        return cls(keys)

    def authenticate(self, headers: Mapping[str, str]) -> ClientKeys:
        """Find the keys that signed the call. Raises Refused, with the same words for an unknown access key and for a wrong signature."""
        found = _SIGNED.fullmatch(headers.get(AUTHORIZATION, "").strip())
        date_time = headers.get(DATE_TIME, "")
        if found is None or not date_time:
            raise Refused(api.UNAUTHORIZED, "the call is not signed: give the client an access key and its secret key")
        keys = self.keys.get(found["access_key"])
        secret = keys.secret_key.encode() if keys is not None else _NOBODYS
        expected = hmac.new(secret, date_time.encode(), hashlib.sha1).hexdigest()
        if not hmac.compare_digest(expected, found["hex"].lower()) or keys is None:
            raise Refused(api.UNAUTHORIZED, "the access key is not known here, or the secret key is not its own")
        return keys


def claimed_access_key(headers: Mapping[str, str]) -> str:
    """The access key that a call names, whether its signature is right or not; "" for none."""
    found = _SIGNED.fullmatch(headers.get(AUTHORIZATION, "").strip())
    return "" if found is None else f"access key {found['access_key']}"


def _is_complete(found: Any) -> bool:
    names = ("access_key", "secret_key", "token")
    return isinstance(found, dict) and all(isinstance(found.get(each), str) and found[each] for each in names)
