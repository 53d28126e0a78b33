"""scripts/repeat_failed.py: which tests run once more, and when that counts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/repeat_failed.py"
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("word", ["a word", "two"])
@pytest.mark.xdist_group("pair")
def test_fails_once(word):
    mark = Path(__file__).with_name(f"{word}.mark")
    seen = mark.exists()
    mark.touch()
    assert seen

def test_passes():
    pass
"""
FAILS = """
def test_fails_always():
    raise ValueError
"""


def project(folder: Path, tests: str) -> Path:
    (folder / "scripts").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_some.py").write_text(tests)
    return Path(shutil.copy(SCRIPT, folder / "scripts"))


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def first_run(folder: Path) -> None:
    assert ran(folder, "-m", "pytest", "-n", "2", "--dist", "loadgroup").returncode == 1


def test_tests_that_pass_the_second_time_are_named_and_the_run_passes(tmp_path: Path) -> None:
    script = project(tmp_path, TESTS)
    first_run(tmp_path)
    repeated = ran(tmp_path, str(script), "-q")
    assert repeated.returncode == 0, repeated.stdout
    named = "".join(f"\n  test_some.py::test_fails_once[{word}]" for word in ("a word", "two"))
    assert repeated.stdout.endswith(f"these tests failed once and passed when they ran by themselves:{named}\n")
    assert "2 passed" in repeated.stdout


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    script = project(tmp_path, TESTS + FAILS)
    first_run(tmp_path)
    repeated = ran(tmp_path, str(script))
    assert repeated.returncode == 1
    assert repeated.stdout.endswith("tests failed twice\n")


@pytest.mark.parametrize("count", [0, 3])
def test_no_test_runs_again_if_none_or_too_many_failed(tmp_path: Path, count: int) -> None:
    script = project(tmp_path, TESTS)
    cache = tmp_path / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({f"test_some.py::test_{number}": True for number in range(count)}))
    repeated = ran(tmp_path, str(script), "--most", "2")
    assert (repeated.returncode, repeated.stdout) == (1, f"{count} tests failed: at most 2 would run once more\n")
