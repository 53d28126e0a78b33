"""Listeners of unordered subjects against a real node: the handler's result decides the outcome of
its message.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support import eventually

import qmq
from qmq.client.consuming.message import BatchSlice, DecodedBatch
from qmq.client.listening.message_handling import settle_from_threads
from qmq.errors import DelayTooLong, InvalidArgument, UnknownSubject
from qmq.node.dev_node import Node
from qmq.wire.batch import BatchView, Envelope, encode
from qmq.wire.batch_columns import Columns

NOW = timedelta(0)
TINY = timedelta(milliseconds=20)
LONG = timedelta(hours=1)


@dataclass
class Order:
    id: int
    kind: str = ""


class Session:
    pass


async def test_each_message_is_handled_once_and_acknowledged(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        seen: Counter[int] = Counter()
        at_once = most = 0

        @mq.listener("order.created", group="billing", concurrency=16)
        async def on_order(order: Order) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            seen[order.id] += 1

        for number in range(3):
            await mq.send("order.created", Order(number))
        await mq.send_many(
            "order.created", [qmq.payload.encode(Order(number)) for number in range(3, 3_000)]
        )
        async with mq.listening():
            await eventually(lambda: len(seen) == 3_000)
        assert set(seen.values()) == {1}
        assert most == 16
        assert len(await mq.consumer("order.created", "billing").pull(10, TINY)) == 0


async def test_a_handler_that_raises_sees_its_message_again_with_the_delay_of_its_attempt(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        attempts: list[int] = []

        @mq.listener("s", group="g", retry_delays=[NOW, TINY])
        async def fails(body: bytes, context: qmq.Context) -> None:
            attempts.append(context.attempt)
            if context.attempt == 3:
                raise qmq.Retry("not yet", after=NOW)
            if context.attempt < 5:
                raise ValueError(body)
            mq.stop()

        await mq.send("s", "x")
        await mq.run()
        assert attempts == [1, 2, 3, 4, 5]


async def test_rejected_and_undecodable_messages_are_dead_at_once_with_the_reason(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        seen: list[Order] = []

        @mq.listener("s", group="g")
        async def handler(order: Order, *, context: qmq.Context) -> None:
            seen.append(order)
            if order.kind == "raised":
                raise qmq.Reject("no such customer")
            if order.kind == "said":
                context.reject("no such shop")

        @mq.listener("s", group="lenient", on_undecodable="skip")
        async def lenient(order: Order) -> None:
            if order.id == 3:
                mq.stop()

        for body in (Order(1, "raised"), Order(2, "said"), b'{"id":"x"}', Order(3)):
            await mq.send("s", body)
        await mq.run()
        async with mq.listening():
            await eventually(lambda: len(seen) == 3)
        letters: dict[str, tuple[int, bytes]] = {}
        async with asyncio.timeout(20):
            while len(letters) < 3:
                letters = {
                    each.error: (each.attempts, each.body)
                    for each in await mq.dead_letters("g").show()
                }
        assert letters == {
            "no such customer": (1, b'{"id":1,"kind":"raised"}'),
            "no such shop": (1, b'{"id":2,"kind":"said"}'),
            "ValidationError: Expected `int`, got `str` - at `$.id`": (1, b'{"id":"x"}'),
        }
        assert not await mq.dead_letters("lenient").describe()


async def test_a_handler_that_takes_too_long_is_cancelled_and_its_message_comes_again(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        was_cancelled: list[bool] = []
        deadlines: list[datetime | None] = []

        @mq.listener("s", group="g", timeout=TINY, retry_delays=[NOW])
        async def hangs(body: bytes, context: qmq.Context) -> None:
            deadlines.append(context.deadline)
            if context.attempt == 2:
                raise TimeoutError("one of its own")
            if context.attempt > 2:
                mq.stop()
                return
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_cancelled.append(True)
                raise

        before = datetime.now(UTC)
        await mq.send("s", b"x")
        await mq.run()
        assert was_cancelled == [True]
        assert len(deadlines) == 3
        assert all(
            each is not None and before <= each + timedelta(milliseconds=1) < before + LONG
            for each in deadlines
        )


async def test_a_plain_function_runs_in_a_thread_with_a_blocking_client(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        threads: set[int] = set()
        seen: list[str] = []

        @mq.listener("s", group="g", concurrency=4, retry_delays=[NOW])
        def work(text: str, context: qmq.Context) -> None:
            threads.add(threading.get_ident())
            if context.attempt == 1:
                raise StopIteration  # an exception that no future carries
            context.mq.send("done", text.upper())

        @mq.listener("done", group="g")
        async def done(text: str) -> None:
            seen.append(text)
            if len(seen) == 20:
                mq.stop()

        for number in range(20):
            await mq.send("s", f"x{number}")
        await mq.run()
        assert sorted(seen) == sorted(f"X{number}" for number in range(20))
        assert threading.get_ident() not in threads


async def test_a_thread_that_times_out_keeps_its_place_and_its_late_verdict_is_void(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        release, late = threading.Event(), threading.Event()
        attempts: list[int] = []
        names: set[str] = set()

        @mq.listener(
            "s", group="g", concurrency=2, timeout=timedelta(milliseconds=300), retry_delays=[NOW]
        )
        def hangs(message: qmq.Message) -> None:
            attempts.append(message.attempt)
            names.add(threading.current_thread().name)
            if message.attempt == 1:
                release.wait(20)
                message.ack_later()
                late.set()
            elif message.attempt < 5:
                raise ValueError

        await mq.send("s", b"x")
        async with mq.listening():
            # Handed back while the first thread still runs, and worked on by the other one.
            await eventually(lambda: attempts == [1, 2, 3, 4, 5])
            assert not late.is_set()
            release.set()
            await asyncio.to_thread(late.wait, 20)
        assert len(names) == 2
        assert len(await mq.consumer("s", "g").pull(10, TINY)) == 0


async def test_an_early_verdict_holds_whatever_the_handler_does_later(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        seen: list[tuple[str, int]] = []

        @mq.listener("s", group="g", retry_delays=[LONG])
        async def in_loop(word: str, context: qmq.Context) -> None:
            seen.append((word, context.attempt))
            _say(word, context)

        @mq.listener("s", group="threads", retry_delays=[LONG])
        def in_thread(word: str, context: qmq.Context) -> None:
            seen.append((word, context.attempt))
            _say(word, context)

        def _say(word: str, context: qmq.Context) -> None:
            if word == "ack":
                context.ack()
                raise ValueError("too late")
            if word == "nack" and context.attempt == 1:
                context.nack(NOW, "again")
            if word == "message" and context.attempt == 1:
                assert isinstance(context.message, qmq.Message)
                context.message.nack(NOW)

        for word in ("ack", "nack", "message"):
            await mq.send("s", word)
        async with mq.listening():
            await eventually(lambda: len(seen) == 10)
        assert Counter(seen) == {
            ("ack", 1): 2,
            ("nack", 1): 2,
            ("nack", 2): 2,
            ("message", 1): 2,
            ("message", 2): 2,
        }
        for group in ("g", "threads"):
            assert len(await mq.consumer("s", group).pull(10, TINY)) == 0


class Settler:
    """Remembers in which thread it was called."""

    subject, broker_group = "s", "g1"

    def __init__(self) -> None:
        self.threads: list[int] = []

    def ack(self, pull: int) -> None:
        self.threads.append(threading.get_ident())

    def settle(self, first: int, last: int, verdict: int, delay: int = 0, error: str = "") -> None:
        self.threads.append(threading.get_ident())

    def nack(self, part: BatchSlice, delay: timedelta | None, error: str = "") -> None:
        self.threads.append(threading.get_ident())

    async def settle_now(self, first: int, last: int, verdict: int) -> None:
        self.threads.append(threading.get_ident())


async def test_verdicts_of_threads_are_given_in_the_event_loops_thread() -> None:
    settler = Settler()
    _, region = encode(b"s", Columns([b"x"]), producer_id=1, batch_sequence=1, create_time_ms=1)
    message = qmq.Message(
        settler, DecodedBatch(BatchView(Envelope(0, 0, 0, 0, 0, 0, 0, 0), region)), 0, 1, 5
    )
    settle_from_threads(message, asyncio.get_running_loop())
    message.ack_later()
    await asyncio.to_thread(message.ack_later)
    await asyncio.to_thread(message.nack, NOW)
    with pytest.raises(DelayTooLong):
        await asyncio.to_thread(message.nack, timedelta(days=1_000))
    await asyncio.sleep(0)
    assert settler.threads == [threading.get_ident()] * 3


class Spy(qmq.BaseInterceptor):
    """Sees how handlers end, and sets a context variable for them."""

    inside: contextvars.ContextVar[str] = contextvars.ContextVar("inside", default="")

    def __init__(self) -> None:
        self.seen: list[str] = []

    def handling(self, message: Any, group: str) -> AbstractContextManager[object]:
        return self._around(group)

    @contextmanager
    def _around(self, group: str) -> Iterator[None]:
        token = self.inside.set(group)
        try:
            yield
        except Exception as error:
            self.seen.append(f"{group} {type(error).__name__}")
            raise
        finally:
            self.inside.reset(token)


async def test_interceptors_are_around_each_handler_and_see_how_it_ends(node: Node) -> None:
    spy = Spy()
    async with qmq.connect(node.address, interceptors=[spy]) as mq:
        inside: list[str] = []

        @mq.listener("s", group="loop", retry_delays=[LONG])
        async def in_loop(body: bytes) -> None:
            inside.append(Spy.inside.get())
            raise ValueError

        @mq.listener("s", group="thread", retry_delays=[LONG], timeout=LONG)
        def in_thread(body: bytes) -> None:
            inside.append(Spy.inside.get())
            raise KeyError

        @mq.listener("s", group="batch", retry_delays=[LONG], batch=(10, NOW))
        async def many(bodies: list[bytes]) -> None:
            inside.append(Spy.inside.get())
            raise OSError

        @mq.listener("s", group="poison", on_undecodable="skip")
        async def poison(order: Order) -> None: ...

        await mq.send("s", b"x")
        async with mq.listening():
            await eventually(lambda: len(spy.seen) == 4)
        assert sorted(inside) == ["batch", "loop", "thread"]
        assert sorted(spy.seen) == [
            "batch OSError",
            "loop ValueError",
            "poison UndecodableBody",
            "thread KeyError",
        ]


async def test_a_provider_runs_for_each_message_and_sees_the_handlers_end(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        told: list[str] = []

        @asynccontextmanager
        async def session(context: qmq.Context) -> AsyncIterator[Session]:
            try:
                yield Session()
            except ValueError:
                told.append(f"rolled back {context.attempt}")
                raise
            told.append("committed")

        @mq.listener("s", group="g", retry_delays=[NOW])
        async def handler(body: bytes, session: Session, settings: dict) -> None:  # type: ignore[type-arg]
            assert settings == {"a": 1}
            if not told:
                raise ValueError

        @mq.listener("s", group="thread", retry_delays=[LONG])
        def in_thread(body: bytes, session: Session) -> None:
            told.append("called, though what provides its session needs an event loop")

        with pytest.raises(InvalidArgument, match="handler takes a Session, which is not provided"):
            await mq.run()
        mq.provide(Session, session)
        mq.provide(dict, lambda: {"a": 1})
        await mq.send("s", b"x")
        async with mq.listening():
            await eventually(lambda: len(told) == 2)
        assert told == ["rolled back 1", "committed"]


async def test_a_batch_is_acknowledged_except_messages_with_another_verdict(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        batches: list[list[int]] = []

        @mq.listener("s", group="g", batch=(10, timedelta(seconds=20)), retry_delays=[NOW])
        async def handler(orders: list[Order], context: qmq.Context) -> None:
            batches.append([each.id for each in orders])
            if len(batches) == 1:
                raise ValueError("all of them again")
            (third,) = [each for each in context.messages if b"3" in each.body]
            assert isinstance(third, qmq.Message)
            third.reject("not this one")
            mq.stop()

        await mq.send("s", b"poison")
        for number in range(4):
            await mq.send("s", Order(number))
        async with mq.listening() as listening:
            await mq.send_many("s", [qmq.payload.encode(Order(number)) for number in range(4, 9)])
            # what decodes comes again, and waits for a tenth
            await eventually(lambda: len(batches) == 1)
            await mq.send("s", Order(9))
            await listening.wait()
        assert [sorted(each) for each in batches] == [list(range(9)), list(range(10))]
        async with mq.consumer("s", "g", ack="explicit") as rest:
            assert len(await rest.pull(10, TINY)) == 0
        errors: set[str] = set()
        async with asyncio.timeout(20):
            while len(errors) < 2:
                errors = {each.error for each in await mq.dead_letters("g").show()}
        assert errors == {
            "not this one",
            "DecodeError: JSON is malformed: invalid character (byte 0)",
        }


async def test_most_once_and_broadcast_are_passed_on(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        once: list[bytes] = []
        by_name: Counter[str] = Counter()

        @mq.listener("s", group="once", most_once=True)
        async def fails(body: bytes) -> None:
            once.append(body)
            raise ValueError

        for name in ("a", "b"):

            async def everyone(body: bytes, name: str = name) -> None:
                by_name[name] += 1

            mq.listen("s", everyone, "all", broadcast=True, name=name, start="earliest")
        await mq.send_many("s", [b"1", b"2", b"3"])
        async with mq.listening():
            await eventually(lambda: len(once) == 3 and by_name == {"a": 3, "b": 3})
        assert once == [b"1", b"2", b"3"]
        assert len(await mq.consumer("s", "once").pull(10, TINY)) == 0


async def test_tags_choose_what_a_listener_is_given(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        seen: list[bytes] = []

        @mq.listener("s", group="g", tags_any=["a", "b"], tags_all=["x"])
        async def handler(body: bytes) -> None:
            seen.append(body)

        for tags in (["a"], ["a", "x"], ["x"], ["b", "x"], []):
            await mq.send("s", "".join(tags), tags=tags)
        async with mq.listening():
            await eventually(lambda: len(seen) == 2)
        assert seen == [b"ax", b"bx"]


async def test_a_listener_that_cannot_continue_stops_the_others_with_grace_and_is_raised(
    node: Node,
) -> None:
    async with qmq.connect(node.address, create_subjects=False) as mq:
        await mq.metadata.create_subject(qmq.SubjectConfig("there"))
        finished: list[bytes] = []
        began = asyncio.Event()

        @mq.listener("there", group="g")
        async def slow(body: bytes) -> None:
            began.set()
            for _ in range(20):
                await asyncio.sleep(0.005)
            finished.append(body)

        await mq.send("there", b"x")
        with pytest.raises(UnknownSubject):
            async with mq.listening() as listening:
                await began.wait()
                mq.listen("nowhere", slow, "g")
                await listening.wait()
        assert finished == [b"x"]
        assert len(await mq.consumer("there", "g").pull(10, TINY)) == 0
