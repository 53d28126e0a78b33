"""A broker looks a subject up once, and again when that subject, or any route, may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import ManualClock, intake

from qmq.broker.produce_checks import BrokerSubjects, QueueDestinations, Routing
from qmq.errors import Outcome, RouteChanged, UnknownSubject
from qmq.log.log_config import LogConfig
from qmq.log.recovery import open_store
from qmq.model import Order, SubjectConfig


class Known:
    """The settings of subjects, and the names that were looked up."""

    def __init__(self, *names: str) -> None:
        self.configs = {name: SubjectConfig(name) for name in names}
        self.asked: list[str] = []

    def look_up(self, name: str) -> SubjectConfig | None:
        self.asked.append(name)
        return self.configs.get(name)


@pytest.fixture
def known() -> Known:
    return Known("a", "b")


@pytest.fixture
def subjects(known: Known, tmp_path: Path) -> Iterator[BrokerSubjects]:
    store = open_store(tmp_path, LogConfig(), ManualClock())
    find = QueueDestinations(Routing()).find
    yield BrokerSubjects(store, known.look_up, find, has_consumers=True)
    store.close()


def test_only_a_changed_subject_is_looked_up_again(subjects: BrokerSubjects, known: Known) -> None:
    for name in (b"a", b"b", b"a", b"b"):
        subjects.find_queue(name, 0)
    assert known.asked == ["a", "b"]
    known.configs["b"] = replace(known.configs["b"], body_bytes_max=7)
    subjects.forget(["b", "new"])
    assert subjects.find_queue(b"b", 0).body_bytes_max == 7
    subjects.find_queue(b"a", 0)
    assert known.asked == ["a", "b", "b"]


def test_a_deleted_subject_is_unknown_at_once(subjects: BrokerSubjects, known: Known) -> None:
    subjects.find_queue(b"a", 0)
    del known.configs["a"]
    subjects.forget(["a"])
    with pytest.raises(UnknownSubject):
        subjects.find_queue(b"a", 0)


def test_a_partition_that_lost_its_route_does_not_deny_what_it_stores(tmp_path: Path) -> None:
    """The coordination store was put back to routes from before the partition."""
    store = open_store(tmp_path, LogConfig(), ManualClock())
    config = SubjectConfig("o", order=Order.STRICT, logical_partitions=16)
    subjects = BrokerSubjects(
        store, {"o": config}.get, QueueDestinations(Routing()).find, has_consumers=True
    )
    store.append([intake(store.open_queue("o", 2), [b"x"])])
    for partition, outcome in ((2, Outcome.UNKNOWN), (3, Outcome.NOT_STORED)):
        with pytest.raises(RouteChanged) as refused:
            subjects.find_queue(b"o", partition)
        assert refused.value.outcome is outcome
    store.close()


def test_without_names_all_subjects_are_looked_up_again(
    subjects: BrokerSubjects, known: Known
) -> None:
    subjects.find_queue(b"a", 0)
    subjects.forget()
    subjects.find_queue(b"a", 0)
    assert known.asked == ["a", "a"]
