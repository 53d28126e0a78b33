"""PySpark of another release than the supported ones: one error, which says what to install."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pyspark
import pyspark_qmq
import pytest
from pyspark.serializers import CPickleSerializer
from pyspark.sql.types import StructType
from pyspark_qmq.versions import INSTALL, SUPPORTED, unsupported

from qmq.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["4.2.0", "4.2.1", "4.3.0", "4.3.12", "4.3.0.dev0"])
def test_supported_releases_are_taken_with_all_their_patches(version: str) -> None:
    assert unsupported(version) == ""


@pytest.mark.parametrize("version", ["3.5.9", "4.0.5", "4.1.4", "4.20.0", "4.4.0", "5.0.0", ""])
def test_another_release_is_refused_with_what_to_install(version: str) -> None:
    assert f"PySpark 4.2 and 4.3, and this is PySpark {version}: {INSTALL}" in unsupported(version)


def test_the_installed_pyspark_is_a_supported_one() -> None:
    assert unsupported(pyspark.__version__) == ""


def test_the_extra_asks_for_the_supported_releases() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = [
        each for each in project["optional-dependencies"]["spark"] if each.startswith("pyspark>")
    ]
    assert asked in INSTALL
    newest = SUPPORTED[-1].split(".")
    assert asked == f"pyspark>={SUPPORTED[0]},<{newest[0]}.{int(newest[1]) + 1}"


@pytest.fixture
def old_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")


@pytest.mark.usefixtures("old_spark")
def test_registration_with_another_pyspark_is_an_error() -> None:
    no_session: Any = None
    with pytest.raises(InvalidArgument, match=r"this is PySpark 4\.1\.4"):
        pyspark_qmq.register(no_session)


@pytest.mark.usefixtures("old_spark")
@pytest.mark.parametrize("stream", [False, True])
def test_a_source_that_another_pyspark_discovers_says_so_at_its_first_use(stream: bool) -> None:
    found = CPickleSerializer().loads(CPickleSerializer().dumps(pyspark_qmq.DefaultSource))
    assert found.name() == "qmq"
    source = found({})
    with pytest.raises(InvalidArgument, match=r"this is PySpark 4\.1\.4"):
        source.schema()
    with pytest.raises(InvalidArgument, match=r"this is PySpark 4\.1\.4"):
        (source.streamReader if stream else source.reader)(StructType())
    with pytest.raises(InvalidArgument, match=r"this is PySpark 4\.1\.4"):
        (source.streamWriter if stream else source.writer)(StructType(), False)
