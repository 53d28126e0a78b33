"""How outcomes of a suite are read and compared with the documented differences."""

from __future__ import annotations

import json

import pytest

from judges import page
from judges.outcomes import Difference, Outcome, differences_of, of_go, of_junit, verdict
from judges.suites import SUITES

PASSED, FAILED, SKIPPED = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED


def test_a_report_of_pytest_or_of_surefire_gives_an_outcome_for_each_test() -> None:
    report = """<testsuites><testsuite>
        <testcase classname="t.integration.test_canvas.test_chain" name="test_a[1]" />
        <testcase classname="tests.test_b" name="test_b"><failure>no</failure></testcase>
        <testcase classname="tests.test_b" name="test_c"><error>no</error></testcase>
        <testcase classname="tests.test_b" name="test_d"><skipped /></testcase>
    </testsuite></testsuites>"""
    surefire = '<testsuite><testcase classname="org.apache.AckTest" name="ack()" /></testsuite>'
    assert of_junit(report, surefire) == {
        "test_canvas.test_chain.test_a[1]": PASSED,
        "test_b.test_b": FAILED,
        "test_b.test_c": FAILED,
        "test_b.test_d": SKIPPED,
        "AckTest.ack": PASSED,
    }


def test_a_test_that_its_suite_ran_again_counts_with_its_last_outcome() -> None:
    report = (
        "<s><testcase classname='A' name='a'><failure /></testcase>"
        "<testcase classname='A' name='a' /></s>"
    )
    assert of_junit(report) == {"A.a": PASSED}


def events(*found: tuple[str, str, str]) -> list[str]:
    return [
        json.dumps(
            {"Action": action, "Package": f"e2e/{package}"} | ({"Test": test} if test else {})
        )
        for action, package, test in found
    ]


def test_output_of_go_gives_an_outcome_for_each_test() -> None:
    said = events(
        ("run", "normal", "TestA"),
        ("output", "normal", "TestA"),
        ("pass", "normal", "TestA"),
        ("run", "normal", "TestB"),
        ("fail", "normal", "TestB"),
        ("fail", "normal", ""),
        ("skip", "normal", "TestC"),
    )
    assert of_go(["go: downloading x", *said]) == {
        "normal.TestA": PASSED,
        "normal.TestB": FAILED,
        "normal.TestC": SKIPPED,
    }


def test_a_go_package_that_panics_or_does_not_compile_fails() -> None:
    assert of_go(events(("run", "fifo", "TestA"), ("fail", "fifo", ""))) == {"fifo.TestA": FAILED}
    assert of_go(events(("fail", "fifo", ""))) == {"fifo": FAILED}


def test_a_failure_that_is_not_documented_fails_the_run() -> None:
    found = verdict({"a": PASSED, "b": FAILED, "c": SKIPPED}, [])
    assert (found.passed, found.failed, found.skipped, found.holds) == (["a"], ["b"], ["c"], False)


def test_a_documented_failure_holds_and_a_mended_one_is_named() -> None:
    documented = [
        Difference("another limit", frozenset({"b", "m", "gone"})),
        Difference("a race", frozenset({"r"}), sometimes=True),
    ]
    found = verdict({"a": PASSED, "b": FAILED, "m": PASSED, "r": PASSED}, documented)
    assert (found.different, found.failed, found.holds) == (["b"], [], True)
    assert (found.mended, found.missing) == (["m"], ["gone"])


def test_a_run_in_which_nothing_passed_does_not_hold() -> None:
    assert not verdict({}, []).holds
    assert not verdict({"a": SKIPPED}, []).holds


def test_a_test_has_one_reason() -> None:
    with pytest.raises(ValueError, match="twice"):
        differences_of([{"why": "x", "tests": ["a"]}, {"why": "y", "tests": ["a"]}])


def test_the_page_has_what_the_record_and_the_documented_differences_say() -> None:
    assert page.PAGE.read_text() == page.current(json.loads(page.RECORD.read_text()))


def test_an_unknown_block_is_an_error() -> None:
    with pytest.raises(KeyError):
        page.filled("<!-- suites: guesses -->\n<!-- end of suites -->", {}, {})


def test_a_run_becomes_a_line_of_the_page() -> None:
    made = page.counts({"kombu": page.counted(verdict({"a": PASSED}, []), "kombu 5", "2026-01-01")})
    assert "| kombu 5 | 1 | 1 | 0 | 0 | 0 | 2026-01-01 |" in made
    assert SUITES["kombu"].about in made
