"""Interceptors: the order of the calls, and what an interceptor changes in messages."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import eventually, node_config, running

import qmq
from qmq import blocking
from qmq.client.client import Client
from qmq.client.consuming.consumer import Consumer
from qmq.client.consuming.message import Message
from qmq.client.consuming.ordered.message import OrderedMessage
from qmq.client.interceptors import BaseInterceptor, Chain, Outgoing
from qmq.client.producing.producer import Producer
from qmq.client.tracing import TraceContext
from qmq.errors import ClientClosed, InvalidArgument, MessageTooLarge
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
MESSAGE: Any = SimpleNamespace()


class Recorder(BaseInterceptor):
    """Records in a story what it sees."""

    def __init__(self, story: list[str], name: str = "a", **headers: str) -> None:
        self.story = story
        self.name = name
        self.headers = headers
        self.receipts: list[qmq.Receipt] = []
        self.outgoing: list[Outgoing] = []

    def sending(self, outgoing: Outgoing) -> Mapping[str, str]:
        self.story.append(f"{self.name} sending {outgoing.count}")
        self.outgoing.append(outgoing)
        return self.headers

    def sent(self, outgoing: Outgoing, receipts: Iterable[qmq.Receipt]) -> None:
        self.story.append(f"{self.name} sent")
        self.receipts += receipts

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        self.story.append(f"{self.name} failed {type(error).__name__}")

    @contextmanager
    def handling(self, message: Any, group: str) -> Iterator[None]:
        self.story.append(f"{self.name} in {group}")
        try:
            yield
        except BaseException as error:
            self.story.append(f"{self.name} saw {type(error).__name__}")
            raise
        finally:
            self.story.append(f"{self.name} out")


class Refusing(BaseInterceptor):
    """Raises wherever it can."""

    def sending(self, outgoing: Outgoing) -> Mapping[str, str]:
        raise ValueError("not this one")

    def sent(self, outgoing: Outgoing, receipts: Iterable[qmq.Receipt]) -> None:
        raise ValueError("sent")

    def failed(self, outgoing: Outgoing, error: Exception) -> None:
        raise ValueError("failed")


class Swallowing(BaseInterceptor):
    """Would have a failed message count as handled."""

    @contextmanager
    def handling(self, message: Any, group: str) -> Iterator[None]:
        try:
            yield
        except KeyError:
            pass


class Numbering(BaseInterceptor):
    """Another header for each message."""

    def sending(self, outgoing: Outgoing) -> Sequence[Mapping[str, str]]:
        return [{"number": str(number)} for number in range(outgoing.count)]


def outgoing(*headers: dict[str, bytes]) -> Outgoing:
    count = len(headers)
    return Outgoing("s", count, [None] * count, [()] * count, list(headers))


# --- the chain ------------------------------------------------------------------------------------


def test_the_first_one_is_the_outermost() -> None:
    story: list[str] = []
    chain = Chain([Recorder(story, "a"), Recorder(story, "b")])
    told = outgoing({})
    chain.sending(told)
    chain.sent(told, ())
    chain.failed(told, InvalidArgument("x"))
    with chain.handling(MESSAGE, "g"):
        story.append("handler")
    assert story == [
        "a sending 1",
        "b sending 1",
        "b sent",
        "a sent",
        "b failed InvalidArgument",
        "a failed InvalidArgument",
        "a in g",
        "b in g",
        "handler",
        "b out",
        "a out",
    ]


def test_headers_of_the_application_stay_and_of_interceptors_the_last_wins() -> None:
    chain = Chain([Recorder([], "a", x="a", y="a"), Recorder([], "b", y="b", z="b")])
    told = outgoing({"x": b"own"}, {})
    chain.sending(told)
    assert told.headers == [{"x": b"own", "y": b"b", "z": b"b"}, {"x": b"a", "y": b"b", "z": b"b"}]


def test_each_message_can_get_headers_of_its_own() -> None:
    told = outgoing({}, {})
    Chain([Numbering()]).sending(told)
    assert told.headers == [{"number": b"0"}, {"number": b"1"}]


@pytest.mark.parametrize(
    "added", [{"qmq-group": "g"}, {"": "x"}, {"a": 1}, [{}], [{}, {}, {}]], ids=str
)
def test_headers_that_cannot_be_sent_are_refused(added: Any) -> None:
    interceptor = Recorder([])
    interceptor.sending = lambda outgoing: added  # type: ignore[method-assign]
    with pytest.raises(InvalidArgument):
        Chain([interceptor]).sending(outgoing({}, {}))


def test_earlier_interceptors_hear_of_the_refusal_of_a_later_one() -> None:
    story: list[str] = []
    chain = Chain([Recorder(story, "a"), Refusing(), Recorder(story, "b")])
    with pytest.raises(ValueError, match="not this one"):
        chain.sending(outgoing({}))
    assert story == ["a sending 1", "a failed ValueError"]


def test_an_interceptors_error_in_sent_or_failed_is_logged_and_others_are_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story: list[str] = []
    chain = Chain([Recorder(story, "a"), Refusing()])
    with caplog.at_level(logging.ERROR, "qmq.client"):
        chain.sent(outgoing({}), ())
        chain.failed(outgoing({}), InvalidArgument("x"))
    assert story == ["a sent", "a failed InvalidArgument"]
    assert len(caplog.records) == 2


def test_every_interceptor_sees_the_handlers_exception_and_none_swallows_it() -> None:
    story: list[str] = []
    with (
        pytest.raises(KeyError),
        Chain([Recorder(story, "a"), Swallowing()]).handling(MESSAGE, "g"),
    ):
        raise KeyError
    assert story == ["a in g", "a saw KeyError", "a out"]


def test_an_exception_on_the_way_in_or_out_is_seen_by_those_outside() -> None:
    class Breaking(BaseInterceptor):
        def __init__(self, *, on_the_way_in: bool) -> None:
            self.on_the_way_in = on_the_way_in

        @contextmanager
        def handling(self, message: Any, group: str) -> Iterator[None]:
            if self.on_the_way_in:
                raise OSError
            yield
            raise OSError

    for on_the_way_in in (True, False):
        story: list[str] = []
        with (
            pytest.raises(OSError),  # noqa: PT011
            Chain([Recorder(story, "a"), Breaking(on_the_way_in=on_the_way_in)]).handling(
                MESSAGE, "g"
            ),
        ):
            story.append("handler")
        assert story == ["a in g", *(["handler"] * (not on_the_way_in)), "a saw OSError", "a out"]


async def test_a_client_without_interceptors_makes_the_plain_producers_and_consumers() -> None:
    plain, told = Client("localhost:1"), Client("localhost:1", interceptors=[Recorder([])])
    assert not plain.interceptors
    with plain.interceptors.handling(MESSAGE):
        pass
    assert (type(plain.producer("s")), type(plain.consumer("s", "g"))) == (Producer, Consumer)
    assert isinstance(told.producer("s"), Producer)
    assert type(told.producer("s")) is not Producer
    for client in (plain, told):
        await client.close()


async def test_refused_and_abandoned_messages_are_reported() -> None:
    story: list[str] = []
    mq = Client("localhost:1", interceptors=[Recorder(story)])
    for producer, key in (
        (mq.producer("s"), None),
        (mq.ordered_producer("o"), "k"),
        (mq.delayed_producer("d"), None),
    ):
        story.clear()
        due: dict[str, Any] = (
            {"due_ms": 1} if type(producer).__name__.endswith("DelayedProducer") else {}
        )
        with pytest.raises(MessageTooLarge):
            producer.send(b"x" * 20_000_000, key, **due)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            producer.send(b"x", key, headers={"qmq-x": "1"}, **due)  # type: ignore[arg-type]
        ticket = producer.send(b"x", key, **due)  # type: ignore[arg-type]
        many = producer.send_many([b"x", b"y"], ["k", "k"], **due)
        producer.abort()
        assert story == [
            "a sending 1",
            "a failed MessageTooLarge",
            "a sending 1",
            "a sending 2",
            "a failed ClientClosed",
            "a failed ClientClosed",
        ]
        for each in (ticket, *many.tickets):
            with pytest.raises(ClientClosed):
                await each
    await mq.close()


# --- through a node -------------------------------------------------------------------------------


async def first(consumer: qmq.Consumer | qmq.OrderedConsumer) -> Message | OrderedMessage:
    async with asyncio.timeout(30):
        return await anext(consumer)


async def test_a_loop_is_around_each_message_until_it_comes_back(node: Node) -> None:
    story: list[str] = []
    async with qmq.connect(node.address, interceptors=[Recorder(story, "a", via="a")]) as mq:
        receipts = await mq.send_many("s", [b"1", b"2"], headers=[{"own": "x"}, {}])
        single = await mq.send("s", b"3", key="k", tags=["t"])
        recorder: Any = mq.interceptors[0]
        assert recorder.receipts == [*receipts, single]
        assert [each.is_batch for each in recorder.outgoing] == [True, False]
        assert (recorder.outgoing[1].keys, recorder.outgoing[1].tags) == (("k",), (("t",),))
        story.clear()
        with pytest.raises(KeyError):
            async with mq.consumer("s", "g") as consumer:
                async for message in consumer:
                    story.append(f"handler {message.body.decode()} {dict(message.headers)}")
                    if message.body == b"3":
                        raise KeyError
        assert story == [
            "a in g",
            "handler 1 {'own': b'x', 'via': b'a'}",
            "a out",
            "a in g",
            "handler 2 {'via': b'a'}",
            "a out",
            "a in g",
            "handler 3 {'via': b'a'}",
            "a saw KeyError",
            "a out",
        ]
        again = await first(mq.consumer("s", "g"))
        assert (again.body, again.attempt) == (b"3", 2)


async def test_a_loop_over_an_ordered_subject_is_around_each_message(node: Node) -> None:
    story: list[str] = []
    async with qmq.connect(node.address, interceptors=[Recorder(story, "a")]) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("ordered", order=Order.STRICT, logical_partitions=64)
        )
        await mq.send_many("ordered", [b"1", b"2"], keys=["k", "k"])
        story.clear()
        async with mq.ordered_consumer("ordered", "g") as consumer:
            async for message in consumer:
                story.append(message.body.decode())
                if message.body == b"2":
                    break
        assert story == ["a in g", "1", "a out", "a in g", "2", "a out"]


class Settled(BaseInterceptor):
    """Records the verdicts that it gets."""

    def __init__(self) -> None:
        self.reports: list[qmq.SettleReport] = []

    def settled(self, report: qmq.SettleReport) -> None:
        self.reports.append(report)
        raise OSError("no disk")

    @property
    def counts(self) -> Counter[str]:
        """Messages by verdict, over all requests."""
        return sum((Counter(each.verdicts) for each in self.reports), Counter())


async def test_interceptors_hear_of_all_verdicts_and_cannot_harm_them(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    told = Settled()
    async with qmq.connect(node.address, interceptors=[told]) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(4)])
        async with mq.consumer("s", "g", ack="explicit") as consumer:
            found = [await first(consumer) for _ in range(4)]
            await found[0].ack_sync()
            found[1].ack_later()
            found[2].nack(timedelta(minutes=5))
            found[3].reject("no use")
    assert told.counts == {"ack": 2, "nack": 1, "reject": 1}
    assert {(each.subject, each.group, each.error) for each in told.reports} == {("s", "g", None)}
    assert all(
        each.began_ns <= each.ended_ns and each.broker_group and each.server
        for each in told.reports
    )
    assert "failed when messages of s were settled" in caplog.text


async def test_interceptors_hear_of_the_verdicts_on_ordered_messages(node: Node) -> None:
    told = Settled()
    async with qmq.connect(node.address, interceptors=[told]) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("ordered", order=Order.STRICT, logical_partitions=64), partitions=1
        )
        await mq.send_many("ordered", [b"1", b"2", b"3"], keys=["a", "b", "a"])
        async with mq.ordered_consumer("ordered", "g") as consumer:
            async with asyncio.timeout(30):
                await (await anext(consumer)).ack()
                (await anext(consumer)).fail()
                await (await anext(consumer)).ack()
    assert told.counts == {"ack": 2, "fail": 1}


async def test_a_message_whose_interceptor_raises_is_not_lost(node: Node) -> None:
    class Once(BaseInterceptor):
        broken = True

        @contextmanager
        def handling(self, message: Any, group: str) -> Iterator[None]:
            if self.broken and group == "in":
                raise OSError("in")
            yield
            if self.broken:
                raise OSError("out")

    once = Once()
    async with qmq.connect(node.address, interceptors=[once]) as mq:
        await mq.send("s", b"x")
        for group in ("in", "out"):
            once.broken = True
            consumer = mq.consumer("s", group)
            with pytest.raises(OSError, match=group):
                async for _ in consumer:
                    pass
            once.broken = False
            assert (await first(consumer)).attempt == 2


async def test_traces_go_through_delayed_and_ordered_messages(tmp_path: Path) -> None:
    config = node_config(tmp_path, delay=True)
    async with (
        running(config) as node,
        qmq.connect(node.address, interceptors=[TraceContext()]) as mq,
    ):
        await mq.metadata.create_subject(
            SubjectConfig("ordered", order=Order.STRICT, logical_partitions=64), partitions=1
        )
        await mq.send("start", b"x", headers={"traceparent": PARENT})
        handled = asyncio.Event()

        async def handle(message: OrderedMessage) -> None:
            await mq.send("end", b"x")
            handled.set()

        async with (
            mq.consumer("start", "g") as starting,
            mq.consumer("late", "g") as late,
            mq.consumer("end", "g") as ending,
        ):
            await first(starting)
            await mq.send("late", b"x", delay=timedelta(milliseconds=1))
            assert (await first(late)).headers["traceparent"] == PARENT
            await mq.send_many("ordered", [b"x"], keys=["k"])
            await starting.close()
            await late.close()
            async with mq.ordered_consumer("ordered", "g") as consumer:
                running_ = asyncio.create_task(consumer.run(handle))
                async with asyncio.timeout(30):
                    await handled.wait()
            await running_
            assert (await first(ending)).headers["traceparent"] == PARENT


async def test_traces_go_through_dead_letters_and_their_replay(node: Node) -> None:
    async with (
        qmq.connect(node.address, interceptors=[TraceContext()]) as mq,
        mq.consumer("s", "g") as consumer,
    ):
        await mq.send("s", b"x", headers={"traceparent": PARENT})
        message = await first(consumer)
        assert isinstance(message, Message)
        message.reject("no use")
        share = node.store.open_queue("s", 0).share("g")
        await eventually(lambda: share.deaths and not share.dying)
        (letter,) = await mq.dead_letters("g").show()
        assert letter.headers["traceparent"] == PARENT
        assert await mq.dead_letters("g").replay() == 1
        again = await first(consumer)
        assert (again.headers["traceparent"], again.id) == (PARENT, message.id)


def test_without_asyncio_handling_is_in_the_callers_thread(node_process: Any) -> None:
    story: list[str] = []
    trace = TraceContext()
    with blocking.connect(node_process.start(), interceptors=[Recorder(story), trace]) as mq:
        mq.send("s", b"1", headers={"traceparent": PARENT})
        for message in mq.consumer("s", "g"):
            if message.body == b"2":
                assert message.headers["traceparent"] == PARENT
                break
            mq.send("s", b"2")
        del message
    assert story == [
        "a sending 1",
        "a sent",
        "a in g",
        "a sending 1",
        "a sent",
        "a out",
        "a in g",
        "a saw GeneratorExit",
        "a out",
    ]
