"""The guard of CPU time for each message: when it reports a slowdown
(bench/peers/guard_verdict.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench" / "peers"))

import servers
from guard import ROOT, environment
from guard_verdict import compared


@pytest.mark.parametrize(
    ("now", "is_slower"), [(1.0, False), (1.09, False), (1.12, True), (0.5, False)]
)
def test_more_than_a_tenth_more_cpu_time_is_slower(now: float, is_slower: bool) -> None:
    assert [each.is_slower for each in compared({"publish": [1.0]}, {"publish": [now]})] == [
        is_slower
    ]


def test_a_round_that_other_work_disturbed_does_not_count() -> None:
    (found,) = compared({"publish": [1.0, 9.0, 1.1]}, {"publish": [40.0, 1.05, 2.0]})
    assert (found.base_us, found.new_us, found.is_slower) == (1.0, 1.05, False)


def test_each_row_is_judged_by_itself() -> None:
    found = compared({"publish": [1.0], "backlog": [2.0]}, {"publish": [0.5], "backlog": [2.5]})
    assert {each.row: each.is_slower for each in found} == {"publish": False, "backlog": True}


def test_a_row_that_only_one_tree_has_is_not_compared() -> None:
    assert [
        each.row for each in compared({"old": [1.0], "both": [1.0]}, {"both": [1.0], "new": [1.0]})
    ] == ["both"]


LISTENS = """
import pathlib, socket, sys
pathlib.Path(__file__).with_name("began").touch()
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    listener.accept()[0].close()
"""


def test_the_server_of_another_tree_runs_that_tree_s_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "qmq" / "cli.py"
    program.parent.mkdir()
    (program.parent / "__init__.py").touch()
    program.write_text(LISTENS)
    monkeypatch.chdir(ROOT)
    servers.qmq(Path(), environment=environment(tmp_path)).stop()
    assert program.with_name("began").exists()
