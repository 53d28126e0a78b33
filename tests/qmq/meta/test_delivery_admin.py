"""Settings of groups and pauses at metaservers: two of them on one store, with lost answers, bad
values and wrong names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.subjects import (
    EVERY,
    PauseKind,
    PauseRecord,
    SettingsRecord,
    SubjectCatalog,
    Whom,
    pause_key,
    settings_key,
)
from qmq_coordination.view import ClusterView
from support import ManualClock
from support.stores import Fault, FaultyStore

from qmq.errors import (
    CoordinationUnavailable,
    InvalidArgument,
    InvalidName,
    OrderMismatch,
    UnknownSubject,
)
from qmq.meta.calls import Brokers
from qmq.meta.catalog import ClusterCatalog
from qmq.meta.delivery import DeliveryService
from qmq.model import GroupSettings, Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

DEFAULT = GroupSettings()


class Meta:
    """The metaserver's part. Its view has only what it listed or read back."""

    def __init__(self, store: FaultyStore) -> None:
        self.view, self.clock = ClusterView(store), ManualClock()
        self.admin = DeliveryService(
            store,
            self.view,
            ClusterCatalog(store, self.view, auto_create=False),
            Brokers(self.view),
            self.clock,
        )

    async def set(
        self, subject: str, group: str, attempts_max: int | None = None, delays: Sequence[int] = ()
    ) -> tuple[object, ...]:
        request = pb.SetGroupSettingsRequest(
            subject=subject, group=group, attempts_max=attempts_max, retry_delays_ms=delays
        )
        return told(await self.admin.set_settings(request))

    async def clear(self, subject: str, group: str) -> tuple[object, ...]:
        return told(
            await self.admin.set_settings(
                pb.SetGroupSettingsRequest(subject=subject, group=group, clears=True)
            )
        )

    async def settings(self, subject: str, group: str) -> tuple[object, ...]:
        return told(await self.admin.describe(subject, group))

    async def pause(
        self, whom: Whom, reason: str = "", *, is_paused: bool = True
    ) -> tuple[bool, int, str]:
        pause = pb.Pause(
            kind=whom.kind.value,
            subject=whom.subject,
            group=whom.group,
            name=whom.name,
            reason=reason,
        )
        done = await self.admin.set_pause(pb.SetPauseRequest(pause=pause, is_paused=is_paused))
        assert done.HasField("pause") is is_paused
        return done.was_paused, done.pause.since_ms, done.pause.reason

    async def resume(self, whom: Whom) -> bool:
        return (await self.pause(whom, is_paused=False))[0]

    @property
    def paused(self) -> list[str]:
        return [
            str(Whom(PauseKind(each.kind), each.subject, each.group, each.name))
            for each in self.admin.pauses()
        ]


def told(found: pb.DescribeGroupSettingsResponse) -> tuple[object, ...]:
    return found.attempts_max, tuple(found.retry_delays_ms), found.attempts_from, found.delays_from


GROUP, ALL = Whom(PauseKind.GROUP, "s", "g"), Whom(PauseKind.GROUP, EVERY, "g")
CONSUMER, CLIENT = Whom(PauseKind.CONSUMER, "s", "g", "x"), Whom(PauseKind.CLIENT, name="box")


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    """A store with the subject `s`, and the ordered subject `o`."""
    found = FaultyStore(EmbeddedStore())
    await SubjectCatalog(found).create(SubjectConfig("s", groups=("b",)))
    await SubjectCatalog(found).create(
        SubjectConfig("o", groups=("b",), order=Order.STRICT, logical_partitions=4)
    )
    yield found
    await found.close()


@pytest.fixture
def meta(store: FaultyStore) -> Meta:
    return Meta(store)


async def test_a_setting_holds_on_its_subject_then_on_all_then_as_the_brokers_have_it(
    meta: Meta,
) -> None:
    assert await meta.settings("s", "g") == (DEFAULT.attempts_max, DEFAULT.retry_delays_ms, "", "")
    assert await meta.set(EVERY, "g", 7, [10, 20]) == (7, (10, 20), "*", "*")
    assert await meta.set("s", "g", attempts_max=3) == (3, (10, 20), "s", "*")
    assert await meta.settings(EVERY, "g") == (7, (10, 20), "*", "*")
    assert await meta.settings("s", "h") == (DEFAULT.attempts_max, DEFAULT.retry_delays_ms, "", "")
    assert await meta.clear(EVERY, "g") == (DEFAULT.attempts_max, DEFAULT.retry_delays_ms, "", "")
    assert await meta.settings("s", "g") == (3, DEFAULT.retry_delays_ms, "s", "")


async def test_two_operators_who_set_different_settings_at_once_lose_neither(
    store: FaultyStore,
) -> None:
    one, other = Meta(store), Meta(store)
    for number in range(10):
        await asyncio.gather(
            one.set("s", "g", attempts_max=number), other.set("s", "g", delays=[number])
        )
        await one.view.refresh()
        assert await one.settings("s", "g") == (number, (number,), "s", "s")


async def test_who_changes_something_sees_it_at_once_and_others_with_their_next_look(
    store: FaultyStore,
) -> None:
    one, other = Meta(store), Meta(store)
    for whom in (GROUP, ALL, CONSUMER, CLIENT):
        await one.pause(whom)
    names = ["group g on all subjects", "group g on s", "consumer x of group g on s", "client box"]
    assert (one.paused, other.paused) == (names, [])
    await other.view.refresh()
    assert other.paused == names
    assert await other.resume(GROUP)
    assert (other.paused, one.paused) == ([names[0], *names[2:]], names)


@pytest.mark.parametrize("fault", [Fault.UNANSWERED, Fault.LOST])
async def test_a_lost_answer_changes_nothing_of_the_outcome(
    store: FaultyStore, meta: Meta, fault: Fault
) -> None:
    store.fail_next(fault)
    assert await meta.set("s", "g", 3) == (3, DEFAULT.retry_delays_ms, "s", "")
    store.fail_next(fault)
    assert not (await meta.pause(GROUP))[0]
    store.fail_next(fault)
    assert await meta.resume(GROUP)
    store.fail_next(fault)
    assert (await meta.clear("s", "g"))[2] == ""
    listing = await store.list("/qmq/")
    assert not [item.key for item in listing.items if "/subjects/" not in item.key]


async def test_pausing_again_keeps_since_when_and_resuming_again_does_nothing(meta: Meta) -> None:
    began_ms = meta.clock.now_ms
    assert await meta.pause(GROUP, "a bad release") == (False, began_ms, "a bad release")
    meta.clock.now_ms += 1_000
    assert await meta.pause(GROUP) == (True, began_ms, "a bad release")
    assert await meta.pause(GROUP, "still") == (True, began_ms, "still")
    assert await meta.resume(GROUP)
    assert not await meta.resume(GROUP)
    assert await meta.pause(GROUP) == (False, began_ms + 1_000, "")


async def test_a_value_that_cannot_be_read_is_replaced_and_can_be_taken_away(
    store: FaultyStore, meta: Meta
) -> None:
    await store.put(settings_key("s", "g"), b"{")
    await store.put(pause_key(GROUP), b"[]")
    assert (await meta.set("s", "g", 3))[0] == 3
    assert await meta.pause(GROUP) == (False, meta.clock.now_ms, "")
    await store.put(settings_key("s", "g"), b"{")
    await store.put(pause_key(GROUP), b"[]")
    await meta.clear("s", "g")
    assert not await meta.resume(GROUP)
    assert await store.get(settings_key("s", "g")) is None
    assert await store.get(pause_key(GROUP)) is None


async def test_only_what_exists_is_set_or_paused_but_everything_can_be_resumed(
    store: FaultyStore, meta: Meta
) -> None:
    gone = Whom(PauseKind.GROUP, "gone", "g")
    await store.put(pause_key(gone), PauseRecord(1).encode())
    await store.put(settings_key("gone", "g"), SettingsRecord(1).encode())
    one = Whom(PauseKind.CONSUMER, "gone", "g", "x")
    for refused in (
        meta.set("gone", "g", 1),
        meta.settings("gone", "g"),
        meta.pause(gone),
        meta.pause(one),
    ):
        with pytest.raises(UnknownSubject):
            await refused
    assert await meta.resume(gone)
    await meta.clear("gone", "g")
    assert await store.get(settings_key("gone", "g")) is None
    await meta.pause(Whom(PauseKind.GROUP, "s", "never-consumed"))
    await meta.pause(Whom(PauseKind.GROUP, "%dlq%g", "fixers"))
    assert meta.paused == ["group fixers on %dlq%g", "group never-consumed on s"]


async def test_an_ordered_subject_can_be_paused_but_its_retries_are_its_consumers_matter(
    meta: Meta,
) -> None:
    for refused in (meta.set("o", "g", 3), meta.settings("o", "g")):
        with pytest.raises(OrderMismatch, match="attempts_max"):
            await refused
    await meta.pause(Whom(PauseKind.GROUP, "o", "g"))
    assert meta.paused == ["group g on o"]


async def test_a_dead_letter_queue_takes_retry_delays_but_no_attempts_max(meta: Meta) -> None:
    await meta.set(EVERY, "fixers", attempts_max=3)
    assert await meta.set("%dlq%g", "fixers", delays=[10]) == (0, (10,), "%dlq%g", "%dlq%g")
    with pytest.raises(InvalidArgument, match="have no attempts_max"):
        await meta.set("%dlq%g", "fixers", attempts_max=3)


async def test_what_makes_no_sense_is_refused_before_anything_is_changed(
    store: FaultyStore, meta: Meta
) -> None:
    before = (await store.list("/qmq/")).revision
    for attempts, delays in ((None, ()), (10_000_000, ()), (None, [10_000_000]), (None, [1] * 100)):
        with pytest.raises(InvalidArgument):
            await meta.set("s", "g", attempts, delays)
    with pytest.raises(InvalidArgument):
        await meta.admin.set_settings(
            pb.SetGroupSettingsRequest(subject="s", group="g", attempts_max=1, clears=True)
        )
    for kind, subject, group, name in (
        ("queue", "s", "g", ""),
        ("group", "s", "g", "x"),
        ("client", "s", "", "x"),
    ):
        with pytest.raises(InvalidArgument):
            pause = pb.Pause(kind=kind, subject=subject, group=group, name=name)
            await meta.admin.set_pause(pb.SetPauseRequest(pause=pause, is_paused=True))
    with pytest.raises(InvalidArgument, match="reason"):
        await meta.pause(GROUP, "x" * 1001)
    for refused in (
        meta.set("s", "*", 1),
        meta.settings("s", ""),
        meta.pause(Whom(PauseKind.CLIENT, name="a/b")),
    ):
        with pytest.raises(InvalidName):
            await refused
    assert (await store.list("/qmq/")).revision == before


async def test_a_change_while_the_store_is_away_fails_and_says_so(
    store: FaultyStore, meta: Meta
) -> None:
    await meta.view.refresh()
    store.cut("get")
    with pytest.raises(CoordinationUnavailable):
        await meta.pause(GROUP)
    assert meta.paused == []
