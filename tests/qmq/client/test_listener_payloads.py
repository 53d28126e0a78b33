"""Which types are payloads, and what their bodies look like."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import msgspec
import pydantic
import pytest

import qmq
from qmq.client.payloads import Undecodable, codec_of
from qmq.errors import InvalidArgument

T = TypeVar("T")


class Currency(Enum):
    EUR = "EUR"


@dataclass
class Line:
    name: str
    count: int = 1


@dataclass
class Order:
    id: uuid.UUID
    at: datetime
    currency: Currency
    lines: list[Line] = field(default_factory=list)


class Node(msgspec.Struct):
    value: int
    left: Node | None = None
    right: Node | None = None


class Model(pydantic.BaseModel):
    number: int = pydantic.Field(alias="n")


class Box(pydantic.BaseModel, Generic[T]):
    inside: T


@pydantic.dataclasses.dataclass
class Checked:
    number: int = pydantic.Field(gt=0)


class Pair(NamedTuple):
    a: int
    b: str


class Keys(TypedDict):
    a: int


class Stranger:
    pass


@dataclass
class WithStranger:
    it: list[dict[str, Stranger]]


ORDER = Order(uuid.UUID(int=7), datetime(2026, 1, 2, tzinfo=UTC), Currency.EUR, [Line("x", 2)])


@pytest.mark.parametrize(
    ("value", "kind", "body"),
    [
        (b"\xff\0", bytes, b"\xff\0"),
        ("gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n", str, b"gr\xc3\xbcn"),
        (Line("x"), Line, b'{"name":"x","count":1}'),
        (ORDER, Order, None),
        (
            Node(1, Node(2)),
            Node,
            b'{"value":1,"left":{"value":2,"left":null,"right":null},"right":null}',
        ),
        (Model(n=3), Model, b'{"n":3}'),
        (Box[int](inside=3), Box[int], b'{"inside":3}'),
        ([Model(n=3)], list[Model], b'[{"n":3}]'),
        (Checked(3), Checked, b'{"number":3}'),
        (Pair(1, "b"), Pair, b'[1,"b"]'),
        ({"a": 1}, Keys, b'{"a":1}'),
        ({"a": [1, None, 2.5]}, dict[str, object], b'{"a":[1,null,2.5]}'),
        ([1, 2], list[int], b"[1,2]"),
        (7, int, b"7"),
        ([None], Any, b"[null]"),
        (Line("x"), Line | None, b'{"name":"x","count":1}'),
    ],
    ids=[
        "bytes",
        "str",
        "dataclass",
        "nested",
        "struct",
        "pydantic",
        "generic model",
        "models in a list",
        "pydantic dataclass",
        "NamedTuple",
        "TypedDict",
        "dict",
        "list",
        "int",
        "Any",
        "union",
    ],
)
def test_messages_arrive_as_they_were_sent(value: object, kind: Any, body: bytes | None) -> None:
    encoded = qmq.payload.encode(value)
    assert body is None or encoded == body
    assert qmq.payload.decode(encoded, kind) == value


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (Line, b'{"name":7}', r"Expected `str`, got `int` - at `\$.name`"),
        (Line, b'{"name":', "truncated"),
        (Model, b'{"n":"x"}', "valid integer"),
        (Checked, b'{"number":0}', "greater than 0"),
        (str, b"\xff", "utf-8"),
        (list[int], b'[1,"2"]', "Expected `int`"),
    ],
    ids=["type", "truncated", "pydantic", "pydantic dataclass", "str", "list"],
)
def test_a_body_that_does_not_decode_says_what_is_wrong_with_it(
    kind: Any, body: bytes, words: str
) -> None:
    with pytest.raises(Undecodable, match=words):
        qmq.payload.decode(body, kind)


@pytest.mark.parametrize(
    "kind", [Stranger, WithStranger, complex, list[Stranger], "Order", 7], ids=str
)
def test_an_unusable_payload_type_is_refused_before_the_first_message(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"payload|JSON"):
        codec_of(kind)


@pytest.mark.parametrize(
    "value",
    [None, Stranger(), {1, Stranger()}, "\ud800", float, {(1, 2): 3}],
    ids=["None", "class", "set", "str", "type", "key"],
)
def test_what_cannot_be_sent_is_a_typed_error(value: object) -> None:
    with pytest.raises(InvalidArgument):
        qmq.payload.encode(value)


def test_bytes_and_models_need_no_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    assert qmq.payload.decode(qmq.payload.encode("x"), bytes) == b"x"
    assert qmq.payload.decode(b'{"n":3}', Model) == Model(n=3)
    for fails in (lambda: qmq.payload.encode({}), lambda: codec_of(Line)):
        with pytest.raises(InvalidArgument, match=r"qmq\[typed\]"):
            fails()


def test_bytes_are_handed_on_and_not_copied() -> None:
    body = b"x" * 100
    assert qmq.payload.encode(body) is body
    assert qmq.payload.decode(body, bytes) is body
    assert qmq.payload.encode(memoryview(body)) == body
