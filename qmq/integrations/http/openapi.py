"""The OpenAPI description of the interface, for generated clients and for schemathesis. Pure."""

from __future__ import annotations

from typing import Any, Final

from qmq import limits
from qmq.integrations import cloud_event
from qmq.integrations.http.requests import (
    DELAY_S_MAX,
    INVISIBLE_S_MAX,
    MESSAGES_MAX,
    VERDICTS,
    WAIT_S_MAX,
)

_NAME: Final = {
    "type": "string",
    "pattern": r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
    "minLength": 1,
    "maxLength": limits.NAME_CHARS_MAX,
}
_DELAY: Final = {"type": "number", "minimum": 0, "maximum": DELAY_S_MAX}
_TEXT: Final = {"type": "string"}


def _parameter(name: str, place: str, schema: dict[str, Any], about: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": schema,
        "description": about,
    }


def _answer(about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


_PROBLEM: Final = {
    "type": "object",
    "required": ["code", "error"],
    "properties": {
        "code": {"type": "integer"},
        "error": _TEXT,
        "outcome": {"enum": ["not_stored", "unknown", "stored"]},
    },
}
_FAILURES: Final = {
    "400": _answer("the request is malformed", _PROBLEM),
    "401": _answer("no token, or one that is not valid", _PROBLEM),
    "403": _answer("a rule forbids it", _PROBLEM),
    "404": _answer("no such subject", _PROBLEM),
    "409": _answer(
        (
            "the subject was deleted and created again with the other kind of order: send the "
            "request again"
        ),
        _PROBLEM,
    ),
    "413": _answer("a message is too large", _PROBLEM),
    "429": _answer("a quota is used up, or too much is held", _PROBLEM),
    "503": _answer(
        "the cluster cannot do it now; `outcome` says whether it may have been done", _PROBLEM
    ),
}
_MESSAGE: Final = {
    "type": "object",
    "required": ["receipt", "id", "subject", "attempt", "body_base64"],
    "properties": {
        "receipt": {"type": "string", "description": "what settles the message"},
        "id": _TEXT,
        "subject": _TEXT,
        "sequence": {"type": "integer"},
        "attempt": {"type": "integer"},
        "partition": {
            "type": "integer",
            "description": "of an ordered subject: where `sequence` counts",
        },
        "token": {
            "type": "integer",
            "description": (
                "of an ordered subject: the fencing token, which grows when another consumer "
                "takes over"
            ),
        },
        "create_time_ms": {"type": "integer"},
        "key": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": _TEXT},
        "headers": {"type": "object", "additionalProperties": _TEXT},
        "body_base64": {"type": "string"},
        "event": {
            "type": "object",
            "description": "the message as a CloudEvent in structured mode, if it is one",
        },
    },
}
_ATTRIBUTE: Final = {"type": "string", "minLength": 1}
_EVENT: Final = {
    "type": "object",
    "required": ["id", "source", "type", "specversion"],
    "properties": {
        "id": _ATTRIBUTE,
        "source": _ATTRIBUTE,
        "type": _ATTRIBUTE,
        "specversion": {"const": cloud_event.VERSION},
        "data": {},
        "data_base64": {"type": "string", "format": "byte"},
    },
    "additionalProperties": {"type": ["string", "integer", "boolean"]},
}
_SENT: Final = {
    "type": "object",
    "required": ["id"],
    "properties": {"id": _TEXT, "delayed_id": _TEXT},
}
_GROUP: Final = [
    _parameter("subject", "path", _NAME, "its name"),
    _parameter("group", "path", _NAME, "the consumer group's name"),
]


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    send = {
        "operationId": "send",
        "summary": (
            "Send a message or CloudEvents (binary, structured or batch mode), and answer when "
            "they are stored"
        ),
        "parameters": [
            _parameter("subject", "path", _NAME, "its name"),
            _parameter(
                "key",
                "query",
                _TEXT,
                "the messages' key; of a CloudEvent the extension `partitionkey` comes first",
            ),
            _parameter(
                "tag",
                "query",
                {"type": "array", "items": _TEXT, "maxItems": limits.TAGS_MAX},
                "a tag; may be repeated",
            ),
            _parameter("delay_s", "query", _DELAY, "seconds until the messages are delivered"),
        ],
        "requestBody": {
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                cloud_event.STRUCTURED: {"schema": _EVENT},
                cloud_event.BATCH: {"schema": {"type": "array", "items": _EVENT}},
            }
        },
        "responses": {
            "200": _answer(
                "stored, on a majority of the replicas",
                {
                    "type": "object",
                    "required": ["messages"],
                    "properties": {
                        "messages": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["id"],
                                "properties": {"id": _TEXT},
                            },
                        }
                    },
                },
            ),
            **_FAILURES,
        },
    }
    receive = {
        "operationId": "receive",
        "summary": (
            "Receive messages; each is the caller's until it is settled, or until `invisible_s` "
            "have passed"
        ),
        "parameters": _GROUP,
        "requestBody": _body(
            {
                "messages_max": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MESSAGES_MAX,
                    "default": 10,
                },
                "wait_s": {"type": "number", "minimum": 0, "maximum": WAIT_S_MAX, "default": 0},
                "invisible_s": {
                    "type": "number",
                    "minimum": 1,
                    "maximum": INVISIBLE_S_MAX,
                    "default": 30,
                },
            }
        ),
        "responses": {
            "200": _answer(
                "the messages; none came if there are none",
                {
                    "type": "object",
                    "required": ["messages"],
                    "properties": {"messages": {"type": "array", "items": _MESSAGE}},
                },
            ),
            **_FAILURES,
        },
    }
    settle = {
        "operationId": "settle",
        "summary": "Say what became of received messages",
        "parameters": _GROUP,
        "requestBody": _body(
            {
                "receipts": {
                    "type": "array",
                    "items": _TEXT,
                    "minItems": 1,
                    "maxItems": MESSAGES_MAX,
                },
                "verdict": {"enum": list(VERDICTS), "default": "ack"},
                "delay_s": {
                    **_DELAY,
                    "description": (
                        "of nack: seconds until the message is handed out again; without it, the "
                        "group's"
                    ),
                },
                "error": {"type": "string", "description": "of nack and reject"},
            },
            "receipts",
        ),
        "responses": {
            "200": _answer(
                "those that were settled, and those whose time had ended before",
                {
                    "type": "object",
                    "required": ["settled", "over"],
                    "properties": {
                        "settled": {"type": "array", "items": _TEXT},
                        "over": {"type": "array", "items": _TEXT},
                    },
                },
            ),
            **_FAILURES,
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "QMQ over HTTP", "version": "1"},
        "paths": {
            "/subjects/{subject}": {"post": send},
            "/subjects/{subject}/groups/{group}/receive": {"post": receive},
            "/subjects/{subject}/groups/{group}/settle": {"post": settle},
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def _body(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}
