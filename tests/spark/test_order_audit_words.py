"""A counterexample names the two messages, their places and producers, and the changes of the route
between them. No Spark.
"""

from __future__ import annotations

from dataclasses import replace

from pyspark_qmq.jobs.order_audit import HINTS, describe, producer
from pyspark_qmq.jobs.order_rules import RULES, OrderPlace, Violation
from qmq_ordering.routes import LpRange

from qmq.columns.model import RoutePartition, Routes

AT = 1_795_251_600_000
"""2026-11-21 09:00 UTC."""
BORN = f"{AT << 20:016x}"
ROUTES = Routes(
    100,
    4,
    {
        1: RoutePartition(1, LpRange(0, 50), "a", 1),
        2: RoutePartition(2, LpRange(50, 100), "b", 1),
        3: RoutePartition(3, LpRange(0, 20), "a", 2, (1,)),
        4: RoutePartition(4, LpRange(20, 50), "b", 2, (1,)),
        5: RoutePartition(5, LpRange(20, 100), "c", 3, (2, 4)),
        6: RoutePartition(6, LpRange(20, 100), "a", 4, (5,)),
    },
    {1: 700, 2: 9, 4: 40},
)


def place(partition: int, sequence: int, number: int | None) -> OrderPlace:
    return OrderPlace(
        partition, "a", sequence, f"{BORN}0000000000070003", BORN, 7, 3, AT, AT + 20, number
    )


def test_a_counterexample_shows_both_messages_and_the_changes_between_them() -> None:
    found = Violation("number_order", b"N14228", place(6, 3, 17), place(1, 699, 18))
    assert describe(found, ROUTES, "header:n").splitlines() == [
        "A message of a key follows one with a higher number.",
        "  key          N14228",
        "  lies first   number 18, partition 1 on a (opened by version 1), sequence 699",
        "               created 2026-11-21T09:00:00.000Z, stored 2026-11-21T09:00:00.020Z",
        (
            f"               message {BORN}0000000000070003, batch 7, place 3 of producer {BORN} "
            "(born 2026-11-21T09:00:00.000Z)"
        ),
        "  lies behind  number 17, partition 6 on a (opened by version 4), sequence 3",
        "               created 2026-11-21T09:00:00.000Z, stored 2026-11-21T09:00:00.020Z",
        (
            f"               message {BORN}0000000000070003, batch 7, place 3 of producer {BORN} "
            "(born 2026-11-21T09:00:00.000Z)"
        ),
        (
            "  between      version 2: partition 1 [0, 50) of a was split into 3 [0, 20) of a "
            "and 4 [20, 50) of b; 1 closed at sequence 700"
        ),
        "               version 3: partition 2 [50, 100) of b and 4 [20, 50) of b were "
        "merged into 5 [20, 100) of c; 2 closed at "
        "sequence 9, 4 closed at sequence 40",
        (
            "               version 4: partition 5 [20, 100) of c was moved to 6 [20, 100) of a; "
            "5 closed at sequence (unknown yet)"
        ),
        f"  so           {HINTS['number_order']}",
    ]


def test_a_violation_of_one_message_says_what_its_partition_is() -> None:
    lines = describe(
        Violation("behind_seal", b"\xff", place(1, 701, None)), ROUTES, "create_time"
    ).splitlines()
    assert lines[:3] == [
        "A message follows the command message that closed its partition.",
        "  key          hex:ff",
        "  message      partition 1 on a (opened by version 1), sequence 701",
    ]
    assert lines[5] == "  partition    holds [0, 50) on a; closed at sequence 700"


def test_within_one_partition_nothing_lies_between() -> None:
    lines = describe(
        Violation("time_order", b"k", place(2, 5, 1), place(2, 4, 2)), ROUTES, "create_time"
    ).splitlines()
    assert "  between      none: both are in one partition" in lines


def test_partitions_that_do_not_follow_from_each_other_are_called_so() -> None:
    lines = describe(
        Violation("time_order", b"k", place(6, 5, 1), place(3, 4, 2)), ROUTES, "create_time"
    ).splitlines()
    assert "  between      partition 6 does not follow from partition 3" in lines


def test_a_message_in_no_route_and_without_key_is_described_all_the_same() -> None:
    nowhere = replace(place(77, 5, None), broker_group="", message_id="")
    lines = describe(
        Violation("unknown_partition", None, nowhere), ROUTES, "create_time"
    ).splitlines()
    assert lines[1:3] == [
        "  key          none",
        "  message      partition 77 (in no route), sequence 5",
    ]


def test_a_producer_of_the_sink_has_no_birth() -> None:
    assert producer(f"{123 << 20:016x}") == f"producer {123 << 20:016x} (of a Spark sink)"


def test_each_rule_has_a_kind_and_says_what_it_means() -> None:
    assert HINTS.keys() == RULES.keys()
    assert {rule.kind for rule in RULES.values()} == {
        "reorder",
        "gap",
        "duplicate",
        "after_seal",
        "wrong_partition",
        "unproved",
    }
