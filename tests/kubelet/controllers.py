"""What Kubernetes' controllers decide: the StatefulSet's and the Deployment's rolling update, the scheduler's choice of a node, and
whether a PodDisruptionBudget allows an eviction. Pure; the rules are those of Kubernetes 1.33's source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kubelet.manifests import Budget, PodSet

SURGE: Final = 1


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod as its controller sees it."""

    name: str
    labels: Mapping[str, str]
    revision: str
    node: str
    ready_s: float | None
    """For how long it has been ready; None if it is not."""
    is_terminating: bool = False

    @property
    def is_ready(self) -> bool:
        return self.ready_s is not None and not self.is_terminating

    def is_available(self, min_ready_s: float) -> bool:
        return self.is_ready and self.ready_s is not None and self.ready_s >= min_ready_s


@dataclass(frozen=True, slots=True)
class Step:
    """The pods that a controller creates and deletes now."""

    create: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()


def next_step(wanted: PodSet, pods: Sequence[PodView]) -> Step:
    return _stateful(wanted, pods) if wanted.is_stateful else _deployed(wanted, pods)


def _stateful(wanted: PodSet, pods: Sequence[PodView]) -> Step:
    """With `Parallel`, all missing pods together. Otherwise the highest ordinal of another revision, once all pods with higher ordinals are
    available.
    """
    by_name = {each.name: each for each in pods}
    names = [f"{wanted.name}-{ordinal}" for ordinal in range(wanted.replicas)]
    missing = tuple(each for each in names if each not in by_name)
    if missing:
        return Step(create=missing)
    for name in reversed(names):
        pod = by_name[name]
        if pod.revision != wanted.template.revision and not pod.is_terminating:
            return Step(delete=(name,))
        if not pod.is_available(wanted.min_ready_s):
            return Step()
    return Step()


def _deployed(wanted: PodSet, pods: Sequence[PodView]) -> Step:
    """One more than wanted at most, and never fewer available ones than wanted while pods are replaced (maxSurge 1, maxUnavailable 0)."""
    living = [each for each in pods if not each.is_terminating]
    old = [each for each in living if each.revision != wanted.template.revision]
    fresh = [each for each in living if each.revision == wanted.template.revision]
    if len(fresh) < wanted.replicas and len(living) < wanted.replicas + SURGE:
        taken = {each.name for each in pods}
        free = (name for number in range(len(taken) + 1) if (name := f"{wanted.name}-{number}") not in taken)
        return Step(create=(next(free),))
    available = sum(each.is_available(wanted.min_ready_s) for each in living)
    unready = [each.name for each in old if not each.is_ready]
    if unready:
        return Step(delete=(unready[0],))
    if old and available > wanted.replicas:
        return Step(delete=(old[0].name,))
    return Step()


def choose_node(wanted: PodSet, nodes: Iterable[str], cordoned: frozenset[str], pods: Sequence[PodView]) -> str | None:
    """The node with the fewest pods of this set, or none: topology spread counts cordoned nodes too (nodeTaintsPolicy: Ignore)."""
    own = [each for each in pods if each.labels == wanted.template.labels]
    counts = {node: sum(each.node == node for each in own) for node in nodes}
    loads = {node: sum(each.node == node for each in pods) for node in counts}
    least = min(counts.values())
    allowed = [node for node in counts if node not in cordoned and not (wanted.template.spreads_hosts and counts[node] + 1 - least > 1)]
    return min(allowed, key=lambda node: (counts[node], loads[node], node), default=None)


def allows_eviction(budgets: Iterable[Budget], pod: PodView, pods: Sequence[PodView], expected: Mapping[str, int]) -> bool:
    """The eviction API's answer. `expected` is the number of pods that each budget's controller wants."""
    for budget in budgets:
        if not budget.covers(pod.labels):
            continue
        healthy = sum(each.is_ready and budget.covers(each.labels) for each in pods)
        needed = expected[budget.name] - budget.unavailable_max
        if healthy - pod.is_ready < needed:
            return False
    return True
