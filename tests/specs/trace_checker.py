"""Has TLC decide whether a trace is a behaviour of a specification of docs/specs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.model_checker import JAR, SPECIFICATIONS


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
    name: str, constants: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], folder: Path, *, text: str | None = None
) -> TraceVerdict:
    """Check a trace against the specification `name` (by `nameTrace.tla`), or `text` instead of it. Raises RuntimeError where TLC cannot
    read it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.tla").write_text((SPECIFICATIONS / f"{name}.tla").read_text() if text is None else text)
    shutil.copy(SPECIFICATIONS / f"{name}Trace.tla", folder)
    values = {**constants, "Lines": list(lines)}
    definitions = "\n".join(f"The{key} == {as_tla(value)}" for key, value in values.items())
    (folder / "Trace.tla").write_text(f"---- MODULE Trace ----\nEXTENDS {name}Trace\n{definitions}\n====\n")
    given = "\n".join(f"  {key} <- The{key}" for key in values)
    (folder / "Trace.cfg").write_text(f"SPECIFICATION TraceSpec\nCONSTANTS\n{given}\nCHECK_DEADLOCK FALSE\n")
    java = ["java", "-XX:+UseSerialGC", "-Xmx2g", "-Xss64m", f"-Djava.io.tmpdir={folder}", "-cp", str(JAR), "tlc2.TLC"]
    command = [*java, "-workers", "1", "-fp", "1", "-config", "Trace.cfg", "-metadir", str(folder / "states"), "Trace.tla"]
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
