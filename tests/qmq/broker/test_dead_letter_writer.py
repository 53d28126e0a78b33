"""Dead letters through a broker and its store, with crashes between their steps; no network."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from lane_support import Mute
from support import ManualClock, intake
from support.hostile import LIES, crc, region_of

from qmq import model
from qmq.broker.admin import BrokerAdmin
from qmq.broker.broker import Broker
from qmq.broker.config import IDLE_CHECK_MS, BrokerConfig
from qmq.broker.dead_letters import AGAIN_MS
from qmq.errors import DiskFull, InvalidArgument, UnknownConsumer
from qmq.log.group_state import GroupState
from qmq.log.log_config import LogConfig
from qmq.log.queue import Queue
from qmq.log.recovery import open_store
from qmq.log.store import Intake
from qmq.model import SubjectConfig, dead_letter_subject
from qmq.wire import frame_payloads as wire
from qmq.wire.batch import BatchView, encode, sent_sizes
from qmq.wire.batch_columns import BatchFlag, Columns, Compression, parse_header
from qmq.wire.frame_payloads import Settlement, Verdict


class World:
    """A broker on a folder, and one consumer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.store = open_store(folder, LogConfig(), self.clock)
        self.broker = Broker(
            self.store, SubjectConfig, self.clock, BrokerConfig(), asyncio.get_running_loop()
        )
        self.peer = Mute()

    def send(self, bodies: list[bytes], number: int = 0) -> None:
        self.broker.append_own(
            [
                intake(
                    self.store.open_queue("s", 0),
                    bodies,
                    number=number,
                    tags=[("t",)] * len(bodies),
                )
            ]
        )

    def attach(self, consumer: str = "c", group: str = "g", incarnation: str = "i") -> None:
        request = wire.Attach("s", 0, group, consumer, incarnation, -1, "earliest", 1_000, [], [])
        self.session = self.broker.dispatch.attach(self.peer, request).session

    def pull(self, count: int) -> None:
        self.broker.dispatch.pull(self.peer, 1, wire.Pull(self.session, count, 1 << 20, 0), 0)

    def settle(self, *settlements: Settlement) -> None:
        self.broker.dispatch.settle(self.peer, 2, self.session, list(settlements))
        self.broker.turn()

    def bury(self) -> None:
        self.broker.dispatch.dead_letters.work()

    @property
    def share(self) -> GroupState:
        return self.store.open_queue("s", 0).shares["g"]

    @property
    def graveyard(self) -> Queue:
        return self.store.open_queue(dead_letter_subject("g"), 0)

    def letters(self) -> list[tuple[bytes, dict[str, bytes]]]:
        found = []
        for _, entry in self.graveyard.index.scan(0):
            view = BatchView.parse(b"".join(self.store.read(self.graveyard, entry)))
            found += list(zip(view.bodies(), view.headers() or [], strict=True))
        return found

    def bodies(self) -> list[bytes]:
        return [body for body, _ in self.letters()]

    def crashed(self, name: str) -> World:
        """The files that another process would find if this one were killed now."""
        image = self.folder.parent / name
        shutil.copytree(self.folder, image)
        (image / "lock").unlink(missing_ok=True)
        return World(image)


def dead(first: int, last: int, error: str = "boom") -> Settlement:
    return Settlement(first, last, Verdict.DEAD, 0, error)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_nothing_is_copied_before_the_death_is_written(tmp_path: Path) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(3))
    world.attach()
    world.pull(3)
    world.broker.dispatch.settle(world.peer, 2, world.session, [dead(0, 2)])
    world.bury()
    assert (world.bodies(), world.share.dying_messages()) == ([], 3)
    world.broker.turn()
    world.bury()
    assert (world.bodies(), world.share.dying_messages()) == (numbered(3), 0)


@pytest.mark.parametrize("lie", sorted(LIES))
async def test_a_message_that_cannot_be_copied_holds_up_no_other(tmp_path: Path, lie: str) -> None:
    """An earlier version stored the message, or its body is garbage that claims to be
    compressed.
    """
    world = World(tmp_path / "a")
    world.send([b"before"], 1)
    region, queue = region_of(lie), world.store.open_queue("s", 0)
    world.broker.append_own([Intake(queue, region, crc(region), parse_header(region), 0)])
    world.send([b"behind"], 2)
    world.attach()
    world.pull(3)
    world.settle(dead(0, 2))
    for _ in range(3):
        world.bury()
        world.broker.turn()
    copied = [body for body in world.bodies() if body != b"poison"]
    assert (copied, world.share.dying_messages()) == ([b"before", b"behind"], 0)
    after = world.crashed("b")
    after.bury()
    assert after.share.dying_messages() == 0


async def test_a_crash_after_the_copy_and_before_its_record_makes_no_second_copy(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(3))
    world.attach()
    world.pull(3)
    world.settle(dead(0, 2))
    world.bury()
    after = world.crashed("b")
    assert (after.bodies(), after.share.dying_messages()) == (numbered(3), 3)
    after.bury()
    assert (after.bodies(), after.share.dying_messages()) == (numbered(3), 0)
    after.broker.turn()
    assert after.crashed("c").share.dying == []


async def test_messages_that_die_after_the_crash_are_copied_in_other_batches(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(6))
    world.attach()
    world.pull(6)
    world.settle(dead(0, 2))
    world.bury()
    after = world.crashed("b")
    after.attach(incarnation="another")
    after.pull(6)
    first = after.share.holders["c"].held[0].pull
    after.settle(dead(first, first + 2))
    assert after.share.dying_messages() == 6
    after.bury()
    assert (after.bodies(), after.share.dying_messages()) == (numbered(6), 0)


async def test_a_crash_before_the_death_is_written_leaves_the_message_alive(tmp_path: Path) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(1))
    world.attach()
    world.pull(1)
    world.broker.turn()
    world.broker.dispatch.settle(world.peer, 2, world.session, [dead(0, 0)])
    after = world.crashed("b")
    assert (after.share.unacked(), after.share.dying) == (1, [])


async def test_large_dead_messages_are_copied_in_several_batches(tmp_path: Path) -> None:
    world = World(tmp_path / "a")
    bodies = [bytes([number]) * (1 << 20) for number in range(10)]
    for number, body in enumerate(bodies):
        world.send([body], number)
    world.attach()
    for _ in bodies:
        world.pull(1)
    world.settle(dead(0, 9))
    world.bury()
    assert world.bodies() == bodies
    assert 2 < world.graveyard.index.count < 10


async def test_on_a_full_disk_dead_messages_wait_and_are_copied_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(2))
    world.attach()
    world.pull(2)
    world.settle(dead(0, 1))

    def full(_batches: Sequence[object]) -> list[object]:
        raise DiskFull("no space left (in this test)")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "append", full)
        world.bury()
    assert (world.bodies(), world.share.dying_messages()) == ([], 2)
    assert [group.dying for group in await BrokerAdmin(world.broker, "g1").groups("s", "g")] == [
        2
    ], "operators see that they wait"
    world.bury()
    assert world.bodies() == [], "it is not tried at every tick"
    world.clock.now_ms += AGAIN_MS
    world.bury()
    assert (world.bodies(), world.share.dying_messages()) == (numbered(2), 0)


async def test_a_copy_that_failed_before_it_was_sent_again_dies_with_all_its_attempts(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "a")
    own = {model.GROUP: b"g", model.ATTEMPT: b"4"}
    queue = world.store.open_queue("s", 0)
    world.broker.append_own([intake(queue, [b"late"], flags=BatchFlag.DIRECTED, headers=[own])])
    world.attach()
    world.pull(1)
    world.settle(Settlement(0, 0, Verdict.NACK, 0, "fifth"))
    world.bury()
    ((body, found),) = world.letters()
    assert (body, found[model.ATTEMPT], found[model.ERROR]) == (b"late", b"5", b"fifth")


async def test_a_message_that_kills_consumers_dies_and_prefetched_ones_do_not(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(10))
    for life in range(12):
        world.attach(incarnation=f"life{life}")
        world.pull(10)
        world.clock.now_ms += 120_000
        for item in world.share.holders["c"].held if life else ():
            if item.first <= 3 < item.first + item.count:
                world.broker.dispatch.begun(
                    world.peer,
                    world.session,
                    item.pull + 3 - item.first,
                    item.pull + 3 - item.first,
                )
    world.broker.turn()
    world.bury()
    ((body, found),) = world.letters()
    assert (body, found[model.ATTEMPT]) == (b"3", b"5")
    assert {item.attempt for item in world.share.holders["c"].held} == {2}
    assert world.share.unacked() == 9


async def test_messages_that_were_created_months_apart_are_copied_too(tmp_path: Path) -> None:
    world = World(tmp_path / "a")
    queue = world.store.open_queue("s", 0)
    months = [1, 200 * 86_400_000, 2]
    for number, created in enumerate(months):
        envelope, region = encode(
            b"s",
            Columns([b"%d" % created]),
            producer_id=7,
            batch_sequence=number,
            create_time_ms=created,
        )
        world.broker.append_own(
            [Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), 0)]
        )
    world.attach()
    for _ in months:
        world.pull(1)
    world.settle(dead(0, 2))
    world.bury()
    assert world.bodies() == [b"%d" % created for created in months]


async def test_copies_of_compressed_messages_are_counted_by_their_whole_size(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "a")
    queue = world.store.open_queue("s", 0)
    body = bytes(140_000)
    for number in range(4):
        envelope, region = encode(
            b"s",
            Columns([body] * 50),
            producer_id=7,
            batch_sequence=number,
            create_time_ms=1,
            compression=Compression.LZ4,
        )
        world.broker.append_own(
            [Intake(queue, region, sent_sizes(envelope)[1], parse_header(region), 0)]
        )
    world.attach()
    for _ in range(4):
        world.pull(50)
    world.settle(dead(0, 199))
    while world.share.dying:
        world.bury()
    assert world.bodies() == [body] * 200
    letters = next(each for each in world.store.queues.values() if each is not queue)
    assert letters.cumulative_bytes < 10 * len(body), "copies are compressed as their originals are"


async def test_dead_messages_are_copied_while_others_keep_dying_and_commits_come_late(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(20))
    world.attach()
    world.pull(20)
    dead_letters, store = world.broker.dispatch.dead_letters, world.store
    real = store.committed_index
    for number in range(20):
        world.settle(dead(number, number))
        committed, store.committed_index = store.committed_index, real
        dead_letters.work()
        store.committed_index, real = committed, committed
    assert len(world.bodies()) >= 15


async def test_an_unreadable_batch_keeps_its_dead_messages_and_stops_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(2))
    world.attach()
    world.pull(2)
    world.settle(dead(0, 1))

    def unreadable(*_: object) -> object:
        raise InvalidArgument("a compression whose library is not installed (in this test)")

    with monkeypatch.context() as patch:
        patch.setattr(BatchView, "bodies", unreadable)
        world.bury()
    assert world.share.dying_messages() == 2
    world.clock.now_ms += AGAIN_MS
    world.bury()
    assert world.bodies() == numbered(2)


async def test_a_late_consumer_of_a_broadcast_group_does_not_get_its_old_progress(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "a")
    world.send(numbered(10))
    world.attach("c", "g%c")
    world.clock.now_ms += 2_000
    world.broker.dispatch.tick()
    world.clock.now_ms += IDLE_CHECK_MS
    world.broker.dispatch.tick()
    world.clock.now_ms += 4 * 86_400_000
    world.broker.dispatch.tick()
    with pytest.raises(UnknownConsumer):
        world.broker.dispatch.detach(world.peer, world.session, -1)
    assert "g%c" not in world.store.open_queue("s", 0).shares


async def test_what_never_reached_a_consumer_that_leaves_comes_again_untried(
    tmp_path: Path,
) -> None:
    """A pull waits while the consumer gives back what it had not begun: the same messages are
    handed out to it once more.
    """
    world = World(tmp_path / "a")
    world.send(numbered(10))
    world.attach()
    world.pull(10)
    world.broker.turn()
    world.broker.dispatch.pull(world.peer, 3, wire.Pull(world.session, 10, 1 << 20, 20_000), 0)
    world.settle(Settlement(0, 9, Verdict.RELEASE, 0))
    assert [(each.pull, each.count) for each in world.share.holders["c"].held] == [(10, 10)]
    world.broker.dispatch.detach(world.peer, world.session, 9)
    world.broker.turn()
    world.attach("d")
    world.pull(10)
    world.broker.turn()
    assert [(each.count, each.attempt) for each in world.share.holders["d"].held] == [(10, 1)]
