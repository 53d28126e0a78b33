"""The embedded store: leases by the clock, kills, locks; and random operations against a dumb model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.registry import BrokerRecord, Registration, brokers
from qmq_coordination.store import Delete, Operation, Put
from qmq_coordination.subjects import SubjectCache, SubjectCatalog
from support import eventually

from qmq.errors import FolderInUse, SubjectExists, UnknownSubject
from qmq.model import SubjectConfig

KEYS = st.sampled_from(["a", "a/1", "a/2", "b", "c/☃"])
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, st.binary(max_size=3)), st.builds(Delete, KEYS, st.booleans())
)


class Model:
    """All states the store ever had, as dictionaries."""

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
                gone = [key for key in state if (key.startswith(each.key) if each.is_prefix else key == each.key)]
                touched |= bool(gone)
                for key in gone:
                    del state[key]
        if touched:
            self.states.append(state)


@settings(max_examples=60)
@given(st.lists(st.lists(OPERATIONS, min_size=1, max_size=3), max_size=25))
def test_random_transactions_agree_with_a_model_now_and_at_every_revision(transactions: list[list[Operation]]) -> None:
    async def check() -> None:
        store, model = EmbeddedStore(), Model()
        for operations in transactions:
            puts = [each.key for each in operations if isinstance(each, Put)]
            if len(puts) != len(set(puts)) or (len(operations) > 1 and any(isinstance(each, Delete) for each in operations)):
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


async def test_a_restart_begins_leases_anew(tmp_path: Path) -> None:
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
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(200):
        acknowledged = int(child.stdout.readline())
    child.kill()
    acknowledged = max([acknowledged, *[int(line) for line in child.stdout.read().split("\n")[:-1] if line]])
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


async def test_the_subject_cache_follows_and_survives_compaction() -> None:
    store = EmbeddedStore()
    catalog, cache = SubjectCatalog(store), SubjectCache(store)
    await catalog.create(SubjectConfig("early"))
    await cache.start()
    assert cache.look_up("early") == SubjectConfig("early")
    await catalog.create(SubjectConfig("late"))
    await store.compact((await store.list("")).revision)
    await catalog.create(SubjectConfig("later"))
    await eventually(lambda: cache.look_up("later"))
    assert cache.look_up("late") == SubjectConfig("late")
    await cache.stop()
    await store.close()


async def test_a_broker_is_listed_while_it_lives_and_registers_again_after_a_lost_lease() -> None:
    now = [0.0]
    store = EmbeddedStore(monotonic_s=lambda: now[0])
    record = BrokerRecord("g", "127.0.0.1:1", "127.0.0.1:2", 1)
    registration = Registration(store, record, lease_s=0.06)
    await registration.start()
    assert await brokers(store) == [record]
    now[0] = 1.0
    assert await brokers(store) == []
    async with asyncio.timeout(10):
        while await brokers(store) != [record]:
            await asyncio.sleep(0.01)
    await registration.stop()
    assert await brokers(store) == []
    await store.close()
