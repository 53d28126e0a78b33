"""Handlers' signatures: what they mean, and the errors when a handler is registered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import qmq
from qmq.client.listening.context import Act, Context, Policy, Reject, Retry, TimedOut, bind, decide
from qmq.client.listening.listener_options import options_of
from qmq.client.payloads import Undecodable, UndecodableBody
from qmq.errors import DelayTooLong, InvalidArgument, InvalidName

if TYPE_CHECKING:
    from decimal import Decimal

SECOND = timedelta(seconds=1)


@dataclass
class Order:
    id: int


class Session:
    pass


class Shop:
    async def on_order(self, order: Order, context: Context) -> str:
        return f"{order.id} {context.group}"

    def __call__(self, body: bytes) -> bytes:
        return body


CONTEXT = Context(None, "g", (), None, None)


async def test_parameters_are_bound_by_their_annotations() -> None:
    async def handler(
        order: Order, session: Session, spare: int = 5, *, context: qmq.Context
    ) -> tuple[object, ...]:
        return order, session, spare, context

    binding = bind(handler, is_batch=False)
    session = Session()
    assert binding.decode is not None
    assert binding.is_async
    assert binding.provided == (Session,)
    got = await binding.call(binding.decode(b'{"id":1}'), CONTEXT, {Session: session})
    assert got == (Order(1), session, 5, CONTEXT)


async def test_methods_partials_and_callable_objects_are_handlers() -> None:
    method = bind(Shop().on_order, is_batch=False)
    assert await method.call(Order(2), CONTEXT, {}) == "2 g"
    called = bind(Shop(), is_batch=False)
    assert (called.is_async, called.call(b"x", CONTEXT, {})) == (False, b"x")

    async def handler(body: bytes, prefix: bytes) -> bytes:
        return prefix + body

    bound = bind(functools.partial(handler, prefix=b"p"), is_batch=False)
    assert bound.is_async
    assert await bound.call(b"x", CONTEXT, {}) == b"px"


@pytest.mark.parametrize(
    "kind", [qmq.Message, qmq.OrderedMessage, qmq.Message | qmq.OrderedMessage], ids=str
)
def test_who_takes_the_message_itself_has_nothing_decoded(kind: Any) -> None:
    def handler(message: Any) -> None: ...

    handler.__annotations__["message"] = kind
    assert bind(handler, is_batch=False).decode is None


def test_a_batch_is_a_list_of_payloads() -> None:
    def handler(orders: list[Order]) -> None: ...

    decode = bind(handler, is_batch=True).decode
    assert decode is not None
    assert decode(b'{"id":1}') == Order(1)


def _no_payload() -> None: ...


def _no_annotation(body) -> None: ...  # type: ignore[no-untyped-def]


def _keyword_only(*, body: bytes) -> None: ...


def _no_type_of_a_payload(body: Session) -> None: ...


def _context_first(context: qmq.Context) -> None: ...


def _unknown_name(body: Decimal) -> None: ...


def _what_is_this(body: bytes, what: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (_no_payload, "takes no payload"),
        (_no_annotation, "annotate 'body'"),
        (Shop.on_order, "method without an object"),
        (_keyword_only, "takes no payload"),
        (_no_type_of_a_payload, "parameter 'body': Session is not a payload type"),
        (_context_first, "first parameter is the payload"),
        (_unknown_name, "'Decimal' is not defined.*not only for type checking"),
        (_what_is_this, "annotate 'what'"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_handler_with_a_wrong_signature_is_refused_at_registration(
    handler: Callable[..., Any], words: str
) -> None:
    mq = qmq.connect()
    with pytest.raises(InvalidArgument, match=words):
        mq.listener("s", "g")(handler)


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"on_undecodable": "drop"},
        {"start": "middle"},
        {"timeout": timedelta(0)},
        {"timeout": 5},
        {"retry_delays": [timedelta(-1)]},
        {"most_once": True, "retry_delays": [SECOND]},
        {"batch": (0, SECOND)},
        {"batch": (3_000, SECOND)},
        {"batch": (10, 1)},
        {"no_such_option": 1},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(InvalidArgument):
        options_of("s", "g", options)


def test_options_are_of_ordered_or_unordered_subjects() -> None:
    for options in (
        {"tags_any": ["x"]},
        {"most_once": True},
        {"broadcast": True},
        {"expired": "skip"},
    ):
        with pytest.raises(InvalidArgument, match="ordered"):
            options_of("s", "g", options).ordered_consumer(is_async=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a thread cannot be cancelled"):
        options_of("s", "g", {"timeout": SECOND}).ordered_consumer(is_async=False)
    with pytest.raises(InvalidArgument, match="ordered"):
        options_of("s", "g", {"on_failure": "park"}).consumer()
    with pytest.raises(InvalidName):
        options_of("no subject", "g", {})


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


POLICY = Policy((SECOND, 2 * SECOND))


@pytest.mark.parametrize(
    ("failure", "attempt", "policy", "expected"),
    [
        (None, 1, POLICY, (Act.ACK, None, "")),
        (ValueError("bad"), 1, POLICY, (Act.NACK, SECOND, "ValueError: bad")),
        (ValueError("bad"), 2, POLICY, (Act.NACK, 2 * SECOND, "ValueError: bad")),
        (ValueError("bad"), 9, POLICY, (Act.NACK, 2 * SECOND, "ValueError: bad")),
        (ValueError(), 9, Policy(), (Act.NACK, None, "ValueError")),
        (ValueError("x" * 2000), 1, Policy(), (Act.NACK, None, "ValueError: " + "x" * 988)),
        (Unspeakable(), 1, Policy(), (Act.NACK, None, "Unspeakable")),
        (Retry(after=5 * SECOND), 1, POLICY, (Act.NACK, 5 * SECOND, "Retry")),
        (Retry("busy"), 1, POLICY, (Act.NACK, SECOND, "busy")),
        (Reject("no such customer"), 1, POLICY, (Act.REJECT, None, "no such customer")),
        (TimedOut("timed out after 5 s"), 1, POLICY, (Act.NACK, SECOND, "timed out after 5 s")),
        (UndecodableBody("no JSON"), 1, POLICY, (Act.REJECT, None, "no JSON")),
        (UndecodableBody("no JSON"), 1, Policy((), "retry"), (Act.NACK, None, "no JSON")),
        (UndecodableBody("no JSON"), 1, Policy((), "skip"), (Act.ACK, None, "")),
        (
            Undecodable("of another service"),
            1,
            Policy((), "skip"),
            (Act.NACK, None, "of another service"),
        ),
    ],
    ids=[
        "returned",
        "raised",
        "second",
        "later",
        "as the group says",
        "long",
        "cannot say",
        "retry",
        "retry as usual",
        "reject",
        "timeout",
        "undecodable",
        "undecodable retry",
        "undecodable skip",
        "undecodable inside",
    ],
)
def test_the_end_of_a_handler_decides_the_outcome_of_its_message(
    failure: BaseException | None, attempt: int, policy: Policy, expected: object
) -> None:
    assert decide(failure, attempt, policy) == expected


def test_an_impossible_retry_is_an_error_at_the_raise() -> None:
    with pytest.raises(DelayTooLong):
        Retry(after=timedelta(days=1000))
    with pytest.raises(InvalidArgument):
        Retry(after=timedelta(-1))
