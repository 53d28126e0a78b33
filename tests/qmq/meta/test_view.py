"""The view of the cluster: its picture against random histories, and following both kinds of store
through what goes wrong.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_coordination.broker_groups import (
    Health,
    MasterRecord,
    Mode,
    ReplicaRecord,
    group_key,
    presence_key,
    replica_key,
)
from qmq_coordination.coordination_store import (
    CoordinationStore,
    KeyListing,
    KeyValue,
    LeaseId,
    Revision,
    WatchedChanges,
    WatchEvent,
)
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.etcd.store import EtcdStore
from qmq_coordination.subjects import SubjectCatalog, subject_key
from qmq_coordination.view import ClusterView, Picture, ViewChange
from support import eventually
from support.etcd_process import EtcdProcess
from support.stores import FaultyStore

from qmq.errors import CoordinationError, CoordinationUnavailable
from qmq.model import SubjectConfig

# --- the picture ----------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12)
State = dict[str, KeyValue]


def history(steps: list[tuple[str, bool]]) -> tuple[list[State], list[WatchedChanges]]:
    """Every state of a store, from revision 1 on, and the change that led to each but the first."""
    states: list[State] = [{}]
    changes = []
    for revision, (letter, is_put) in enumerate(steps, 2):
        key, state = subject_key(letter), dict(states[-1])
        if not is_put and key not in state:
            is_put = True
        now = (
            KeyValue(
                key, json.dumps({"name": letter, "retention_ms": revision}).encode(), 1, revision, 1
            )
            if is_put
            else None
        )
        if now is None:
            del state[key]
        else:
            state[key] = now
        states.append(state)
        changes.append(WatchedChanges(Revision(revision), (WatchEvent(key, revision, now),)))
    return states, changes


@given(STEPS, st.data())
def test_in_any_order_of_arrival_the_view_ends_as_the_store_and_reports_changes(
    steps: list[tuple[str, bool]], data: st.DataObject
) -> None:
    states, changes = history(steps)
    picture, told, revision = Picture(), dict[str, SubjectConfig](), 0
    for change in changes:
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(1, len(states)))
            if data.draw(st.booleans()):
                _tell(
                    picture.show(KeyListing(Revision(at), tuple(states[at - 1].values()))),
                    picture,
                    told,
                )
            elif states[at - 1]:
                _tell(
                    picture.learn(
                        data.draw(
                            st.sampled_from(
                                sorted(states[at - 1].values(), key=lambda item: item.key)
                            )
                        )
                    ),
                    picture,
                    told,
                )
        _tell(picture.follow(change), picture, told)
        assert picture.revision >= revision
        revision = picture.revision
    assert picture.items == states[-1]
    assert picture.subjects == told
    assert {name: config.retention_ms for name, config in told.items()} == {
        key.rpartition("/")[2]: item.mod_revision for key, item in states[-1].items()
    }


def _tell(change: ViewChange, picture: Picture, told: dict[str, SubjectConfig]) -> None:
    """Notify a listener that reads only the changed keys."""
    for name in change.subjects:
        if name in picture.subjects:
            told[name] = picture.subjects[name]
        else:
            del told[name]


def test_a_value_that_cannot_be_read_hides_only_itself() -> None:
    picture = Picture()
    items = [
        (subject_key("bad"), b"{"),
        (subject_key("good"), b'{"name": "good"}'),
        (replica_key("g", "r"), b"[]"),
        ("/qmq/else", b"x"),
    ]
    items += [
        (group_key("g", "master"), b"7"),
        (group_key("g", "mode"), b"read-only"),
        (group_key("h", "mode"), b"odd"),
    ]
    picture.show(
        KeyListing(Revision(5), tuple(KeyValue(key, value, 2, 2, 1) for key, value in items))
    )
    assert (list(picture.subjects), picture.replicas) == (["good"], {"g": {}})
    assert [(name, state.mode) for name, state in picture.groups.items()] == [("g", Mode.READ_ONLY)]


# --- following a store ----------------------------------------------------------------------------


async def test_the_view_has_all_that_is_there_and_follows(store: CoordinationStore) -> None:
    record = ReplicaRecord("g1-a", "g1", "h:1", "h:2")
    await SubjectCatalog(store).create(SubjectConfig("early", groups=("g1",)))
    await store.put(
        group_key("g1", "members"),
        b'{"version": 1, "voters": ["g1-a", "g1-b"], "learners": ["g1-c"]}',
    )
    view = ClusterView(store)
    told: list[ViewChange] = []
    await view.start()
    stop = view.on_change(told.append)
    assert view.subject("early") == SubjectConfig("early", groups=("g1",))
    assert view.group("g1").voters == ("g1-a", "g1-b")
    assert view.group("g1").learners == ("g1-c",)
    assert (view.group("g1").health, view.group("none").items) == (Health.OFFLINE, {})
    lease = await store.grant(30)
    await store.put(
        group_key("g1", "master"), MasterRecord("g1-a", 3, "x", "h:1", "h:2").encode(), lease
    )
    await store.put(presence_key("g1", "g1-a"), record.encode(), lease)
    await store.put(replica_key("g1", "g1-a"), record.encode())
    await store.put(group_key("g1", "mode"), b"read-only")
    await SubjectCatalog(store).create(SubjectConfig("late"))
    await eventually(lambda: view.subject("late"))
    assert [state.name for state in view.groups()] == ["g1"]
    assert (view.group("g1").health, view.group("g1").mode) == (Health.READ_ONLY, Mode.READ_ONLY)
    assert view.replicas("g1") == view.present("g1") == {"g1-a": record}
    assert [each.name for each in view.subjects("l")] == ["late"]
    await store.revoke(lease)
    await eventually(lambda: not view.present("g1") and view.group("g1").master is None)
    assert view.replicas("g1") == {"g1-a": record}
    assert {name for change in told for name in change.subjects} == {"late"}
    assert {name for change in told for name in change.groups | change.replicas} == {"g1"}
    stop()
    await view.stop()


async def test_a_writer_sees_its_key_at_once_and_a_failing_listener_does_no_harm(
    store: CoordinationStore,
) -> None:
    view = ClusterView(store)
    await view.start()
    told: list[ViewChange] = []

    def fail(_: ViewChange) -> None:
        raise RuntimeError("a listener")

    view.on_change(fail)
    view.on_change(told.append)
    await SubjectCatalog(store).create(SubjectConfig("s"))
    assert await view.fetch(subject_key("s")) is not None
    assert view.subject("s") == SubjectConfig("s")
    await store.put("/qmq/subjects/t", b'{"name": "t"}')
    await eventually(lambda: view.subject("t"))
    assert [change.subjects for change in told] == [{"s"}, {"t"}]
    await view.stop()


async def test_compaction_under_a_watch_is_survived() -> None:
    store = EmbeddedStore()
    catalog, view = SubjectCatalog(store), ClusterView(store)
    await view.start()
    await catalog.create(SubjectConfig("a"))
    await store.compact((await store.list("")).revision)
    await catalog.create(SubjectConfig("b"))
    await eventually(lambda: view.subject("a") and view.subject("b"))
    await view.stop()
    await store.close()


class Deaf(FaultyStore):
    """A store whose watch never sends anything."""

    def watch(self, prefix: str, start_revision: int) -> object:
        return self._silence()

    async def _silence(self) -> object:
        await asyncio.Event().wait()
        yield


async def test_a_silent_watch_delays_a_change_and_loses_none() -> None:
    inner = EmbeddedStore()
    view = ClusterView(Deaf(inner), relist_s=0.01, probe_s=0.01)  # type: ignore[arg-type]
    await view.start()
    await SubjectCatalog(inner).create(SubjectConfig("s"))
    await eventually(lambda: view.subject("s"))
    await inner.delete(subject_key("s"))
    await eventually(lambda: view.subject("s") is None)
    await view.stop()
    await inner.close()


async def test_while_the_store_is_away_the_view_answers_and_knows_for_how_long() -> None:
    inner, now = EmbeddedStore(), [0.0]
    store = Deaf(inner)
    await SubjectCatalog(inner).create(SubjectConfig("s"))
    store.cut("list", "get")
    view = ClusterView(store, relist_s=0.01, probe_s=0.01, monotonic_s=lambda: now[0])  # type: ignore[arg-type]
    starting = asyncio.create_task(view.start())
    await asyncio.sleep(0)
    assert not starting.done()
    store.heal()
    await starting
    assert view.silent_ms == 0
    store.cut("list", "get")
    now[0] = 7.0
    assert (view.silent_ms, view.subject("s")) == (7000, SubjectConfig("s"))
    with pytest.raises(CoordinationUnavailable):
        await view.fetch(subject_key("t"))
    store.heal()
    await eventually(lambda: view.silent_ms == 0)
    await view.stop()
    await inner.close()


async def test_a_store_that_refuses_is_reported_at_the_start() -> None:
    store = EmbeddedStore()
    await store.close()
    with pytest.raises(CoordinationError, match="closed"):
        await ClusterView(store).start()


async def test_etcd_may_be_killed_and_come_back(own_etcd: EtcdProcess) -> None:
    store = EtcdStore([own_etcd.endpoint], call_s=0.2, total_s=0.5)
    view = ClusterView(store, relist_s=0.5, probe_s=0.05)
    await SubjectCatalog(store).create(SubjectConfig("before"))
    await view.start()
    own_etcd.kill()
    await eventually(lambda: view.silent_ms > 300)
    assert view.subject("before") == SubjectConfig("before")
    own_etcd.start()
    await eventually(lambda: view.silent_ms < 300)
    await store.put(subject_key("after"), b'{"name": "after"}', LeaseId(0))
    await eventually(lambda: view.subject("after"))
    await view.stop()
    await store.close()
