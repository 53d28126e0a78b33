"""Files with routes from another source."""

from __future__ import annotations

from qmq_ordering.routes import LpRange

from qmq.columns.files.routes import empty_queues
from qmq.columns.model import QueueKey, RoutePartition, Routes, SourceQueue, Topology
from qmq.columns.options import StartPosition
from qmq.columns.planning import admit
from qmq.columns.reading import RoutedAddress, address_of
from qmq.columns.servers.log import ServerAddress

PARTS = {
    1: RoutePartition(1, LpRange(0, 8), "g1", 1),
    2: RoutePartition(2, LpRange(0, 8), "g2", 2, (1,)),
    3: RoutePartition(3, LpRange(0, 8), "g9", 3, (2,)),
}
ROUTES = {"s": Routes(8, 3, PARTS, {1: 5, 2: 4})}


def test_a_source_that_the_files_lack_still_holds_up_its_targets() -> None:
    """The commit mark of the source's folder may lag behind that of the target's folder."""
    queues = empty_queues(ROUTES, {"g1", "g2"})
    assert queues == {
        QueueKey("s", 1, "g1"): SourceQueue(QueueKey("s", 1, "g1"), 0, 0, is_sealed=True),
        QueueKey("s", 2, "g2"): SourceQueue(QueueKey("s", 2, "g2"), 0, 0, is_sealed=True),
    }
    target = QueueKey("s", 3, "g9")
    topology = Topology({**queues, target: SourceQueue(target, 0, 7)}, ROUTES)
    assert admit(topology, {}) == {}
    assert admit(topology, {QueueKey("s", 1, "g1"): 5, QueueKey("s", 2, "g2"): 4})[target] == 7


def test_paths_with_servers_take_only_the_routes_from_them() -> None:
    assert isinstance(address_of(StartPosition("a:1", ("/folder",))), RoutedAddress)
    assert isinstance(address_of(StartPosition("a:1")), ServerAddress)
