"""How a message of kombu is stored, and where. Pure.

body      the task's body as kombu serialized it, so that `qmq browse` and other programs can read it
key       the task's id
headers   `kombu`: JSON of content type, encoding, headers and properties
due time  `eta` of a task
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from kombu.utils.json import dumps, loads

from qmq import limits

HEADER: Final = "kombu"
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9._-]")
_MILLISECONDS: Final = re.compile(r"[0-9]{1,15}", re.ASCII)
_NAME_CHARS: Final = limits.NAME_CHARS_MAX - 9


def name_of(queue: str) -> str:
    """The subject or group of a queue: the queue's name if it is a valid name, otherwise a readable name that is as unique."""
    found = _FOREIGN.sub("-", queue).lstrip(".")[:_NAME_CHARS]
    if found == queue and found:
        return found
    return f"{found or 'queue'}-{hashlib.blake2b(queue.encode(errors='backslashreplace'), digest_size=4).hexdigest()}"


def packed(message: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """(body, headers) of a message as `Channel.prepare_message` makes it."""
    body = message["body"]
    rest = {name: value for name, value in message.items() if name != "body"}
    return body.encode() if isinstance(body, str) else bytes(body), {HEADER: dumps(rest)}


class NotKombu(ValueError):
    """A message that kombu did not send: a sentence that says why."""


def unpacked(body: bytes, header: bytes, *, tag: str, attempt: int) -> dict[str, Any]:
    """The message, with its delivery tag. Raises NotKombu unless every part that kombu and Celery read has the type that they expect."""
    try:
        message = loads(header.decode())
    except Exception as cause:  # kombu's decoders of dates, decimals and so on raise anything for a value that is not theirs
        raise NotKombu(f"its header {HEADER!r} is no JSON of kombu: {type(cause).__name__}") from None
    found = _mapping(message, "the header")
    properties = _mapping(found.get("properties"), "properties")
    delivery = _mapping(properties.setdefault("delivery_info", {}), "delivery_info")
    headers = _mapping(found.setdefault("headers", {}), "headers")
    for part, names in ((found, ("content-type", "content-encoding")), (delivery, ("exchange", "routing_key"))):
        for name in names:
            _require(isinstance(part.get(name), str | None), name)
    _require(properties.get("body_encoding") is None, "body_encoding")
    expiration = properties.get("expiration")
    _require(expiration is None or _MILLISECONDS.fullmatch(str(expiration)) is not None, "expiration")
    if "task" in headers:
        _check_task(headers)
    found["body"] = body
    properties["delivery_tag"] = tag
    delivery["redelivered"] = attempt > 1
    return found


def _check_task(headers: Mapping[str, Any]) -> None:
    """What a worker of Celery looks up or calculates with before it has a task on which it could report an error."""
    for name in ("task", "id"):
        _require(isinstance(headers.get(name), str), name)
    for name in ("eta", "expires"):
        _require(isinstance(headers.get(name), str | datetime | None), name)
    for name in ("root_id", "parent_id", "group", "shadow"):
        _require(isinstance(headers.get(name), str | None), name)
    limits_s = headers.get("timelimit") or (None, None)
    _require(isinstance(limits_s, list | tuple) and len(limits_s) == 2, "timelimit")
    _require(all(isinstance(each, int | float | None) for each in limits_s), "timelimit")
    _require(isinstance(headers.get("retries"), int | None), "retries")


def _mapping(part: Any, name: str) -> dict[str, Any]:
    _require(isinstance(part, dict), name)
    return part  # type: ignore[no-any-return]


def _require(holds: bool, name: str) -> None:
    if not holds:
        raise NotKombu(f"{name} has another type than kombu or Celery sends")


def task_of(message: Mapping[str, Any]) -> str | None:
    """The id of the task that the message carries."""
    headers = message.get("headers") or {}
    found = headers.get("id") if "task" in headers else None
    return found if isinstance(found, str) and len(found) <= limits.NAME_CHARS_MAX else None


def due_of(message: Mapping[str, Any]) -> datetime | None:
    """When a task is to begin. Raises ValueError for a malformed `eta`."""
    headers = message.get("headers") or {}
    eta = headers.get("eta") if "task" in headers else None
    if not eta:
        return None
    due = eta if isinstance(eta, datetime) else datetime.fromisoformat(eta)
    return due if due.tzinfo is not None else due.replace(tzinfo=UTC)


def expired(message: Mapping[str, Any], create_time_ms: int, now_ms: int) -> bool:
    """Whether the message is older than its `expiration` (milliseconds)."""
    left = message["properties"].get("expiration")
    return left is not None and now_ms > create_time_ms + int(left)


def revoked_tasks(command: bytes) -> list[str]:
    """The ids of the tasks that a command of Celery's remote control revokes; none for other commands."""
    try:
        found = loads(command.decode())
    except Exception:  # as in `unpacked`
        return []
    if not isinstance(found, dict) or found.get("method") != "revoke":
        return []
    arguments = found.get("arguments")
    ids = arguments.get("task_id") if isinstance(arguments, dict) else None
    return [each for each in ([ids] if isinstance(ids, str) else ids if isinstance(ids, list) else []) if isinstance(each, str)]
