"""The metrics of a metaserver: its requests, and its view of the cluster; and its readiness. All
metaservers should agree, so alerts use the worst value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq_coordination.broker_groups import BrokerGroupState, Health
from qmq_coordination.subjects import PauseKind
from qmq_coordination.view import ClusterView

from qmq.meta.server import MetaServer
from qmq.metrics.figures import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    SLICE,
    Figure,
    Readiness,
    Reading,
    Row,
    one,
)
from qmq.model import Order

REQUESTS: Final = Figure(
    "qmq_meta_requests_total", COUNTER, ("method",), "Requests to the metaserver."
)
FAILED: Final = Figure(
    "qmq_meta_failures_total", COUNTER, ("method", "code"), "Requests that failed, by gRPC's code."
)
SECONDS: Final = Figure(
    "qmq_meta_request_seconds",
    HISTOGRAM,
    (),
    "Duration of requests that the metaserver answers at once.",
)
WATCHERS: Final = Figure(
    "qmq_meta_watchers", GAUGE, (), "Clients that watch this metaserver for changes."
)
LEADER: Final = Figure(
    "qmq_meta_leader",
    GAUGE,
    (),
    "1 if this metaserver is the leader, which continues unfinished work; exactly one is.",
)
SUBJECTS: Final = Figure(
    "qmq_subjects", GAUGE, ("order",), "Subjects, by order: none, strict, best_effort."
)
HAS_MASTER: Final = Figure(
    "qmq_broker_group_has_master", GAUGE, ("broker_group",), "1 if the broker group has a master."
)
PRESENT: Final = Figure(
    "qmq_broker_group_present_replicas",
    GAUGE,
    ("broker_group",),
    "Replicas of the broker group whose process is alive.",
)
VOTERS: Final = Figure(
    "qmq_broker_group_voters",
    GAUGE,
    ("broker_group",),
    "Replicas of the broker group that count for majorities.",
)
FENCED: Final = Figure(
    "qmq_broker_group_fenced_partitions",
    GAUGE,
    ("broker_group",),
    "Partitions of the broker group that were closed while it was unreachable.",
)
ROUTE: Final = Figure(
    "qmq_route_version", GAUGE, ("subject",), "Latest version of an ordered subject's route."
)
PAUSES: Final = Figure(
    "qmq_pauses",
    GAUGE,
    ("kind",),
    "Pauses that operators ordered: of groups, consumers and clients.",
)
CHANGES: Final = Figure(
    "qmq_route_changes_pending", GAUGE, (), "Ordered subjects whose route is being changed."
)
GROUP_VERSION: Final = Figure(
    "qmq_group_route_version",
    GAUGE,
    ("subject", "group"),
    "The oldest version of the route that the group still reads.",
)
MEMBERS: Final = Figure(
    "qmq_group_members",
    GAUGE,
    ("subject", "group"),
    "Live consumers of an ordered subject's group.",
)


class MetaSource:
    figures: Final = (
        REQUESTS,
        FAILED,
        SECONDS,
        WATCHERS,
        LEADER,
        SUBJECTS,
        HAS_MASTER,
        PRESENT,
        VOTERS,
        FENCED,
        PAUSES,
        ROUTE,
        CHANGES,
        GROUP_VERSION,
        MEMBERS,
    )

    def __init__(self, server: MetaServer, view: ClusterView) -> None:
        self._server = server
        self._view = view

    def read(self) -> Iterator[Reading | None]:
        calls = self._server.calls
        yield Reading(
            REQUESTS, [((method,), count) for method, count in sorted(calls.requests.items())]
        )
        yield Reading(FAILED, [(labels, count) for labels, count in sorted(calls.failures.items())])
        yield one(SECONDS, calls.durations.histogram())
        yield one(WATCHERS, self._server.watchers)
        yield one(LEADER, int(self._server.is_leader))
        yield None
        yield from self._subjects()
        yield from self._groups()
        yield from self._pauses()
        yield from self._ordered()

    def _subjects(self) -> Iterator[Reading | None]:
        counts = dict.fromkeys(Order, 0)
        for config in self._view.subjects():
            counts[config.order] += 1
        yield Reading(SUBJECTS, [((order.name.lower(),), count) for order, count in counts.items()])
        yield None

    def _groups(self) -> Iterator[Reading | None]:
        groups: list[BrokerGroupState] = self._view.groups()
        yield Reading(
            HAS_MASTER, [((each.name,), int(each.health is not Health.OFFLINE)) for each in groups]
        )
        yield Reading(
            PRESENT, [((each.name,), len(self._view.present(each.name))) for each in groups]
        )
        yield Reading(VOTERS, [((each.name,), len(each.voters)) for each in groups])
        yield Reading(
            FENCED, [((each.name,), len(self._view.fences(each.name))) for each in groups]
        )

    def _pauses(self) -> Iterator[Reading | None]:
        counts = dict.fromkeys(PauseKind, 0)
        for whom in list(self._view.delivery.pauses):
            counts[whom.kind] += 1
        yield Reading(PAUSES, [((kind.value,), count) for kind, count in counts.items()])

    def _ordered(self) -> Iterator[Reading | None]:
        pending = 0
        routes: list[Row] = []
        versions: list[Row] = []
        members: list[Row] = []
        for number, (config, state) in enumerate(self._view.ordered_subjects()):
            pending += state.pending is not None
            routes.append(((config.name,), state.latest))
            for name, record in sorted(state.groups.items()):
                versions.append(((config.name, name), record.frontier.version))
                members.append(((config.name, name), len(self._view.members(config.name, name))))
            if number % SLICE == 0:
                yield None
        yield Reading(ROUTE, routes)
        yield Reading(GROUP_VERSION, versions)
        yield Reading(MEMBERS, members)
        yield one(CHANGES, pending)


def of_meta(is_serving: bool) -> Readiness:
    """A metaserver is ready once it has listed the cluster; after that it answers from memory, even
    while etcd cannot be reached.
    """
    return Readiness(
        is_serving, "serving" if is_serving else "starting: it waits for the coordination store"
    )
