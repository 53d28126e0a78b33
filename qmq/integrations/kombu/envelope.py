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
_NAME_CHARS: Final = limits.NAME_CHARS_MAX - 9


def name_of(queue: str) -> str:
    """The subject or group of a queue: the queue's name if it is a valid name, otherwise a readable name that is as unique."""
    found = _FOREIGN.sub("-", queue).lstrip(".")[:_NAME_CHARS]
    if found == queue and found:
        return found
    return f"{found or 'queue'}-{hashlib.blake2b(queue.encode(), digest_size=4).hexdigest()}"


def packed(message: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """(body, headers) of a message as `Channel.prepare_message` makes it."""
    body = message["body"]
    rest = {name: value for name, value in message.items() if name != "body"}
    return body.encode() if isinstance(body, str) else bytes(body), {HEADER: dumps(rest)}


def unpacked(body: bytes, header: bytes, *, tag: str, attempt: int) -> dict[str, Any]:
    """The message, with its delivery tag. Raises ValueError for a message that kombu did not send."""
    message: dict[str, Any] = loads(header.decode())
    message["body"] = body
    properties = message["properties"]
    properties["delivery_tag"] = tag
    properties.setdefault("delivery_info", {})["redelivered"] = attempt > 1
    return message


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
    except ValueError:
        return []
    if not isinstance(found, dict) or found.get("method") != "revoke":
        return []
    ids = found.get("arguments", {}).get("task_id") or []
    return [ids] if isinstance(ids, str) else list(ids)
