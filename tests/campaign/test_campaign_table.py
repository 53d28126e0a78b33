"""The table of the campaign's tests, its bugs, and the contract's sentences fit together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from campaign import table
from campaign.contract import statements
from campaign.values import CampaignTest, Durability

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
KINDS = {"brokers", "etcds", "metas", "delays", "drivers", "clients"}
PRODUCT = {"qmq", "qmq_coordination", "qmq_replication", "qmq_ordering", "pyspark_qmq"}
CONTRACT = ROOT / "docs" / "CONTRACT.md"


def test_every_workload_names_checkers_and_programs_that_exist() -> None:
    for workload in table.workloads().values():
        assert set(workload.checkers) <= table.checkers().keys(), workload.name
        assert {role.name for role in workload.roles} <= workload.programs.keys(), workload.name
        assert workload.gates, workload.name
        assert workload.uses <= KINDS
        assert any(role.is_sender for role in workload.roles), workload.name


def test_every_fault_and_every_checker_is_in_some_test() -> None:
    tests = table.tests().values()
    own = {each.fault.name for each in tests if each.run is not None}
    assert {each.fault.name for each in tests} == table.faults().keys() | own
    assert {name for each in tests for name in each.checkers} == table.checkers().keys()
    assert all(fault.hits <= KINDS for fault in table.faults().values())


def test_all_tests_take_a_day_at_most_and_five_minutes_each_unless_they_are_long() -> None:
    tests = table.tests().values()
    assert 300 <= len(tests) <= 420
    assert sum(each.minutes for each in tests) <= 24 * 60
    assert all(each.minutes <= 5 or each.workload.is_long for each in tests)


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_has_every_workload_that_is_not_long(seed: int) -> None:
    chosen = [table.tests()[name] for name in table.an_hour(seed)]
    assert sum(each.minutes for each in chosen) <= 60
    short = {name for name, each in table.workloads().items() if not each.is_long}
    assert {each.workload.name for each in chosen} == short
    assert len({each.fault.name for each in chosen}) > len(short)


def test_patterns_of_a_workload_choose_cases_and_leave_out_others() -> None:
    log, power = table.workloads()["log"], table.faults()["power-all"]

    def is_meant(*only: str, durability: Durability = "async") -> bool:
        return CampaignTest(
            workload=replace(log, only=only), fault=power, durability=durability
        ).is_meant

    assert is_meant("power-all")
    assert is_meant("power-*", durability="flushed")
    assert not is_meant("power-all", durability="flushed")
    assert not is_meant("power-*", "!*-flushed", durability="flushed")
    assert not is_meant("kill-*")


def test_every_planted_bug_has_a_test_with_a_checker_that_can_find_it() -> None:
    bugs = table.bugs()
    assert len(bugs) >= 26
    for bug in bugs.values():
        test = table.tests()[bug.found_by]
        assert bug.finds, bug.name
        assert set(bug.finds) <= set(test.checkers), bug.name
        assert bug.into <= KINDS
        assert bug.into <= test.workload.uses, bug.name


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports when it runs, those for types left out."""
    left: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        left += ast.iter_child_nodes(node)


def file_of(module: str) -> Path | None:
    path = TESTS / Path(*module.split("."))
    return next(
        (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None
    )


@pytest.mark.parametrize("name", ["checkers", "verdict.py", "contract.py", "report.py"])
def test_judges_import_no_module_of_the_product(name: str) -> None:
    """Neither themselves, nor through anything of tests that they import."""
    begin = TESTS / "campaign" / name
    todo = sorted(begin.glob("*.py")) if begin.is_dir() else [begin]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        seen.add(path)
        for module in imported(path):
            assert module.split(".")[0] not in PRODUCT, f"{path.relative_to(ROOT)}: {module}"
            found = file_of(module)
            if found is not None and found not in seen:
                todo.append(found)
    assert TESTS / "history" / "events.py" in seen or name == "contract.py"


def test_checkers_that_the_contract_names_exist_and_all_are_named() -> None:
    found = statements(CONTRACT.read_text())
    named = {name for each in found if each.kind == "checker" for name in each.names}
    assert named <= table.checkers().keys()
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    elsewhere = {
        name for each in statements(pages) if each.kind == "checker" for name in each.names
    }
    assert table.checkers().keys() <= elsewhere


def test_tests_that_the_contract_names_exist() -> None:
    found = statements(CONTRACT.read_text())
    named = {name for each in found if each.kind == "test" for name in each.names}
    there = (
        {
            node.name
            for path in TESTS.rglob("test_*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if named
        else set()
    )
    assert named <= there


def test_a_checker_or_a_test_holds_every_statement_of_the_contract() -> None:
    assert [each.text for each in statements(CONTRACT.read_text()) if not each.kind] == []


def test_a_statement_without_a_marker_is_found_in_lists_tables_and_paragraphs() -> None:
    page = """# Title

One promise. <!-- checker: a --> Another one
over two lines. <!-- test: test_b -->

* **Bold.** A third.
* A fourth. <!-- no promise -->

| head | row |
|---|---|
| fifth | cell <!-- checker: c, d --> |
| sixth | cell |
"""
    assert [(each.kind, each.names) for each in statements(page)] == [
        ("checker", ("a",)),
        ("test", ("test_b",)),
        ("", ()),
        ("no promise", ()),
        ("checker", ("c", "d")),
        ("", ()),
    ]
