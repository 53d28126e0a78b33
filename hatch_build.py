"""Compiles `qmq/client/_ready.c` for a wheel or an editable installation, with the C compiler
alone.

The module uses the limited API, so one wheel (cp311-abi3) serves all versions of Python. Without a
C compiler or Python's headers, for an interpreter without that API, or with QMQ_PURE=1, the wheel
is pure Python (py3-none-any) and works the same, slower.

The module needs no library but libc. So a wheel for a package index, which must name the oldest
glibc that it runs with, needs no auditwheel: QMQ_WHEEL_PLATFORM=manylinux_2_17_x86_64 names the
platform.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE: Final = "qmq/client/_ready.c"
MODULE: Final = "qmq/client/_ready.abi3.so"
FLAGS: Final = ["-O2", "-Wall", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]


class Unbuilt(Exception):
    """Why there is no compiled module."""


class CompiledPart(BuildHookInterface[Any]):
    """A hook of Hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the module, into the source tree for an editable installation."""
        if self.target_name != "wheel":
            return
        sources = Path(self.root)
        self._folder = tempfile.TemporaryDirectory()
        if version == "editable":
            module = sources / MODULE
            module.unlink(missing_ok=True)  # not overwritten: running programs have it open
        else:
            module = Path(self._folder.name) / Path(MODULE).name
        try:
            compile_module(sources / SOURCE, module)
        except Unbuilt as failure:
            self.app.display_warning(f"QMQ without its compiled part, which is slower: {failure}")
            return
        if version != "editable":
            build_data["force_include"][str(module)] = MODULE
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        if self.target_name == "wheel":
            self._folder.cleanup()


def compile_module(source: Path, module: Path) -> None:
    """Compile the module. Raises Unbuilt."""
    if os.environ.get("QMQ_PURE"):
        raise Unbuilt("QMQ_PURE is set")
    if (
        sys.implementation.name != "cpython"
        or sysconfig.get_config_var("Py_GIL_DISABLED")
        or sys.platform == "win32"
    ):
        raise Unbuilt("it is for CPython with its lock, on Linux and macOS")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[:1]
    shared = (
        ["-bundle", "-undefined", "dynamic_lookup"]
        if sys.platform == "darwin"
        else ["-shared", "-s"]
    )
    command = [
        *compiler,
        *FLAGS,
        *shared,
        f"-I{sysconfig.get_path('include')}",
        str(source),
        "-o",
        str(module),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as failure:
        raise Unbuilt(f"no C compiler: {failure}") from failure
    if done.returncode:
        said = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            f"it ended with {done.returncode}",
        )
        raise Unbuilt(f"{compiler[0]}: {said}")


def platform() -> str:
    """The platform of the wheel's name."""
    return os.environ.get("QMQ_WHEEL_PLATFORM") or sysconfig.get_platform().replace(
        "-", "_"
    ).replace(".", "_")
