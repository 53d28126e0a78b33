"""Placement of subjects: the promises of qmq/meta/catalog.py, over random clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qmq_coordination.coordination_store import KeyListing, KeyValue, WatchedChanges, WatchEvent
from qmq_coordination.subjects import encode_subject, subject_key
from qmq_coordination.view import Picture

from qmq.errors import InvalidArgument, NotConnected, ReadOnly
from qmq.meta.catalog import Candidate, choose, hosts_of, move
from qmq.model import SubjectConfig

NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)
CANDIDATES = NAMES.flatmap(
    lambda names: st.tuples(
        *[
            st.builds(Candidate, st.just(name), st.booleans(), st.booleans(), st.integers(0, 5))
            for name in names
        ]
    )
)


@given(CANDIDATES, st.integers(1, 5))
def test_only_groups_that_take_messages_are_chosen_and_the_best_of_them(
    candidates: tuple[Candidate, ...], count: int
) -> None:
    by_name = {each.name: each for each in candidates}
    writable = {each.name for each in candidates if each.is_writable}
    if not writable:
        with pytest.raises(ReadOnly, match="resume"):
            choose(candidates, count)
        return
    chosen = choose(candidates, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(writable))
    assert set(chosen) <= writable
    for name in chosen:
        for other in writable - set(chosen):
            assert _rank(by_name[name]) < _rank(by_name[other])


def _rank(each: Candidate) -> tuple[bool, int, str]:
    return (not each.has_master, each.subjects, each.name)


@given(CANDIDATES, st.integers(1, 3), st.randoms())
def test_the_choice_does_not_depend_on_the_order_in_which_groups_are_listed(
    candidates: tuple[Candidate, ...], count: int, random: object
) -> None:
    shuffled = list(candidates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    if any(each.is_writable for each in candidates):
        assert choose(candidates, count) == choose(shuffled, count)


def count_subjects(subjects: Iterable[SubjectConfig]) -> Counter[str]:
    return Counter(group for config in subjects for group in config.groups)


def item(config: SubjectConfig, revision: int) -> KeyValue:
    return KeyValue(subject_key(config.name), encode_subject(config), 1, revision, 1)


CONFIGS = st.builds(
    SubjectConfig,
    st.sampled_from("abcd"),
    groups=st.lists(st.sampled_from("xyz"), unique=True).map(tuple),
)


@given(
    st.lists(
        st.one_of(
            CONFIGS, st.sampled_from("abcd"), st.lists(CONFIGS, unique_by=lambda each: each.name)
        )
    )
)
def test_subjects_are_counted_as_they_come_move_and_go(
    steps: list[SubjectConfig | str | list[SubjectConfig]],
) -> None:
    picture = Picture()
    for revision, step in enumerate(steps, 2):
        if isinstance(step, list):
            picture.show(KeyListing(revision, tuple(item(each, revision) for each in step)))
        elif isinstance(step, str):
            picture.follow(
                WatchedChanges(revision, (WatchEvent(subject_key(step), revision, None),))
            )
        else:
            picture.learn(item(step, revision))
        expected = count_subjects(picture.subjects.values())
        assert {
            group: count for group, count in picture.subject_counts.items() if count
        } == expected


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 30))
def test_subjects_spread_evenly(groups: int, count: int, subjects: int) -> None:
    placed: list[SubjectConfig] = []
    for number in range(subjects):
        counts = count_subjects(placed)
        candidates = [
            Candidate(f"g{each}", True, True, counts[f"g{each}"]) for each in range(groups)
        ]
        placed.append(SubjectConfig(f"s{number}", groups=choose(candidates, count)))
    counts = count_subjects(placed)
    assert sum(counts.values()) == subjects * min(count, groups)
    assert max(counts.values()) - min(counts[f"g{each}"] for each in range(groups)) <= 1


def test_without_groups_nothing_is_chosen() -> None:
    with pytest.raises(NotConnected, match="no broker is registered"):
        choose([])


@given(st.lists(NAMES, min_size=1, max_size=6), st.booleans())
def test_a_group_that_ever_took_messages_stays_a_host_once(
    moves: list[list[str]], is_placed: bool
) -> None:
    known = list("abcdefgh")
    config = SubjectConfig("s", retention_ms=5, groups=("a",) if is_placed else ())
    ever = set("a" if is_placed else known)
    for groups in moves:
        config = move(config, tuple(groups), known)
        ever |= set(groups)
        hosts = hosts_of(config, known)
        assert config.groups == tuple(groups)
        assert len(hosts) == len(set(hosts))
        assert set(hosts) == ever
    assert config.retention_ms == 5
    assert move(config, config.groups, known) == config


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((), "one broker group at least"),
        (("a", "a"), "on each once"),
        (("x",), "no broker group x"),
    ],
)
def test_a_wrong_placement_is_refused(groups: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        move(SubjectConfig("s"), groups, ["a", "b"])


def test_a_new_subject_prefers_machines_that_share_nothing_to_shards_of_one() -> None:
    shards = [
        Candidate(f"{family}.{shard}", True, True, 0)
        for family in ("g1", "g2")
        for shard in (1, 2, 3)
    ]
    assert choose(shards, 2) == ("g1.1", "g2.1")
    assert choose(shards, 4) == ("g1.1", "g2.1", "g1.2", "g2.2")
    assert choose(shards[:3], 2) == ("g1.1", "g1.2"), "where there is one broker only, its shards"
    busy = [
        Candidate("g1.1", True, True, 9),
        Candidate("g1.2", True, True, 1),
        Candidate("g2.1", True, False, 0),
    ]
    assert choose(busy, 2) == ("g1.2", "g1.1"), "a group without a master comes last"
