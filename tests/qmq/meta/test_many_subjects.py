"""Creating a subject costs the same however many there are, since anybody may create them; and so
does a metaserver's sweep.
"""

from __future__ import annotations

from meta_support import Caller, brokers
from qmq_coordination.coordination_store import CoordinationStore
from qmq_coordination.ordered_records import OrderedState
from qmq_coordination.view import ClusterView
from support import eventually

from qmq.meta.calls import MetaTiming
from qmq.meta.server import MetaConfig, MetaServer
from qmq.model import SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb


class CountingView(ClusterView):
    """Counts how often all subjects were listed, and how often the ordered ones only."""

    listed = listed_ordered = 0

    def subjects(self, prefix: str = "") -> list[SubjectConfig]:
        self.listed += 1
        return super().subjects(prefix)

    def ordered_subjects(self) -> list[tuple[SubjectConfig, OrderedState]]:
        self.listed_ordered += 1
        return super().ordered_subjects()


async def test_no_subject_is_created_and_nothing_swept_by_listing_all_of_them(
    store: CoordinationStore,
) -> None:
    view = CountingView(store, relist_s=0.3, probe_s=0.05)
    await view.start()
    server = MetaServer(
        store, view, MetaConfig("127.0.0.1", 0, timing=MetaTiming(sweep_s=0.01, reshard_s=0.01))
    )
    await server.start()
    caller = Caller(server.address)
    async with brokers(store, "a"):
        await eventually(lambda: view.group("a").master is not None)
        for number in range(3):
            await caller("Locate", pb.LocateRequest(subject=f"s{number}", create_if_missing=True))
        await eventually(lambda: view.listed_ordered > 5)
    await caller.channel.close()
    await server.stop()
    await view.stop()
    assert view.listed == 0


async def test_ordered_subjects_are_found_among_others(store: CoordinationStore) -> None:
    view = ClusterView(store, relist_s=0.3, probe_s=0.05)
    await view.start()
    server = MetaServer(store, view, MetaConfig("127.0.0.1", 0))
    await server.start()
    caller = Caller(server.address)
    async with brokers(store, "a"):
        await eventually(lambda: view.group("a").master is not None)
        for name, order in (("b", "strict"), ("a", "strict"), ("plain", "")):
            settings = pb.SubjectSettings(
                name=name, order=order, logical_partitions=16 if order else 0, broker_groups=["a"]
            )
            await caller("CreateSubject", pb.CreateSubjectRequest(settings=settings))
        await eventually(lambda: len(view.subject_names()) == 3)
        assert [(config.name, state.subject) for config, state in view.ordered_subjects()] == [
            ("a", "a"),
            ("b", "b"),
        ]
    await caller.channel.close()
    await server.stop()
    await view.stop()
