"""The embedded store: leases by the clock, kills, locks; and random operations against a dumb
model.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qmq_coordination.broker_groups import Registration, ReplicaRecord, presence_key, replica_key
from qmq_coordination.coordination_store import Delete, Operation, Put
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.subjects import SubjectCatalog
from support.forms import examples
from support.stores import Fault, FaultyStore, Follower

from qmq.errors import FolderInUse, LogDamaged, SubjectExists, UnknownSubject
from qmq.model import SubjectConfig

KEYS = st.sampled_from(["a", "a/1", "a/2", "b", "c/☃"])
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, st.binary(max_size=3)), st.builds(Delete, KEYS, st.booleans())
)


class Model:
    """The history of the store's states, as dictionaries."""

    def __init__(self) -> None:
        self.states: list[dict[str, bytes]] = [{}, {}]

    def txn(self, operations: list[Operation]) -> None:
        state = dict(self.states[-1])
        touched = False
        for each in operations:
            if isinstance(each, Put):
                state[each.key] = each.value
                touched = True
            elif isinstance(each, Delete):
                gone = [
                    key
                    for key in state
                    if (key.startswith(each.key) if each.is_prefix else key == each.key)
                ]
                touched |= bool(gone)
                for key in gone:
                    del state[key]
        if touched:
            self.states.append(state)


@settings(max_examples=examples(60))
@given(st.lists(st.lists(OPERATIONS, min_size=1, max_size=3), max_size=25))
def test_random_transactions_agree_with_a_model_now_and_at_every_revision(
    transactions: list[list[Operation]],
) -> None:
    async def check() -> None:
        store, model = EmbeddedStore(), Model()
        for operations in transactions:
            puts = [each.key for each in operations if isinstance(each, Put)]
            if len(puts) != len(set(puts)) or (
                len(operations) > 1 and any(isinstance(each, Delete) for each in operations)
            ):
                continue
            model.txn(operations)
            assert (await store.txn([], operations)).revision == len(model.states) - 1
        for revision, state in enumerate(model.states[1:], 1):
            items = (await store.list("", revision=revision)).items
            assert {item.key: item.value for item in items} == state
        await check_watch(store, model)
        await store.close()

    async def check_watch(store: EmbeddedStore, model: Model) -> None:
        state: dict[str, bytes] = {}
        last = len(model.states) - 1
        if last < 2:
            return
        async for changes in store.watch("", 2):
            for event in changes.events:
                if event.now is None:
                    del state[event.key]
                else:
                    state[event.key] = event.now.value
            assert state == model.states[changes.revision]
            if changes.revision == last:
                break

    asyncio.run(check())


async def test_a_lease_that_is_not_kept_alive_ends_and_one_that_is_does_not() -> None:
    now = [0.0]
    store = EmbeddedStore(monotonic_s=lambda: now[0])
    kept, lost = await store.grant(10), await store.grant(10)
    await store.put("kept", b"", kept)
    await store.put("lost", b"", lost)
    now[0] = 9.0
    await store.keep_alive(kept)
    now[0] = 10.0
    assert [item.key for item in (await store.list("")).items] == ["kept"]
    now[0] = 19.5
    assert await store.get("kept") is None
    await store.close()


async def test_a_restart_begins_leases_again(tmp_path: Path) -> None:
    now = [0.0]
    store = EmbeddedStore(tmp_path / "c.db", monotonic_s=lambda: now[0])
    await store.put("k", b"v", await store.grant(10))
    await store.close()
    now[0] = 1000.0
    store = EmbeddedStore(tmp_path / "c.db", monotonic_s=lambda: now[0])
    now[0] = 1009.0
    assert await store.get("k") is not None
    now[0] = 1010.0
    assert await store.get("k") is None
    await store.close()


async def test_a_second_process_on_the_file_is_refused(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "c.db")
    with pytest.raises(FolderInUse):
        EmbeddedStore(tmp_path / "c.db")
    await store.close()
    await EmbeddedStore(tmp_path / "c.db").close()


async def test_a_watch_that_keeps_up_is_not_affected_by_compaction() -> None:
    store = EmbeddedStore()
    start = await store.put("w/0", b"")
    follower = Follower(store, "w/", start)
    await follower.reaches(start)
    for _ in range(10):
        last = await store.put("other", b"")
    # Two turns of this loop: the watch is woken, and looks.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await store.compact(last)
    await follower.reaches(await store.put("w/1", b""))
    await follower.stop()
    await store.close()


CHILD = """
import asyncio, sys
from pathlib import Path
from qmq_coordination.embedded import EmbeddedStore
async def main():
    store = EmbeddedStore(Path(sys.argv[1]))
    for number in range(10**6):
        print(await store.put(f"k/{number % 10}", b"%d" % number), flush=True)
asyncio.run(main())
"""


async def test_a_committed_change_survives_kill_9_and_is_watched_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for _ in range(200):
        acknowledged = int(child.stdout.readline())
    child.kill()
    acknowledged = max(
        [acknowledged, *[int(line) for line in child.stdout.read().split("\n")[:-1] if line]]
    )
    child.wait()
    child.stdout.close()
    store = EmbeddedStore(path)
    assert (await store.list("")).revision >= acknowledged
    revisions = []
    async for changes in store.watch("k/", 2):
        revisions.append(changes.revision)
        if changes.revision >= acknowledged:
            break
    assert revisions == list(range(2, revisions[-1] + 1))
    await store.close()


async def test_a_subject_is_created_once_and_altered_by_its_latest_state() -> None:
    store = EmbeddedStore()
    catalog = SubjectCatalog(store)
    config = SubjectConfig("orders", retention_ms=1000)
    assert await asyncio.gather(*[catalog.create(config) for _ in range(5)]) == [config] * 5
    with pytest.raises(SubjectExists, match="other settings"):
        await catalog.create(SubjectConfig("orders"))
    await catalog.create(SubjectConfig("orders.eu"))
    assert [each.name for each in await catalog.list("orders")] == ["orders", "orders.eu"]
    await catalog.alter(SubjectConfig("orders"))
    assert await catalog.get("orders") == SubjectConfig("orders")
    with pytest.raises(UnknownSubject):
        await catalog.alter(SubjectConfig("none"))
    await store.close()


async def test_metaservers_that_place_a_subject_at_once_agree_on_the_first_one() -> None:
    store = EmbeddedStore()
    ones, others = SubjectCatalog(store), SubjectCatalog(store)
    made = await asyncio.gather(
        ones.create(SubjectConfig("s", groups=("g1",))),
        others.create(SubjectConfig("s", groups=("g2",))),
    )
    assert made == [SubjectConfig("s", groups=("g1",))] * 2
    with pytest.raises(SubjectExists, match="other settings"):
        await others.create(SubjectConfig("s", groups=("g2",)), is_placed=True)
    await store.close()


def forgetful(store: EmbeddedStore, *is_done: bool) -> FaultyStore:
    """A store that loses the answers of its next transactions, which may or may not be done."""
    return FaultyStore(
        store,
        {
            number: Fault.UNANSWERED if done else Fault.LOST
            for number, done in enumerate(is_done, 1)
        },
    )


async def test_a_store_that_loses_answers_is_not_hammered() -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    store = EmbeddedStore()
    catalog = SubjectCatalog(forgetful(store, False, False, False), sleep=sleep)
    await catalog.create(SubjectConfig("s"))
    assert len([each for each in pauses if each > 0]) == 3
    catalog = SubjectCatalog(forgetful(store, False, True), sleep=sleep)
    await catalog.update("s", lambda found: replace(found, retention_ms=7))
    assert len([each for each in pauses if each > 0]) == 5
    await store.close()


@pytest.mark.parametrize("is_done", [(True,), (False,), (False, True), (True, False)])
async def test_a_lost_answer_does_not_keep_a_subject_from_being_created_and_altered_once(
    is_done: tuple[bool, ...],
) -> None:
    store = EmbeddedStore()
    wanted = SubjectConfig("s", retention_ms=5)
    assert await SubjectCatalog(forgetful(store, *is_done)).create(wanted) == wanted
    grown = await SubjectCatalog(forgetful(store, *is_done)).update(
        "s", lambda found: replace(found, groups=("g1",))
    )
    assert grown == await SubjectCatalog(store).get("s") == replace(wanted, groups=("g1",))
    item = await store.get("/qmq/subjects/s")
    assert item is not None
    assert item.version == 2
    await store.close()


async def test_a_subject_of_an_older_release_is_read() -> None:
    store = EmbeddedStore()
    await store.put(
        "/qmq/subjects/s",
        (
            b'{"name": "s", "retention_ms": 5, "retention_bytes": null, "body_bytes_max": 100, '
            b'"new": 1}'
        ),
    )
    assert await SubjectCatalog(store).get("s") == SubjectConfig(
        "s", retention_ms=5, body_bytes_max=100
    )
    await store.close()


async def test_a_replica_is_present_while_it_lives_and_registers_again_after_a_lost_lease() -> None:
    now = [0.0]
    store = EmbeddedStore(monotonic_s=lambda: now[0])
    record = ReplicaRecord("r", "g", "127.0.0.1:1", "127.0.0.1:2")
    registration = Registration(store, record, also={"/qmq/groups/g/master": b"{}"}, lease_s=0.06)
    leased = [presence_key("g", "r"), "/qmq/groups/g/master"]

    async def there() -> list[str]:
        return [key for key in leased if await store.get(key) is not None]

    await registration.start()
    assert await there() == leased
    for lose in (lambda: now.__setitem__(0, now[0] + 1.0), None):
        if lose is None:
            await store.delete(leased[0])
        else:
            lose()
        assert await there() != leased
        async with asyncio.timeout(10):
            while await there() != leased:
                await asyncio.sleep(0.01)
    await registration.stop()
    assert await there() == []
    found = await store.get(replica_key("g", "r"))
    assert found is not None
    assert ReplicaRecord.decode(found.value) == record
    await store.close()


async def test_a_damaged_file_is_refused_with_what_to_do_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "coordination.db"
    store = EmbeddedStore(path)
    for number in range(300):
        await store.put(f"key/{number}", b"x" * 100)
    await store.close()
    whole = path.read_bytes()
    pages = len(whole) // 4096
    harms = [
        whole[: len(whole) // 2],
        b"\0" * 100 + whole[100:],
        whole[: 4096 * (pages // 2)] + bytes(4096) + whole[4096 * (pages // 2 + 1) :],
    ]
    for harmed in harms:
        path.write_bytes(harmed)
        for _ in range(2):
            with pytest.raises(LogDamaged, match="restore the file from a copy"):
                EmbeddedStore(path)
        assert path.read_bytes() == harmed
    path.write_bytes(whole)
    store = EmbeddedStore(path)
    assert await store.get("key/7") is not None
    await store.close()
