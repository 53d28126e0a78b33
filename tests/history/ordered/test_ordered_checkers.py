"""The checkers of ordered histories are tested before anything is tested by them: small ones, each with exactly what is wrong in it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from history.events import Operation
from history.ordered import Deliver, Handed, Keyed, OrderedHistory, Part, Put, Rerouted, Settle, Stored, check_ordered
from history.ordered.cases import BAD, GOOD, Case, S
from history.ordered.events import Outage
from history.ordered.making import ONE, done, give, lines, outage, put, route, split
from history.ordered.stalls import Pauses


@pytest.mark.parametrize("case", GOOD + BAD, ids=lambda case: case.name)
def test_an_ordered_history_shows_exactly_its_anomalies(case: Case) -> None:
    report = check_ordered(case.events, drained=case.drained, groups=case.groups, strict=case.strict, latest=case.latest)
    assert sorted(report.names.elements()) == sorted(case.wrong.split()), str(report)
    assert report.ok == (not case.wrong)


def test_every_anomaly_is_found_in_three_bad_histories_at_least() -> None:
    found = Counter(name for case in BAD for name in set(case.wrong.split()))
    names = (
        "lost unsettled phantom skipped torn_replay zombie_ack came_back shared_token early two_at_one_place behind_seal wrong_partition"
    )
    assert set(found) == {*names.split(), "log_order", "stored_twice", "stalled"}
    assert min(found.values()) >= 3
    assert len({case.name for case in GOOD + BAD}) == len(GOOD + BAD)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_counterexample_is_one_paragraph_that_names_the_message(case: Case) -> None:
    for anomaly in check_ordered(case.events, drained=case.drained, groups=case.groups, strict=case.strict).anomalies:
        assert "\n" not in str(anomaly)
        assert 40 < len(anomaly.what) < 400
        assert anomaly.name == "shared_token" or any(f"{key} " in anomaly.what for key in "dfoegk")


def test_a_counterexample_reads_as_a_story() -> None:
    events = lines(
        ONE, put("d1", at="1:0"), give("d1@0"), give("d1@0", token=2, by="c2"), done("0"), done("0", token=2, by="c2", end="fail")
    )
    (found,) = check_ordered(events, drained=True).anomalies
    assert found.what == (
        "d 1 of p1 was acknowledged by c1 (token 1, [0, 8) of partition 1) in group g, which began at 0.000000 s and was confirmed, "
        "although c2 (token 2, [0, 8) of partition 1) was given messages of the same logical partition from 0.000000 s on"
    )


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (lines(route(2, "1:0-8@b1")), "every version"),
        (lines(ONE, route(1, "2:0-8@b1")), "was recorded as"),
        (lines(ONE, put("d2 d1", at="1:0 1:1")), "serials must grow"),
        (lines(ONE, put("d1", at="1:0")[1:]), "without having begun"),
        (lines(ONE, put("d1", at="1:0"), put("d1", at="1:0")[1:]), "or twice"),
        (lines(ONE, [replace(event, places=()) for event in put("d1", at="1:0") if isinstance(event, Put)]), "must say where"),
        (lines(ONE, put("d1", at="1:0"), done("0")), "was not given"),
    ],
)
def test_a_history_that_proves_nothing_is_refused(events: list[Operation], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_ordered(events, drained=True)


def test_late_and_repeated_deliveries_are_counted() -> None:
    events = lines(
        ONE,
        put("d1 d2", at="1:0 1:1"),
        give("d1@0"),
        give("d1@0 d2@1", token=2, by="c2"),
        give("d2@1"),
        done("0 1", end="fail"),
        done("0 1", token=2, by="c2"),
    )
    counts = check_ordered(events, drained=True).counts
    assert (counts["deliveries"], counts["repeated"], counts["late"]) == (4, 2, 1)


def test_copies_and_what_was_sent_again_are_counted() -> None:
    case = next(case for case in GOOD if "stored twice, in order" in case.name)
    counts = check_ordered(case.events, drained=True).counts
    assert (counts["with two copies"], counts["sent again after a fence"], counts["changes"]) == (2, 2, 1)
    assert (counts["sent"], counts["acknowledged"], counts["stored"]) == (3, 3, 3)


def test_the_pause_of_a_change_is_the_longest_time_without_an_answer_in_its_ranges() -> None:
    serials = count(1)

    def sent(key: str, part: int, at_ns: int) -> list[Operation]:
        serial = next(serials)
        return put(f"{key}{serial}", at=f"{part}:{serial}", since_ns=at_ns - 1, until_ns=at_ns)

    low = [sent("d", 2, int(at * S)) for at in (1, 2, 3, 3.1, 3.9, 5)]
    high = [sent("g", 3, int(at * S)) for at in (1, 4.5)]
    change = route(2, "4:0-4@b1 3:4-8@b2", sources=[2], began_ns=int(3.2 * S), published_ns=int(3.6 * S))
    events = lines(route(1, "2:0-4@b1 3:4-8@b2"), change, *low, *high, outage("b1", 2 * S, int(2.5 * S)), outage("b3", S, 2 * S))
    report = check_ordered(events, drained=False)
    assert report.write_pauses == {"a change": Pauses((int(0.7 * S),)), "kill": Pauses((S,))}
    assert report.figures["writes paused by a change, s"] == {"p50": 0.7, "p99": 0.7, "max": 0.7, "of": 1}
    assert report.figures["writes paused by kill, s"]["p50"] == 1.0
    met = check_ordered([*events, *outage("b1", int(3.3 * S), int(3.4 * S))], drained=False)
    assert met.write_pauses["a change in an outage"] == Pauses((int(0.7 * S),))


def test_the_pause_of_a_group_is_the_longest_time_without_a_delivery() -> None:
    given = [
        replace(event, t_ns=at * S)
        for at, part, token in ((1, 1, 1), (2, 1, 1), (6, 2, 2))
        for event in give("d1@0", part=part, token=token)
    ]
    change = route(2, "2:0-8@b1", sources=[1], began_ns=3 * S, published_ns=4 * S)
    report = check_ordered(lines(ONE, change, put("d1", end=None), given), drained=False)
    assert report.read_pauses == {"g": {"a change": Pauses((3 * S,))}}
    assert report.figures["g paused by a change, s"]["p99"] == 3.0


def test_without_values_there_are_no_quantiles() -> None:
    assert Pauses(()).quantile(0.5) == 0.0
    assert [Pauses((3 * S, S, 2 * S)).quantile(share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def test_the_ordered_report_is_json_and_text_and_stays_short() -> None:
    events = lines(ONE, *(put(f"d{at}", at=f"1:{at}") for at in range(1, 101)), split(101))
    report = check_ordered(events, drained=True, groups=("g",))
    told = json.loads(json.dumps(report.to_json(shown_max=3)))
    assert (told["found"], len(told["anomalies"]), told["ok"]) == ({"lost": 100}, 3, False)
    assert str(report).startswith("lost 100 (drained)\nsent 100, acknowledged 100")
    assert str(report).count("lost: ") == 10
    assert str(check_ordered(lines(ONE), drained=False)).startswith("no anomaly (not drained)")


def test_one_promise_broken_everywhere_is_reported_at_most_1000_times() -> None:
    events = lines(ONE, *(put(f"d{at}", at=f"1:{at}") for at in range(1, 1_202)))
    assert check_ordered(events, drained=True, groups=("g",)).names == {"lost": 1_000}


@pytest.mark.sampled
def test_a_million_messages_are_judged_in_linear_time() -> None:
    """Uses a tenth of a million messages, in chunks as clients send them. A quadratic checker would reach the timeout."""
    report = check_ordered(many(100_000, keys=500), drained=True)
    assert report.ok, report
    assert report.counts["deliveries"] == 100_000


def many(messages: int, keys: int) -> list[Operation]:
    """Two partitions, a split of each half way, everything given and settled in chunks of 500."""
    parts = {1: [Part(1, 0, 8, "b1")], 2: [Part(2, 0, 4, "b1"), Part(3, 4, 8, "b2")]}
    serials: Counter[str] = Counter()
    history = OrderedHistory([Rerouted(process="n", type="ok", version=1, logical_partitions=8, partitions=tuple(parts[1]))])
    lps = {f"k{at}": lp_of(history, f"k{at}") for at in range(keys)}
    ends: Counter[int] = Counter()
    events: list[Operation] = [Rerouted(process="n", type="ok", version=1, logical_partitions=8, partitions=tuple(parts[1]))]
    clock = count(1)
    for base in range(0, messages, 500):
        if base == messages // 2:
            sealed = ((1, ends[1]),)
            events.append(
                Rerouted(
                    process="n",
                    type="ok",
                    t_ns=next(clock),
                    version=2,
                    logical_partitions=8,
                    partitions=tuple(parts[2]),
                    sources=(1,),
                    sealed=sealed,
                )  # type: ignore[arg-type]
            )
        route_now = parts[1] if base < messages // 2 else parts[2]
        rows: dict[int, tuple[list[Keyed], list[Stored]]] = {part.number: ([], []) for part in route_now}
        for at in range(base, base + 500):
            key = f"k{at * 7919 % keys}"
            serials[key] += 1
            (part,) = [each for each in route_now if each.first <= lps[key] < each.end]
            rows[part.number][0].append(Keyed(key, serials[key]))
            rows[part.number][1].append(Stored(part.number, ends[part.number], at))
            ends[part.number] += 1
        for part in route_now:
            names, places = rows[part.number]
            begun = Put(process="p", type="invoke", subject="s", messages=tuple(names), t_ns=next(clock))
            handed = tuple(
                Handed(place.sequence, *name[:1], "p", name.serial, 1, place.id) for name, place in zip(names, places, strict=True)
            )
            given = Deliver(
                process="c",
                type="ok",
                t_ns=next(clock),
                group="g",
                partition=part.number,
                first=part.first,
                end=part.end,
                token=1,
                version=1,
                handed=handed,
            )
            sequences = tuple(place.sequence for place in places)
            settled = Settle(process="c", type="ok", t_ns=next(clock), group="g", partition=part.number, token=1, sequences=sequences)
            events += [begun, replace(begun, type="ok", places=tuple(places), t_ns=next(clock)), given, settled]
    return events


def lp_of(history: OrderedHistory, key: str) -> int:
    begun = Put(process="p", type="invoke", subject="s", messages=(Keyed(key, 1),))
    route_one = Rerouted(
        process="n",
        type="ok",
        version=1,
        logical_partitions=history.routes.logical_partitions,
        partitions=tuple(history.routes.parts.values()),
    )
    return OrderedHistory([route_one, begun]).lp_of_line[0]


def test_an_outage_is_known_by_its_number() -> None:
    """Two at a time, ended in another order than they began."""
    both = [
        Outage(process="n", type=kind, broker_group=group, op=op, t_ns=at)
        for kind, group, op, at in (("invoke", "b1", 1, 5), ("invoke", "b2", 2, 6), ("ok", "b1", 1, 7), ("ok", "b2", 2, 9))
    ]
    assert OrderedHistory([*lines(ONE), *both]).outages == [("b1", 5, 7, "outage"), ("b2", 6, 9, "outage")]


def test_a_history_with_partitions_of_several_versions_knows_each_chain() -> None:
    history = OrderedHistory(lines(ONE, split(0), route(3, "2:0-4@b1 4:4-8@b1", sources=[3]), route(4, "5:0-8@b2", sources=[2, 4])))
    assert history.routes.chains[0] == (1, 2, 5)
    assert history.routes.chains[7] == (1, 3, 4, 5)
    assert history.routes.since == {1: 1, 2: 2, 3: 2, 4: 3, 5: 4}


def test_what_a_broker_group_held_follows_from_when_routes_were_published() -> None:
    second = route(2, "2:0-4@b1 3:4-8@b2", sources=[1], began_ns=10, published_ns=20)
    routes = OrderedHistory(lines(ONE, second, route(3, "4:0-4@b2 3:4-8@b2", sources=[2], began_ns=30, published_ns=40))).routes
    low, high = frozenset(range(4)), frozenset(range(4, 8))
    assert [routes.held_by("b1", at_ns, at_ns) for at_ns in (5, 25, 45)] == [low | high, low, frozenset()]
    assert [routes.held_by("b2", at_ns, at_ns) for at_ns in (5, 25, 45)] == [frozenset(), high, low | high]
    assert routes.held_by("b1", 19, 45) == low | high
