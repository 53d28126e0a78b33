"""The metrics of a replica's role in its broker group, and of the others' lag while it is master. `qmq dev` is always master."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from qmq.errors import Unavailable
from qmq.metrics.figures import COUNTER, GAUGE, Figure, Reading, one
from qmq.proto.v1 import control_pb2 as pb

_OF: Final = ("broker_group",)
_PEER: Final = ("broker_group", "replica")

INFO: Final = Figure(
    "qmq_replica_info", GAUGE, (*_OF, "replica", "role"), "Always 1; the labels name the replica and its role in its broker group."
)
SERVING: Final = Figure("qmq_serving", GAUGE, _OF, "1 while this replica is master and serves clients.")
EPOCH: Final = Figure("qmq_epoch", GAUGE, _OF, "The highest epoch that this replica knows of.")
ROLES: Final = Figure(
    "qmq_role_changes_total", COUNTER, (*_OF, "role"), "Changes of this replica to a role; master: elections that it won."
)
REFUSED: Final = Figure(
    "qmq_replication_refused_total",
    COUNTER,
    (*_OF, "kind"),
    "Refused on connections of replicas: hellos, proofs, messages of non-members or of epochs that no replica won, violations.",
)
LAST: Final = Figure("qmq_last_index", GAUGE, _OF, "Index of the last entry that this replica has written.")
COMMITTED: Final = Figure("qmq_commit_index", GAUGE, _OF, "Index up to which this replica knows all entries to be committed.")
WHOLE: Final = Figure("qmq_whole", GAUGE, _OF, "0 if this replica may lack entries that it acknowledged: it does not count in elections.")
MEMBERS: Final = Figure("qmq_members", GAUGE, (*_OF, "kind"), "Replicas of the broker group: voters and learners.")
LAG: Final = Figure(
    "qmq_replication_lag_entries",
    GAUGE,
    _PEER,
    "Entries of the master that the other replica does not have yet; only the master reports it.",
)
IN_STEP: Final = Figure("qmq_replication_in_step", GAUGE, _PEER, "1 if the other replica is in step; only the master reports it.")
SILENT: Final = Figure(
    "qmq_replication_silent_seconds", GAUGE, _PEER, "Seconds since the last message of the other replica; only the master reports it."
)


class ReplicaSource:
    """`describe` raises Unavailable while the replica starts; `roles` counts the roles it took."""

    figures: Final = (INFO, SERVING, EPOCH, ROLES, REFUSED, LAST, COMMITTED, WHOLE, MEMBERS, LAG, IN_STEP, SILENT)

    def __init__(
        self,
        group: str,
        describe: Callable[[], pb.ReplicaStatus],
        roles: Mapping[str, int] | None = None,
        refused: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._group = group
        self._describe = describe
        self._roles = roles if roles is not None else {}
        self._refused = refused

    def read(self) -> Iterator[Reading | None]:
        group = self._group
        try:
            info = self._describe()
        except Unavailable:
            return
        yield one(INFO, 1, group, info.replica, info.role)
        yield one(SERVING, int(info.is_serving), group)
        yield one(EPOCH, info.epoch, group)
        yield Reading(ROLES, [((group, role), count) for role, count in sorted(self._roles.items())])
        yield Reading(REFUSED, [((group, what), count) for what, count in sorted(self._refused().items())])
        yield one(LAST, info.last_index, group)
        yield one(COMMITTED, info.commit_index, group)
        yield one(WHOLE, int(info.is_whole), group)
        yield Reading(MEMBERS, [((group, "voter"), len(info.voters)), ((group, "learner"), len(info.learners))])
        peers = sorted(info.peers, key=lambda each: each.replica)
        yield Reading(LAG, [((group, each.replica), max(info.last_index - each.match_index, 0)) for each in peers])
        yield Reading(IN_STEP, [((group, each.replica), int(each.in_step)) for each in peers])
        yield Reading(SILENT, [((group, each.replica), each.silent_ms / 1000) for each in peers])
