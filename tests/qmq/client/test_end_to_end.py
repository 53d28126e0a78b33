"""Sending and consuming through a real node over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support import eventually, node_config, running
from support.retention import begin_retention

import qmq
import qmq.blocking
from qmq.errors import (
    ClientClosed,
    InvalidArgument,
    InvalidName,
    MessageNotFound,
    MessagesExpired,
    MessageTooLarge,
    NotConnected,
    StaleDelivery,
    SubjectExists,
    UnknownGroup,
    UnknownSubject,
)
from qmq.limits import MIB
from qmq.log.log_config import Flush, LogConfig
from qmq.model import Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.wire.frame import FrameKind

SHORT = timedelta(seconds=0.2)


async def collect(consumer: qmq.Consumer, count: int) -> list[qmq.Message]:
    found: list[qmq.Message] = []
    async with asyncio.timeout(30):
        async for message in consumer:
            found.append(message)
            if len(found) == count:
                message.ack_later()
                return found
    raise AssertionError


@pytest.mark.parametrize("flush", list(Flush))
async def test_a_message_arrives_with_everything_it_was_sent_with(
    tmp_path: Path, flush: Flush
) -> None:
    async with (
        running(node_config(tmp_path, LogConfig(flush=flush))) as node,
        qmq.connect(node.address) as mq,
    ):
        before = datetime.now(UTC) - timedelta(seconds=1)
        receipt = await mq.send(
            "a.b", b"body", key="k", tags=["x", "y"], headers={"h": "v", "b": b"\0"}
        )
        (message,) = await collect(mq.consumer("a.b", "g"), 1)
        assert (message.subject, message.sequence, message.body, message.key) == (
            "a.b",
            0,
            b"body",
            "k",
        )
        assert (message.tags, dict(message.headers), message.attempt) == (
            ("x", "y"),
            {"h": b"v", "b": b"\0"},
            1,
        )
        assert (receipt.sequence, receipt.id) == (0, message.id)
        assert before < message.create_time < datetime.now(UTC) + timedelta(seconds=1)
        stored = await mq.metadata.find_message("a.b", str(receipt.id))
        assert (stored.body, stored.key, list(stored.tags)) == (b"body", b"k", ["x", "y"])


async def test_receipts_name_the_message_they_belong_to(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        single = await asyncio.gather(*[mq.send("s", b"%d" % number) for number in range(100)])
        many = list(
            await mq.send_many(
                "s", [b"%d" % number for number in range(100, 3500)], keys=["k"] * 3400
            )
        )
        found = {message.id: message for message in await collect(mq.consumer("s", "g"), 3500)}
        for number, receipt in enumerate([*single, *many]):
            assert found[receipt.id].body == b"%d" % number
            assert found[receipt.id].sequence == receipt.sequence


async def test_several_consumers_share_one_backlog_and_each_message_goes_to_one(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(10_000)])
        seen: Counter[bytes] = Counter()
        by_consumer: Counter[int] = Counter()

        async def work(number: int) -> None:
            consumer = mq.consumer("s", "g", prefetch=100)
            while sum(seen.values()) < 10_000:
                found = await consumer.pull(50, SHORT)
                seen.update(found.bodies)
                by_consumer[number] += len(found)
                await found.ack_sync()

        await asyncio.gather(*[work(number) for number in range(4)])
        assert len(seen) == 10_000
        assert set(seen.values()) == {1}
        assert all(by_consumer[number] > 500 for number in range(4))


async def test_a_consumer_that_holds_all_it_may_does_not_keep_the_others_waiting(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(30)])
        # it asks for more than the broker lets it hold
        full = mq.consumer("s", "g", prefetch=100, ack="explicit")
        monkeypatch.setattr("qmq.limits.CONSUMER_UNACKED_MAX", 10)
        assert len(await full.pull(10)) == 10
        await eventually(lambda: any(state.waiters for state in node.broker.dispatch.groups))
        other = await collect(mq.consumer("s", "g", prefetch=10), 20)
        assert [int(m.body) for m in other] == list(range(10, 30))


async def test_groups_do_not_know_of_each_other_and_a_new_one_may_begin_at_the_end(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"1", b"2"])
        late = mq.consumer("s", "late", start="latest")
        assert len(await late.pull(10, SHORT)) == 0
        await mq.send("s", b"3")
        assert [m.body for m in await collect(late, 1)] == [b"3"]
        assert [m.body for m in await collect(mq.consumer("s", "early"), 3)] == [b"1", b"2", b"3"]


async def test_after_a_restart_only_unacknowledged_messages_come_back(tmp_path: Path) -> None:
    config = node_config(tmp_path)
    async with running(config) as node, qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(100)])
        found = await mq.consumer("s", "g").pull(60)
        assert len(found) == 60
        for message in list(found)[:40]:
            await message.ack_sync()
    async with running(config) as node, qmq.connect(node.address) as mq:
        again = await collect(mq.consumer("s", "g"), 60)
        assert sorted(int(m.body) for m in again) == list(range(40, 100))


async def test_an_exception_in_the_loop_requeues_its_message_and_releases_the_rest(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(10)])
    with pytest.raises(ZeroDivisionError):
        async with qmq.connect(node.address) as mq:
            async for message in mq.consumer("s", "g"):
                if message.body == b"3":
                    raise ZeroDivisionError
    async with qmq.connect(node.address) as mq:
        again = await collect(mq.consumer("s", "g"), 7)
        assert sorted((int(m.body), m.attempt) for m in again) == [
            (3, 2),
            *[(n, 1) for n in range(4, 10)],
        ]


async def test_a_nacked_message_comes_back_after_its_delay_one_attempt_older(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"x")
        attempts = []
        async for message in mq.consumer("s", "g"):
            attempts.append(message.attempt)
            if len(attempts) == 3:
                break
            message.nack(timedelta(milliseconds=20))
        assert attempts == [1, 2, 3]


async def test_messages_of_a_silent_consumer_go_to_the_others_when_its_lease_ends(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with qmq.connect(node.address) as mq, qmq.connect(node.address) as other:
        await mq.send_many("s", [b"%d" % number for number in range(20)])
        silent = mq.consumer("s", "g", lease_ms=1000, ack="explicit")
        held = await silent.pull(20)
        session = silent.attachments[0].session
        assert session is not None
        call, may_beat = session.connection.call, asyncio.Event()

        async def call_without_heartbeats(kind: FrameKind, *args: Any, **options: Any) -> Any:
            if kind == FrameKind.HEARTBEAT:
                await may_beat.wait()
            return await call(kind, *args, **options)

        monkeypatch.setattr(session.connection, "call", call_without_heartbeats)
        again = await collect(other.consumer("s", "g", lease_ms=1000), 20)
        assert {message.attempt for message in again} == {2}
        may_beat.set()
        with pytest.raises(StaleDelivery, match="another consumer"):
            await held.ack_sync()


async def test_after_a_broken_connection_a_consumer_continues_with_what_it_holds(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(1000)])
        consumer = mq.consumer("s", "g", prefetch=100)
        seen: Counter[bytes] = Counter()
        attempts = set()
        async with asyncio.timeout(30):
            async for message in consumer:
                seen[message.body] += 1
                attempts.add(message.attempt)
                session = consumer.attachments[0].session
                if (
                    len(seen) % 200 == 50
                    and session is not None
                    and session.connection.stream.transport is not None
                ):
                    session.connection.stream.transport.abort()
                if len(seen) == 1000:
                    message.ack_later()
                    break
        assert set(seen.values()) == {1}
        assert attempts == {1}


async def test_an_answer_lost_with_the_connection_does_not_store_a_message_twice(
    node: Node,
) -> None:
    async with qmq.connect(node.address) as mq:
        producer = mq.producer("s", batch_messages=10)
        await producer.send(b"first")
        for number in range(2000):
            producer.send(b"%d" % number)
            if number % 200 == 0:
                await asyncio.sleep(0)
                for sender in producer.senders:
                    if sender.connection is not None:
                        sender.connection.stream.transport.abort()
        await producer.flush()
        found = await collect(mq.consumer("s", "g"), 2001)
        assert Counter(m.body for m in found) == Counter(
            [b"first", *[b"%d" % n for n in range(2000)]]
        )
        assert node.store.queue("s", 0).next_sequence == 2001


async def test_most_once_never_hands_a_message_out_again(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"1", b"2", b"3"])
    with pytest.raises(ZeroDivisionError):
        async with qmq.connect(node.address) as mq:
            async for _ in mq.consumer("s", "g", consume_most_once=True):
                raise ZeroDivisionError
    async with qmq.connect(node.address) as mq:
        found = await mq.consumer("s", "g", consume_most_once=True).pull(10)
        assert b"1" not in found.bodies
        assert node.store.queue("s", 0).shares["g"].unacked() == 0


async def test_tags_select_messages_and_the_rest_counts_as_done(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        for number in range(300):
            await mq.send(
                "s", b"%d" % number, tags=["even" if number % 2 == 0 else "odd", f"t{number % 5}"]
            )
        some = await collect(mq.consumer("s", "any", tags_any=["even", "t3"]), 180)
        assert [int(m.body) for m in some] == [n for n in range(300) if n % 2 == 0 or n % 5 == 3]
        both = await collect(mq.consumer("s", "all", tags_all=["even", "t0"]), 30)
        assert [int(m.body) for m in both] == [n for n in range(300) if n % 10 == 0]
        none = mq.consumer("s", "none", tags_any=["never"])
        assert len(await none.pull(10, SHORT)) == 0
        share = node.store.queue("s", 0).shares["none"]
        assert share.settled_before() == 300


async def test_a_group_is_moved_to_the_ends_a_sequence_or_a_time(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send_many("s", [b"%d" % number for number in range(10)])
        middle = (await mq.send("s", b"10")).append_time_ms
        first = mq.consumer("s", "g")
        await collect(first, 11)
        await first.close()
        moved = await mq.metadata.reset_group("s", "g", to="earliest")
        assert [(each.from_sequence, each.to_sequence) for each in moved] == [(11, 0)]
        await mq.metadata.reset_group("s", "g", sequence=7)
        found = await collect(mq.consumer("s", "g"), 1)
        assert found[0].body == b"7"
        moved = await mq.metadata.reset_group("s", "g", time_ms=middle + 60_000)
        assert moved[0].to_sequence == 11
        await mq.metadata.reset_group("s", "g", to="latest")
        with pytest.raises(InvalidArgument, match="0 to 10"):
            await mq.metadata.reset_group("s", "g", sequence=12)
        with pytest.raises(UnknownGroup):
            await mq.metadata.reset_group("s", "nobody", to="earliest")


async def test_a_group_hears_of_expired_messages_and_skips_them_only_on_request(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        consumer = mq.consumer("s", "g", prefetch=1)
        await mq.send_many("s", [b"%d" % number for number in range(5)])
        await collect(consumer, 1)
        await consumer.close()
        for number in range(5, 8):
            await mq.send("s", b"%d" % number)
        queue = node.store.queue("s", 0)
        begin_retention(node.store, lambda name: qmq.SubjectConfig(name, retention_bytes=400))
        assert 5 <= queue.start_sequence < 8
        with pytest.raises(MessagesExpired, match="reset --to earliest"):
            await mq.consumer("s", "g", name="strict").pull(10)
        found = await mq.consumer("s", "g", name="lenient", expired="skip").pull(10)
        assert next(iter(found)).sequence == queue.start_sequence


async def test_back_pressure_holds_a_producer_until_messages_are_stored(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        producer = mq.producer("s")
        with pytest.raises(qmq.errors.BufferFull, match=r"await producer.drain"):
            for _ in itertools.count():
                producer.send(bytes(1_000_000))
        await producer.drain()
        assert not producer.full
        await producer.flush()


async def test_a_bad_name_is_refused_where_it_is_given(node: Node) -> None:
    names: list[Any] = ["", "x" * 128, "../etc", "a/b", ".hidden", "a\nb", "ü", "a b", 5, None]
    async with qmq.connect(node.address) as mq:
        for name in names:
            error = InvalidName if isinstance(name, str) else InvalidArgument
            with pytest.raises(error):
                await mq.send(name, b"")
            with pytest.raises(error):
                mq.consumer(name, "g")
            with pytest.raises(error):
                mq.consumer("s", name)


async def test_bad_calls_get_typed_errors_that_say_what_to_do(node: Node) -> None:
    async with qmq.connect(node.address, create_subjects=False) as mq:
        with pytest.raises(UnknownSubject, match="qmq subject create none"):
            await mq.metadata.locate("none")
        with pytest.raises(UnknownSubject):
            await mq.consumer("none", "g").pull(1, timedelta(seconds=30))
        await mq.metadata.create_subject(qmq.SubjectConfig("s", body_bytes_max=100))
        with pytest.raises(SubjectExists):
            await mq.metadata.create_subject(qmq.SubjectConfig("s"))
        for body in ("text", 5, None):
            with pytest.raises(InvalidArgument, match="encode it first"):
                mq.producer("s").send(body)  # type: ignore[arg-type]
        for nothing in (object(), None):
            with pytest.raises(InvalidArgument, match=r"a body (is bytes|cannot be)"):
                await mq.send("s", nothing)
        with pytest.raises(MessageTooLarge, match="whose limit is 100") as refused:
            await mq.send("s", bytes(101))
        assert refused.value.outcome is qmq.Outcome.NOT_STORED
        with pytest.raises(MessageTooLarge):
            await mq.send("s", bytes(5_000_000))
        with pytest.raises(InvalidArgument):
            await mq.send("s", b"", key=5)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            await mq.send("s", b"", tags="UA")
        with pytest.raises(InvalidArgument):
            await mq.send("s", b"", tags=["t"] * 11)
        with pytest.raises(InvalidArgument):
            await mq.send("s", b"", headers={"h": 5})  # type: ignore[dict-item]
        with pytest.raises(InvalidArgument):
            await mq.send_many("s", [b"1", b"2"], keys=["one"])
        with pytest.raises(MessageNotFound):
            await mq.metadata.find_message("s", "0" * 32)
        with pytest.raises(InvalidArgument, match="32 hexadecimal"):
            await mq.metadata.find_message("s", "zz")
        with pytest.raises(UnknownGroup):
            await mq.metadata.describe_groups("s", "nobody")
        await mq.send("s", b"ok")
        found = await mq.consumer("s", "g").pull(1)
        with pytest.raises(InvalidArgument, match="timedelta"):
            found.nack(timedelta(seconds=-1))
        with pytest.raises(InvalidArgument):
            mq.consumer("s", "g", start="middle")
    with pytest.raises(ClientClosed):
        await mq.send("s", b"")
    with pytest.raises(ClientClosed):
        mq.consumer("s", "g")
    with pytest.raises(InvalidArgument, match="host:port"):
        qmq.connect("localhost:notaport")


@pytest.mark.parametrize("order", [Order.NONE, Order.STRICT])
async def test_a_producer_sends_as_long_bodies_as_its_subject_takes(
    tmp_path: Path, order: Order
) -> None:
    body = bytes(6 * MIB)
    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        parts = 0 if order is Order.NONE else 8
        await mq.metadata.create_subject(
            SubjectConfig("long", order=order, logical_partitions=parts, body_bytes_max=15 * MIB)
        )
        make = mq.producer if order is Order.NONE else mq.ordered_producer
        async with make("long") as producer, make("long", body_bytes_max=4 * MIB) as careful:
            with pytest.raises(MessageTooLarge):
                careful.send(body, "key")
            assert len(await producer.send(body, "key")) == 1
            with pytest.raises(MessageTooLarge):
                producer.send(bytes(15 * MIB + 1), "key")
        await mq.metadata.create_subject(
            SubjectConfig("short", order=order, logical_partitions=parts)
        )
        async with make("short") as producer:
            with pytest.raises(MessageTooLarge, match="whose limit is"):
                await producer.send(body, "key")
            await producer.send(b"after it", "key")
        with pytest.raises(InvalidArgument, match="1 byte to 15 MiB"):
            make("long", body_bytes_max=16 * MIB)
        consumer = (
            mq.consumer("long", "g") if order is Order.NONE else mq.ordered_consumer("long", "g")
        )
        async with consumer:
            assert (await anext(consumer)).body == body


async def test_a_refused_connection_is_reported_with_advice() -> None:
    async with qmq.connect("127.0.0.1:1") as mq:
        with pytest.raises(NotConnected, match="qmq dev"):
            await mq.metadata.list_subjects()


async def test_a_client_leaves_no_task_behind(node: Node) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(3):
        async with qmq.connect(node.address) as mq:
            await mq.send("s", b"x")
            await mq.consumer("s", "g").pull(1)
    await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def test_compressed_bodies_arrive_as_they_were(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        for kind in ("zstd", "lz4"):
            async with mq.producer("s", compression=kind) as producer:
                for number in range(500):
                    producer.send(b"%d " % number * 50)
        found = await collect(mq.consumer("s", "g"), 1000)
        assert [m.body for m in found] == [b"%d " % n * 50 for n in range(500)] * 2
        assert node.store.messages.end < 60_000


async def test_a_node_that_listens_at_an_ipv6_address_tells_addresses_that_can_be_used(
    tmp_path: Path,
) -> None:
    async with running(replace(node_config(tmp_path), host="::1")) as node:
        assert node.address.startswith("[::1]:")
        async with (
            qmq.connect(node.address, state_dir=False) as mq,
            mq.consumer("s", "g") as consumer,
        ):
            await mq.send("s", b"0")
            assert (await anext(consumer)).body == b"0"
