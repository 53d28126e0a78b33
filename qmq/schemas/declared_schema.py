"""One version of a subject's schema, as the coordination store has it. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from qmq.errors import InvalidArgument
from qmq.model import utf8
from qmq.schemas import avro_schema, json_schema
from qmq.schemas.field_types import Struct
from qmq.text import parse_json

_E = TypeVar("_E", bound=Enum)

TEXT_BYTES_MAX: Final = 256 << 10


class SchemaFormat(Enum):
    JSON_SCHEMA = "json-schema"
    AVRO = "avro"


class Compatibility(Enum):
    """What a new version must be able to do."""

    BACKWARD = "backward"
    """Its readers read bodies of the version before."""
    FORWARD = "forward"
    """Readers of the version before read its bodies."""
    FULL = "full"
    """Both."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class DeclaredSchema:
    format: SchemaFormat
    text: str
    """As it was given."""
    compatibility: Compatibility = Compatibility.BACKWARD
    version: int = 0
    """1 for the first of a subject; 0: not stored yet."""
    created_ms: int = 0

    def struct(self) -> Struct:
        """The fields. Raises InvalidArgument, which names the field that cannot be."""
        size = len(utf8("a schema", self.text))
        if size > TEXT_BYTES_MAX:
            raise InvalidArgument(f"a schema has at most {TEXT_BYTES_MAX >> 10} KiB, not {size} bytes")
        return json_schema.parse(self.text) if self.format is SchemaFormat.JSON_SCHEMA else avro_schema.parse(self.text)

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "format": self.format.value, "compatibility": self.compatibility.value}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> DeclaredSchema:
        """The inverse. Raises ValueError, KeyError, TypeError."""
        found: dict[str, Any] = parse_json(data)
        return cls(
            SchemaFormat(found["format"]),
            str(found["text"]),
            Compatibility(found["compatibility"]),
            int(found["version"]),
            int(found["created_ms"]),
        )


def format_of(text: str) -> SchemaFormat:
    """Raises InvalidArgument."""
    return _chosen(SchemaFormat, "format of a schema", text)


def compatibility_of(text: str) -> Compatibility:
    """Raises InvalidArgument."""
    return _chosen(Compatibility, "compatibility", text)


def _chosen(kind: type[_E], what: str, text: str) -> _E:
    try:
        return kind(text)
    except ValueError:
        raise InvalidArgument(f"the {what} is one of {', '.join(each.value for each in kind)}, not {text!r}") from None
