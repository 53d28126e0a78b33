"""How a message of kombu is stored, and where. Pure.

body      the task's body as kombu serialized it, so that `qmq browse` and other programs can read
          it
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

from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from qmq import limits

HEADER: Final = "kombu"
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9._-]")
_MILLISECONDS: Final = re.compile(r"[0-9]{1,15}", re.ASCII)
_NAME_CHARS: Final = limits.NAME_CHARS_MAX - 9
_TEXTS: Final = (
    *(
        "root_id",
        "parent_id",
        "group",
        "taskset",
        "shadow",
        "lang",
        "meth",
        "origin",
        "argsrepr",
        "kwargsrepr",
    ),
    *("reply_to", "correlation_id"),
)
_NUMBERS: Final = ("retries", "group_index", "replaced_task_nesting", "ignore_result", "priority")
_NUMBER_MAX: Final = 10**9
_LISTS: Final = ("callbacks", "errbacks", "chain")
_FOLLOWING: Final = frozenset((*_LISTS, "chord"))
_PROPERTIES: Final = frozenset(
    (
        *("content_type", "content_encoding", "delivery_mode", "priority", "correlation_id"),
        *("reply_to", "expiration", "message_id", "timestamp", "type", "user_id", "app_id"),
        *("cluster_id", "delivery_info", "delivery_tag", "body_encoding"),
    )
)
"""AMQP's properties, and those that kombu adds."""


def name_of(queue: str) -> str:
    """The subject or group of a queue: the queue's name if it is a valid name, otherwise a readable
    name that is as unique.
    """
    found = _FOREIGN.sub("-", queue).lstrip(".")[:_NAME_CHARS]
    if found == queue and found:
        return found
    digest = hashlib.blake2b(queue.encode(errors="backslashreplace"), digest_size=4).hexdigest()
    return f"{found or 'queue'}-{digest}"


def packed(message: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """(body, headers) of a message as `Channel.prepare_message` makes it. Raises TypeError for what
    JSON cannot hold.
    """
    body = message["body"]
    rest = {name: value for name, value in message.items() if name != "body"}
    try:
        header = dumps(rest)
    except TypeError:
        # Celery hands a handler of `before_task_publish` the signal itself, and handlers publish
        # again with all that they got. AMQP's client leaves out what AMQP has no property for.
        known = {name: rest["properties"][name] for name in rest["properties"].keys() & _PROPERTIES}
        header = dumps({**rest, "properties": known})
    return body.encode() if isinstance(body, str) else bytes(body), {HEADER: header}


class NotKombu(ValueError):
    """A message that kombu did not send: a sentence that says why."""


def unpacked(body: bytes, header: bytes, *, tag: str, attempt: int) -> dict[str, Any]:
    """The message, with its delivery tag. Raises NotKombu unless every part that kombu and Celery
    read has the type that they expect.
    """
    try:
        message = loads(header.decode())
    except Exception as cause:
        # kombu's decoders of dates, decimals and so on raise anything for a value that is not
        # theirs
        raise NotKombu(
            f"its header {HEADER!r} is no JSON of kombu: {type(cause).__name__}"
        ) from None
    found = _mapping(message, "the header")
    properties = _mapping(found.get("properties"), "properties")
    delivery = _mapping(properties.setdefault("delivery_info", {}), "delivery_info")
    headers = _mapping(found.setdefault("headers", {}), "headers")
    for part, names in (
        (found, ("content-type", "content-encoding")),
        (delivery, ("exchange", "routing_key")),
    ):
        for name in names:
            _require(isinstance(part.get(name), str | None), name)
    _require(properties.get("body_encoding") is None, "body_encoding")
    expiration = properties.get("expiration")
    _require(
        expiration is None or _MILLISECONDS.fullmatch(str(expiration)) is not None, "expiration"
    )
    if "task" in headers:
        _check_task({**headers, **_answer_fields(properties)})
    found["body"] = body
    properties["delivery_tag"] = tag
    delivery["redelivered"] = attempt > 1
    return found


def check_payload(message: virtual.Message) -> None:
    """Raises NotKombu unless what a worker of Celery decodes is no task, or one whose every part
    has the type that the worker expects.

    Celery's first protocol has the fields of a task in the body, and its worker reads a body with
    `args` so even where the headers name the task. The second protocol's body is (arguments,
    keyword arguments, what follows the task).
    """
    headers, payload = {**message.headers, **_answer_fields(message.properties)}, message.payload
    if isinstance(payload, dict):
        if "task" in payload or "task" in headers:
            _check_task({**payload, **headers})
    elif "task" in headers:
        _require(isinstance(payload, list | tuple) and len(payload) == 3, "the body")
        arguments, keywords, following = payload
        _require(
            isinstance(arguments, list | tuple) and isinstance(keywords, dict),
            "the body's arguments",
        )
        _require(
            following is None or (isinstance(following, dict) and set(following) <= _FOLLOWING),
            "the body's third part",
        )
        _check_task({**headers, **(following or {})})


def _answer_fields(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: properties.get(name) for name in ("reply_to", "correlation_id", "priority")}


def _check_task(fields: Mapping[str, Any]) -> None:
    """What a worker of Celery looks up or calculates with where an error would end it, or would
    keep a place of its pool for ever.
    """
    for name in ("task", "id"):
        _require(_is_text(fields.get(name)), name)
    for name in _TEXTS:
        _require(fields.get(name) is None or _is_text(fields[name]), name)
    for name in ("eta", "expires"):
        _require(isinstance(fields.get(name), datetime | None) or _is_text(fields[name]), name)
    for name in _NUMBERS:
        _require(
            fields.get(name) is None
            or (isinstance(fields[name], int) and _is_number(fields[name])),
            name,
        )
    for name in _LISTS:
        found = fields.get(name) or []
        _require(isinstance(found, list | tuple) and all(map(_is_signature, found)), name)
    _require(not fields.get("chord") or _is_signature(fields["chord"]), "chord")
    limits_s = fields.get("timelimit") or (None, None)
    _require(isinstance(limits_s, list | tuple) and len(limits_s) == 2, "timelimit")
    _require(all(each is None or _is_number(each) for each in limits_s), "timelimit")
    stamped = fields.get("stamped_headers") or []
    _require(isinstance(stamped, list | tuple) and all(map(_is_text, stamped)), "stamped_headers")
    _require(isinstance(fields.get("stamps"), dict | None), "stamps")


def _is_text(value: Any) -> bool:
    """Whether it is text that any store of results can have in a name."""
    return (
        isinstance(value, str)
        and "\0" not in value
        and not any("\ud800" <= each <= "\udfff" for each in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= _NUMBER_MAX


def _is_signature(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("task"))


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
    """The ids of the tasks that a command of Celery's remote control revokes;
    none for other commands.
    """
    try:
        found = loads(command.decode())
    except Exception:  # as in `unpacked`
        return []
    if not isinstance(found, dict) or found.get("method") != "revoke":
        return []
    arguments = found.get("arguments")
    ids = arguments.get("task_id") if isinstance(arguments, dict) else None
    return [
        each
        for each in ([ids] if isinstance(ids, str) else ids if isinstance(ids, list) else [])
        if isinstance(each, str)
    ]
