"""What a module `*_suite` says about a suite of another project, and where the suite runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from judges.outcomes import Outcomes, of_junit

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path(__file__).parent
SUITE_S_MAX: Final = 7200
TEST_S_MAX: Final = 300


class Unusable(Exception):
    """A suite did not run: its message says why."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a suite runs."""

    source: Path
    """The suite: a copy, which may be changed."""
    out: Path
    """An empty folder."""
    packages: Path
    """Packages that the suite needs beside those of the development environment."""
    node: str
    """HOST:PORT of a node."""
    gateway: str
    """HOST:PORT of its gateway; empty for a suite that has none."""
    redis_port: int
    """0 for a suite without Redis."""

    def run(self, *command: str, **environment: str) -> str:
        """Run a program in the suite's folder, and return what it says. Its exit status may be
        any. Raises Unusable if it does not end.
        """
        output = self.out / "output"
        with output.open("a") as file:
            process = subprocess.Popen(
                command,
                cwd=self.source,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(SUITE_S_MAX)
            except subprocess.TimeoutExpired:
                raise Unusable(
                    f"{command[0]} did not end within {SUITE_S_MAX} s:\n"
                    f"{output.read_text(errors='replace')[-4000:]}"
                ) from None
            finally:
                end_session(process)
        return output.read_text(errors="replace")

    def pytest(self, *arguments: str, **environment: str) -> Outcomes:
        """Run pytest in the suite's folder. Raises Unusable if it ends before its report."""
        report = self.out / "report.xml"
        path = os.pathsep.join(map(str, (self.source, self.packages)))
        said = self.run(
            sys.executable,
            *("-m", "pytest", "-p", "no:cacheprovider", "--timeout", str(TEST_S_MAX)),
            *("--junitxml", str(report), *arguments),
            **{"PYTHONPATH": path, "QMQ_JUDGED": self.node, **environment},
        )
        if not report.exists():
            raise Unusable(f"pytest ended without a report:\n{said[-4000:]}")
        return of_junit(report.read_text())


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite."""

    name: str
    project: str
    """OWNER/NAME on GitHub; empty for tests of this repository."""
    run: Callable[[Stage], Outcomes]
    about: str
    """What runs, in words for the page."""
    changes: str
    """What is changed in the suite, in words for the page."""
    package: str = ""
    """The package on PyPI whose source distribution has the suite, in the installed version."""
    tag: str = ""
    """The tag that a checkout has to be of; empty: any."""
    parts: Sequence[str] = (".",)
    """The folders of a checkout that are copied."""
    beside: Sequence[str] = ()
    """Packages that the suite needs, with versions, without what they depend on."""
    programs: Sequence[str] = ()
    """Programs that it needs."""
    gateway: Mapping[str, str] | None = None
    """The environment of its gateway, if it needs one."""

    @property
    def needs_redis(self) -> bool:
        return "redis-server" in self.programs

    @property
    def needs_checkout(self) -> bool:
        return bool(self.project) and not self.package


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started in its session."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()
