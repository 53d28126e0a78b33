"""FastStream's base cases about publishing, answers, requests and batches, in memory and on a
node.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

import qmq
from qmq.errors import InvalidArgument

faststream = pytest.importorskip(
    "faststream", reason="needs FastStream: pip install 'qmq[faststream]'"
)

from faststream import AckPolicy, BaseMiddleware, Context  # noqa: E402
from faststream._internal._compat import dump_json  # noqa: E402
from faststream.exceptions import SubscriberNotFound  # noqa: E402
from faststream.response import ensure_response  # noqa: E402
from faststream_places import Place, Seen  # noqa: E402

from qmq.integrations.faststream import QmqMessage, QmqPublishCommand, QmqResponse, QmqRouter  # noqa: E402
from qmq.integrations.faststream.sending import MessageOptions, aligned  # noqa: E402


class Model(BaseModel):
    r: str


@dataclass
class Record:
    r: str


NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)
VALUES = (
    ("hello", str, "hello"),
    (b"hello", bytes, b"hello"),
    (1, int, 1),
    (1.0, float, 1.0),
    (1, float, 1.0),
    (False, bool, False),
    ({"m": 1}, dict[str, int], {"m": 1}),
    ([1, 2, 3], list[int], [1, 2, 3]),
    (NOON, datetime, NOON),
    (dump_json(asdict(Record("hello!"))), Record, Record("hello!")),
    (Record("hello!"), Record, Record("hello!")),
    (Record("hello!"), dict, {"r": "hello!"}),
    ({"r": "hello!"}, Record, Record("hello!")),
    (b'{"r":"hello!"}', Model, Model(r="hello!")),
    (Model(r="hello!"), Model, Model(r="hello!")),
    (Model(r="hello!"), dict, {"r": "hello!"}),
    ({"r": "hello!"}, Model, Model(r="hello!")),
)
"""The sent value, the type in the handler's signature, and the value that the handler gets:
FastStream's table.
"""


async def test_a_value_comes_as_the_type_that_the_handler_asks_for(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    def subscribe(number: int, kind: Any) -> None:
        @broker.subscriber(f"{subject}-{number}", group="g")
        async def handle(body: kind) -> None:
            seen(body)

    for number, (_, kind, _) in enumerate(VALUES):
        subscribe(number, kind)
    async with place.started(broker):
        for number, (sent, _, wanted) in enumerate(VALUES):
            await broker.publish(sent, f"{subject}-{number}")
            (found,) = await seen.next()
            assert (found, type(found)) == (wanted, type(wanted))


async def test_a_dict_fills_parameters_by_name_and_a_list_by_place(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="g")
    async def named(a: int, b: int) -> None:
        seen((a, b))

    @broker.subscriber(f"{subject}-2", group="g")
    async def placed(
        a: int, b: int, *more: tuple[int, ...]
    ) -> None:  # so FastStream wants its type
        seen((a, b, more))

    async with place.started(broker):
        await broker.publish({"a": 1, "b": 1.0}, subject)
        await broker.publish([1, 2.0, 3.0, 4.0], f"{subject}-2")
        assert sorted(await seen.next(2)) == [(1, 1), (1, 2, (3, 4))]


async def test_an_answer_keeps_its_key_headers_and_correlation_id(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="g")
    @broker.publisher(f"{subject}-2", headers={"custom": "0", "by": "publisher"})
    async def answer() -> QmqResponse:
        return QmqResponse(1, key="k", headers={"custom": "1"}, correlation_id="c-1")

    @broker.subscriber(f"{subject}-2", group="g")
    async def handle(message: Annotated[QmqMessage, Context()]) -> None:
        seen((message.body, message.headers["custom"], message.headers["by"]))
        seen((message.raw_message.key, message.correlation_id))

    async with place.started(broker):
        await broker.publish(None, subject)
        assert await seen.next(2) == [(b"1", "1", "publisher"), ("k", "c-1")]


async def test_publishers_above_and_below_the_subscriber_all_send_the_answer(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()
    above = broker.publisher(f"{subject}-above")

    @above
    @broker.subscriber(subject, group="g")
    @broker.publisher(f"{subject}-below")
    async def answer(body: Any) -> Any:
        return body

    @above
    @broker.subscriber(f"{subject}-2", group="g")
    async def answer_too(body: Any) -> Any:
        return body

    @broker.subscriber(f"{subject}-above", group="g")
    async def get_above(body: Any) -> None:
        seen(("above", body))

    @broker.subscriber(f"{subject}-below", group="g")
    async def get_below(body: Any) -> None:
        seen(("below", body))

    async with place.started(broker):
        await broker.publish("one", subject)
        assert sorted(await seen.next(2)) == [("above", "one"), ("below", "one")]
        await broker.publish("two", f"{subject}-2")
        assert await seen.next() == [("above", "two")]


async def test_a_publisher_is_called_by_hand_also_one_made_late(place: Place, subject: str) -> None:
    broker, seen, ids = place.broker(), Seen(), Seen()
    outgoing = broker.publisher(f"{subject}-2")

    @broker.subscriber(subject, group="g")
    async def pass_on(body: Any) -> None:
        await outgoing.publish(body, key="k-1", tags=["eu"])

    @broker.subscriber(f"{subject}-2", group="g")
    async def handle(body: Any, message: Annotated[QmqMessage, Context()]) -> None:
        seen((body, message.raw_message.key, message.raw_message.tags))

    @broker.subscriber(subject, group="ids")
    async def handle_id(message: Annotated[QmqMessage, Context()]) -> None:
        ids(message.message_id)

    async with place.started(broker):
        receipt = await broker.publisher(subject).publish("hello")
        assert await seen.next() == [("hello", "k-1", ("eu",))]
        assert await ids.next() == [str(receipt.id)]
    assert receipt.subject == subject


async def test_an_answer_goes_where_the_message_wants_it_unless_forbidden(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()
    asking = broker.publisher(subject, reply_to=f"{subject}-answers")

    @broker.subscriber(subject, group="g")
    async def answer(body: Any) -> Any:
        return body

    @broker.subscriber(f"{subject}-silent", group="g", no_reply=True)
    async def stay_silent(body: Any) -> Any:
        seen("silent")
        return body

    @broker.subscriber(f"{subject}-answers", group="g")
    async def get_answer(body: Any) -> None:
        seen(body)

    async with place.started(broker):
        await broker.publish("no", f"{subject}-silent", reply_to=f"{subject}-answers")
        assert await seen.next() == ["silent"]
        await broker.publish("hello", subject, reply_to=f"{subject}-answers")
        assert await seen.next() == ["hello"]
        await asking.publish("by the publisher")
        assert await seen.next() == ["by the publisher"]
    assert seen.is_empty


# --- requests -------------------------------------------------------------------------------------


async def test_a_request_returns_the_answer_of_its_handler(place: Place, subject: str) -> None:
    router = QmqRouter(f"{subject}-")
    broker = place.broker(routers=[router], answers=f"{subject}-answers")
    of_router, of_broker = router.publisher("by-router"), broker.publisher(f"{subject}-by-broker")

    @broker.subscriber(f"{subject}-by-broker", group="g")
    async def double(number: int) -> int:
        return 2 * number

    @router.subscriber("by-router", group="g")
    async def answer(body: Any) -> Any:
        return QmqResponse(f"{body}!", headers={"x": "1"})

    async with place.started(broker):
        found = await broker.request(21, f"{subject}-by-broker", timeout=60, correlation_id="c-1")
        assert (await found.decode(), found.correlation_id) == (42, "c-1")
        found = await of_broker.request(22, timeout=60)
        assert await found.decode() == 44
        found = await of_router.request("hello", timeout=60, correlation_id="c-2")
        assert await found.decode() == "hello!"
        assert found.correlation_id == "c-2"
        assert found.headers["x"] == "1"


async def test_a_request_without_an_answer_in_time_fails(place: Place, subject: str) -> None:
    broker, over = place.broker(answers=f"{subject}-answers"), asyncio.Event()

    @broker.subscriber(subject, group="g")
    async def handle(body: Any) -> None:
        await over.wait()

    async with place.started(broker):
        with pytest.raises(TimeoutError):
            await broker.request("hello", subject, timeout=1e-24)
        over.set()


async def test_middlewares_see_a_request_and_its_answer(place: Place, subject: str) -> None:
    class Doubling(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            cmd.body *= 2
            return await call_next(cmd)

        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            msg.body *= 2
            return await call_next(msg)

    router = QmqRouter(f"{subject}-", middlewares=[Doubling])
    broker = place.broker(routers=[router], answers=f"{subject}-answers")
    publisher = router.publisher("x")

    @router.subscriber("x", group="g")
    async def echo(body: Any) -> Any:
        return body

    async with place.started(broker):
        found = await publisher.request("x", timeout=60)
    # Twice for the request, once for the answer that comes; on a node also for the answer that is
    # published.
    assert await found.decode() == "x" * (8 if place.address is None else 16)


async def test_a_request_in_memory_needs_a_subscriber(memory: Place, subject: str) -> None:
    broker = memory.broker()
    async with memory.started(broker):
        with pytest.raises(SubscriberNotFound, match=subject):
            await broker.request("hello", subject)


async def test_two_requests_with_one_correlation_id_are_refused(node: Place, subject: str) -> None:
    broker = node.broker(answers=f"{subject}-answers")

    @broker.subscriber(subject, group="g")
    async def ask_again(body: Any) -> str:
        with pytest.raises(InvalidArgument, match="waits already"):
            await broker.request("again", subject, correlation_id="c-1")
        return "refused"

    async with node.started(broker):
        answer = await broker.request("hello", subject, correlation_id="c-1", timeout=60)
        assert await answer.decode() == "refused"


async def test_answers_do_not_come_over_an_ordered_subject(node: Place, subject: str) -> None:
    async with qmq.connect(node.address, state_dir=False) as mq:
        await mq.metadata.create_subject(
            qmq.SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=16), partitions=1
        )
    broker = node.broker(answers=subject)
    async with node.started(broker):
        with pytest.raises(InvalidArgument, match="answers="):
            await broker.request("hello", f"{subject}-2")


# --- batches --------------------------------------------------------------------------------------


async def test_a_batch_is_sent_together_with_options_for_each_message(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()
    publisher = broker.publisher(f"{subject}-2", batch=True, headers={"by": "publisher"})

    @broker.subscriber(subject, group="g", batch=True)
    @publisher
    async def handle(numbers: list[int], message: Annotated[QmqMessage, Context()]) -> list[Any]:
        keys = [each.key for each in message.raw_message]
        seen(list(zip(numbers, keys, message.batch_headers, strict=True)))
        return [QmqResponse(number, key=f"key-{number}") for number in numbers]

    @broker.subscriber(f"{subject}-2", group="g")
    async def handle_one(number: int, message: Annotated[QmqMessage, Context()]) -> None:
        seen((number, message.raw_message.key, message.headers["by"]))

    async with place.started(broker):
        receipts = await broker.publish_batch(
            1,
            QmqResponse(2, key="own", headers={"h": "2"}),
            subject=subject,
            key="all",
            correlation_id="c",
        )
        assert len(receipts) == 2
        (found,) = await seen.next()
        assert [(number, key) for number, key, _ in found] == [(1, "all"), (2, "own")]
        assert [(headers["correlation_id"], headers.get("h")) for _, _, headers in found] == [
            ("c", None),
            ("c", "2"),
        ]
        assert sorted(await seen.next(2)) == [(1, "key-1", "publisher"), (2, "key-2", "publisher")]
        assert len(await publisher.publish(3, 4)) == 2
        assert sorted(await seen.next(2)) == [(3, None, "publisher"), (4, None, "publisher")]
        assert len(await broker.publish_batch(subject=subject)) == 0


async def test_a_batch_subscriber_takes_single_messages_and_the_other_way_round(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()

    @broker.subscriber(subject, group="batches", batch=True)
    async def handle(bodies: list[str]) -> None:
        seen(bodies)

    @broker.subscriber(f"{subject}-2", group="single")
    async def handle_one(body: str) -> None:
        seen(body)

    async with place.started(broker):
        await broker.publish("alone", subject)
        assert await seen.next() == [["alone"]]
        await broker.publish_batch("a", "b", subject=f"{subject}-2")
        assert sorted(await seen.next(2)) == ["a", "b"]


async def test_a_failed_batch_comes_again_as_a_whole(node: Place, subject: str) -> None:
    broker, seen = node.broker(), Seen()

    @broker.subscriber(subject, group="g", batch=True, messages_max=10)
    async def handle(bodies: list[int], message: Annotated[QmqMessage, Context()]) -> None:
        attempt = message.raw_message[0].attempt
        seen((attempt, bodies))
        if attempt == 1:
            raise LookupError("not yet")

    async with node.started(broker):
        await broker.publish_batch(1, 2, 3, subject=subject)
        assert await seen.next(2) == [(1, [1, 2, 3]), (2, [1, 2, 3])]


@pytest.mark.parametrize("policy", [AckPolicy.ACK_FIRST, AckPolicy.REJECT_ON_ERROR])
async def test_a_batch_that_fails_under_another_policy_does_not_come_again(
    node: Place, subject: str, policy: AckPolicy
) -> None:
    broker, seen = node.broker(), Seen()
    letters = broker.subscriber(f"%dlq%{subject}", group="g", batch=True)

    @broker.subscriber(subject, group=subject, batch=True, ack_policy=policy)
    async def handle(bodies: list[int]) -> None:
        seen(bodies)
        raise LookupError("never")

    async with node.started(broker):
        await broker.publish_batch(1, 2, subject=subject)
        assert await seen.next() == [[1, 2]]
        if policy is AckPolicy.REJECT_ON_ERROR:
            letter = await letters.get_one(timeout=60)
            assert await letter.decode() == [1, 2]
            await letter.ack()
        await broker.publish_batch(3, subject=subject)
        assert await seen.next() == [[3]]


async def test_a_batch_of_an_ordered_subject_comes_in_order_and_again(
    node: Place, subject: str
) -> None:
    async with qmq.connect(node.address, state_dir=False) as mq:
        await mq.metadata.create_subject(
            qmq.SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=16), partitions=1
        )
    broker, seen = node.broker(), Seen()

    @broker.subscriber(subject, group="g", batch=True, retry_delays_s=(0.01,))
    async def handle(bodies: list[int], message: Annotated[QmqMessage, Context()]) -> None:
        seen((message.raw_message[0].attempt, bodies))
        if message.raw_message[0].attempt == 1 and 3 in bodies:
            await message.reject()

    async with node.started(broker):
        await broker.publish_batch(1, 2, 3, subject=subject, key="k")
        handled: list[tuple[int, list[int]]] = []
        while not any(attempt == 2 and 3 in bodies for attempt, bodies in handled):
            handled += await seen.next()
    assert [number for attempt, bodies in handled if attempt == 1 for number in bodies] == [1, 2, 3]


async def test_a_batch_is_asked_for_by_hand(node: Place, subject: str) -> None:
    broker = node.broker()
    subscriber = broker.subscriber(subject, group="g", batch=True)
    async with node.started(broker):
        assert await subscriber.get_one(timeout=0) is None
        await broker.publish_batch("a", "b", subject=subject, delay=timedelta(milliseconds=1))
        bodies: list[str] = []
        while len(bodies) < 2:
            message = await subscriber.get_one(timeout=60)
            bodies += await message.decode()
            await message.ack()
    assert sorted(bodies) == ["a", "b"]


# --- commands: pure -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "bodies"),
    [
        (None, ()),
        ((), ()),
        ("123", ("123",)),
        ("", ("",)),
        (b"", (b"",)),
        ([1, 2, 3], (1, 2, 3)),
        ([0, 1, 2], (0, 1, 2)),
    ],
    ids=["none", "empty", "text", "empty-text", "empty-bytes", "list", "list-with-0"],
)
def test_what_a_handler_returns_is_the_bodies_of_a_batch(body: Any, bodies: Sequence[Any]) -> None:
    command = QmqPublishCommand.from_cmd(ensure_response(body).as_publish_command(), batch=True)
    assert command.batch_bodies == bodies


SHUFFLED = [("A", "1"), ("C", "2"), ("B", "3"), ("A", "4"), ("B", "5"), ("A", "6"), ("A", "7")]


@pytest.mark.parametrize(
    ("before", "bodies", "keys"),
    [
        ([("A", "a"), ("B", "b")], "BA", ["b", "a"]),
        ([("A", "a"), ("B", "b"), ("C", "c")], "BC", ["b", "c"]),
        ([("A", "a"), ("B", "b"), ("B", "b")], "BBA", ["b", "b", "a"]),
        ([("A", "1"), ("A", "2"), ("B", "3")], "AB", ["1", "3"]),
        ([("A", None), ("B", "b"), ("B", None)], "BBA", ["b", None, None]),
        (SHUFFLED, "ACBABAA", ["1", "2", "3", "4", "5", "6", "7"]),
        (SHUFFLED, "AABABCA", ["1", "4", "3", "6", "5", "2", "7"]),
        ([("A", "a"), ("B", "b")], "XY", ["a", "b"]),
        ([("A", "a"), ("B", "b")], "XYZ", [None, None, None]),
    ],
    ids=[
        "reversed",
        "first-dropped",
        "duplicates",
        "deduplicated",
        "no-key",
        "shuffled",
        "reversed-shuffled",
        "changed",
        "other-number",
    ],
)
def test_keys_stay_with_their_bodies_when_a_middleware_changes_the_batch(
    before: Any, bodies: str, keys: Any
) -> None:
    options = [MessageOptions(key=key) for _, key in before]
    assert [each.key for each in aligned([body for body, _ in before], options, bodies)] == keys


async def test_a_middleware_that_reverses_a_batch_keeps_keys_with_bodies(
    place: Place, subject: str
) -> None:
    class Reversing(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            cmd.batch_bodies = tuple(reversed(cmd.batch_bodies))
            return await call_next(cmd)

    broker, seen = place.broker(middlewares=[Reversing]), Seen()

    @broker.subscriber(subject, group="g", batch=True)
    async def handle(bodies: list[str], message: Annotated[QmqMessage, Context()]) -> None:
        seen([(body, each.key) for body, each in zip(bodies, message.raw_message, strict=True)])

    async with place.started(broker):
        await broker.publish_batch(
            QmqResponse("a", key="key-a"), QmqResponse("b", key="key-b"), "c", subject=subject
        )
        assert await seen.next() == [[("c", None), ("b", "key-b"), ("a", "key-a")]]
