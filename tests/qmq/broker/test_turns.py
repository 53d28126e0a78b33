"""When a broker's turn runs: immediately if only one connection has sent, otherwise after the other
connections of the same round of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ManualClock

from qmq.broker.broker import Broker
from qmq.broker.config import BrokerConfig
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.log.store import Store
from qmq.model import SubjectConfig
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import encode
from qmq.wire.batch_columns import Columns


class Talker:
    """A connection that sends, and keeps its answers."""

    is_writable = True
    client = ""

    def __init__(self, broker: Broker, producer: int) -> None:
        self._broker, self._producer = broker, producer
        self.sent = self.answers = 0

    def send(self, *_buffers: bytes) -> None:
        self.answers += 1

    def delivered(self, _subject: str, _messages: int, _size: int) -> None:
        return

    def talk(self, frames: int = 1) -> None:
        """The frames of one read arrive, each with a message."""
        self._broker.turns.begin_frames()
        for _ in range(frames):
            batch = encode(
                b"s",
                Columns([b"x"]),
                producer_id=self._producer,
                batch_sequence=self.sent,
                create_time_ms=1,
            )
            self._broker.produce(self, self.sent + 1, memoryview(b"".join(batch)))
            self.sent += 1
        self._broker.turns.end_frames(self)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_store(tmp_path, LogConfig(), ManualClock())
    yield found
    found.begin_flush().run()
    found.close()


def broker_on(store: Store) -> Broker:
    return Broker(store, SubjectConfig, ManualClock(), BrokerConfig(), asyncio.get_running_loop())


async def test_who_talks_alone_is_answered_at_once(store: Store) -> None:
    talker = Talker(broker_on(store), 1)
    talker.talk()
    await asyncio.sleep(0)
    for _ in range(3):
        talker.talk(frames=2)
        assert talker.answers == talker.sent


async def test_connections_that_talk_in_one_round_share_a_turn(store: Store) -> None:
    broker = broker_on(store)
    talkers = [Talker(broker, number) for number in range(1, 4)]
    for _ in range(4):
        for talker in talkers:
            talker.talk()
        assert [talker.answers for talker in talkers] == [talker.sent - 1 for talker in talkers], (
            "nobody before the others were heard"
        )
        await asyncio.sleep(0)
        assert [talker.answers for talker in talkers] == [talker.sent for talker in talkers]


async def test_a_connection_that_joins_ends_the_others_privilege(store: Store) -> None:
    broker = broker_on(store)
    first, second = Talker(broker, 1), Talker(broker, 2)
    first.talk()
    await asyncio.sleep(0)
    first.talk()
    assert first.answers == 2
    second.talk()
    first.talk()
    assert (first.answers, second.answers) == (2, 0)
    await asyncio.sleep(0)
    assert (first.answers, second.answers) == (3, 1)
    first.talk()
    assert first.answers == 3, "the second may talk in this round, too"
    await asyncio.sleep(0)
    assert first.answers == 4


class Connection(Talker):
    """A connection whose answers wait for the end of the turn, as a real one's do."""

    flushed = 0

    def send(self, *buffers: bytes) -> None:
        super().send(*buffers)
        self._broker.turns.register_outbox(self)

    def flush(self) -> None:
        self.flushed = self.answers


async def test_a_message_costs_one_turn_since_its_answer_leaves_with_it(store: Store) -> None:
    broker = broker_on(store)
    connection = Connection(broker, 1)
    connection.talk()
    await asyncio.sleep(0)
    for turns in range(broker.turns.count, broker.turns.count + 5):
        connection.talk()
        assert connection.flushed == connection.sent
        await asyncio.sleep(0)
        assert broker.turns.count == turns + 1


async def test_a_pull_that_waits_takes_no_turn_and_leaves_the_producer_alone(store: Store) -> None:
    broker = broker_on(store)
    producer, consumer = Connection(broker, 1), Connection(broker, 2)
    producer.talk()
    await asyncio.sleep(0)
    attached = broker.dispatch.attach(
        consumer, wire.Attach("s", 0, "g", "c", "1", -1, "latest", 30_000, [], [])
    )
    await asyncio.sleep(0)
    for number in range(1, 6):
        turns, received = broker.turns.count, consumer.flushed
        broker.turns.begin_frames()
        broker.dispatch.pull(consumer, number, wire.Pull(attached.session, 10, 1_000, 20_000), 0)
        broker.turns.end_frames(consumer)
        await asyncio.sleep(0)
        assert broker.turns.count == turns
        producer.talk()
        assert (producer.flushed, consumer.flushed) == (producer.sent, received + 1), (
            "in the producer's callback"
        )


async def test_a_waiting_consumer_is_written_to_before_the_producer(store: Store) -> None:
    broker, written = broker_on(store), list[str]()

    class Named(Connection):
        def __init__(self, producer: int, name: str) -> None:
            super().__init__(broker, producer)
            self._name = name

        def flush(self) -> None:
            written.append(self._name)

    producer, consumer = Named(1, "producer"), Named(2, "consumer")
    attached = broker.dispatch.attach(
        consumer, wire.Attach("s", 0, "g", "c", "1", -1, "latest", 30_000, [], [])
    )
    broker.dispatch.pull(consumer, 1, wire.Pull(attached.session, 10, 1_000, 20_000), 0)
    await asyncio.sleep(0)
    written.clear()
    producer.talk()
    await asyncio.sleep(0)
    assert written == ["consumer", "producer"]


async def test_an_answer_behind_the_last_step_of_a_turn_leaves_with_the_next(store: Store) -> None:
    broker = broker_on(store)
    connection = Connection(broker, 1)

    class Late(Talker):
        def flush(self) -> None:
            connection.send(b"late")

    broker.turns.register_outbox(Late(broker, 2))
    await asyncio.sleep(0)
    assert (connection.answers, connection.flushed) == (1, 0)
    await asyncio.sleep(0)
    assert connection.flushed == 1


async def _delivered(broker: Broker, producer: Connection, consumer: Connection) -> int:
    """A stored message is handed out. Returns the consumer's session."""
    producer.talk()
    attached = broker.dispatch.attach(
        consumer, wire.Attach("s", 0, "g", "c", "1", -1, "earliest", 30_000, [], [])
    )
    await asyncio.sleep(0)
    received = consumer.flushed
    broker.dispatch.pull(consumer, 1, wire.Pull(attached.session, 10, 1_000, 20_000), 0)
    await asyncio.sleep(0)
    assert consumer.flushed == received + 1
    assert broker.store.unwritten.waits, "the delivery"
    return attached.session


def _settle(broker: Broker, consumer: Connection, session: int) -> None:
    broker.dispatch.settle(consumer, 2, session, [wire.Settlement(0, 0, wire.Verdict.ACK, 0)])


async def test_deliveries_and_verdicts_are_written_with_the_next_messages(store: Store) -> None:
    broker = broker_on(store)
    producer, consumer = Connection(broker, 1), Connection(broker, 2)
    session = await _delivered(broker, producer, consumer)
    _settle(broker, consumer, session)
    await asyncio.sleep(0)
    assert store.unwritten.waits
    producer.talk()
    await asyncio.sleep(0)
    assert not store.unwritten.waits


async def test_a_tick_writes_deliveries_and_verdicts_that_wait(store: Store) -> None:
    broker = broker_on(store)
    producer, consumer = Connection(broker, 1), Connection(broker, 2)
    session = await _delivered(broker, producer, consumer)
    _settle(broker, consumer, session)
    answers = consumer.answers
    broker.tick()
    await asyncio.sleep(0)
    assert not store.unwritten.waits
    assert consumer.answers == answers + 1, "the verdict is stored"


async def test_nothing_waits_unwritten_for_a_mastership_that_is_handed_over(store: Store) -> None:
    broker = broker_on(store)
    await _delivered(broker, Connection(broker, 1), Connection(broker, 2))
    broker.pause()
    assert not store.unwritten.waits


async def test_who_asks_whether_all_is_committed_does_not_wait_for_a_tick(store: Store) -> None:
    broker = broker_on(store)
    await _delivered(broker, Connection(broker, 1), Connection(broker, 2))
    async with asyncio.timeout(5):
        await broker.committed()
    assert not store.unwritten.waits
