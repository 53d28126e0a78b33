"""The decisions of the small Kubernetes are those of the real one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from kubelet.manifests import Budget, PodSet, PodTemplate
from kubelet.process_kubernetes import PodView, Step, allows_eviction, choose_node, next_step

LABELS = {"component": "g1"}
TEMPLATE = PodTemplate(
    LABELS, "qmq:2", ("qmq", "broker"), (), {}, None, None, None, (), 60.0, True, "new"
)
STATEFUL = PodSet("g1", True, 3, 5.0, "g1", TEMPLATE)
DEPLOYED = PodSet("meta", False, 2, 0.0, "", replace(TEMPLATE, spreads_hosts=False))
BUDGET = Budget("g1", LABELS, 1)


def pod(
    name: str,
    revision: str = "new",
    ready_s: float | None = 60.0,
    node: str = "n1",
    *,
    is_terminating: bool = False,
) -> PodView:
    return PodView(name, LABELS, revision, node, ready_s, is_terminating)


def test_a_stateful_set_starts_all_that_are_missing_at_once() -> None:
    assert next_step(STATEFUL, []) == Step(create=("g1-0", "g1-1", "g1-2"))
    assert next_step(STATEFUL, [pod("g1-0"), pod("g1-2")]) == Step(create=("g1-1",))


def test_a_rolling_update_goes_down_and_waits_until_the_one_above_is_available() -> None:
    old = [pod(f"g1-{number}", "old") for number in range(3)]
    assert next_step(STATEFUL, old) == Step(delete=("g1-2",))
    assert next_step(STATEFUL, [*old[:2], replace(old[2], is_terminating=True)]) == Step()
    for ready_s in (None, 4.9):
        assert next_step(STATEFUL, [*old[:2], pod("g1-2", ready_s=ready_s)]) == Step()
    assert next_step(STATEFUL, [*old[:2], pod("g1-2", ready_s=5.0)]) == Step(delete=("g1-1",))
    assert next_step(STATEFUL, [pod(f"g1-{number}") for number in range(3)]) == Step()


def test_a_deployment_adds_one_and_takes_an_old_one_when_that_is_ready() -> None:
    old = [pod("meta-0", "old"), pod("meta-1", "old")]
    assert next_step(DEPLOYED, old) == Step(create=("meta-2",))
    assert next_step(DEPLOYED, [*old, pod("meta-2", ready_s=None)]) == Step()
    assert next_step(DEPLOYED, [*old, pod("meta-2")]) == Step(delete=("meta-0",))
    leaving = replace(old[0], is_terminating=True)
    assert next_step(DEPLOYED, [leaving, old[1], pod("meta-2")]) == Step(create=("meta-3",))


def test_no_two_replicas_of_a_group_share_a_node_even_if_one_is_cordoned() -> None:
    there = [pod("g1-1", node="n2"), pod("g1-2", node="n3")]
    assert choose_node(STATEFUL, ("n1", "n2", "n3", "n4"), frozenset({"n1"}), there) == "n4"
    assert choose_node(STATEFUL, ("n1", "n2", "n3"), frozenset({"n1"}), there) is None
    assert choose_node(STATEFUL, ("n1", "n2", "n3"), frozenset(), there) == "n1"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=3))
def test_an_eviction_leaves_the_budget_enough_ready_pods(states: list[tuple[bool, bool]]) -> None:
    pods = [
        pod(f"g1-{n}", ready_s=1.0 if ready else None, is_terminating=ending)
        for n, (ready, ending) in enumerate(states)
    ]
    for each in pods:
        ready = sum(other.is_ready for other in pods if other is not each)
        assert allows_eviction([BUDGET], each, pods, {"g1": 3}) == (ready >= 2)
    assert allows_eviction([replace(BUDGET, labels={"component": "other"})], pods[0], pods, {})
