"""Fuzz one target with Atheris, which guides libFuzzer by the coverage of QMQ's code: TARGET, then
libFuzzer's arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
name = sys.argv.pop(1)
with atheris.instrument_imports(
    include=["qmq", "qmq_replication", "qmq_ordering", "qmq_coordination"]
):
    from fuzz.targets import BYTES_TARGETS as TARGETS

    if name not in TARGETS:  # these import the command line and the gateway, which takes a while
        from fuzz.targets import REQUEST_TARGETS as TARGETS
sys.argv[0] = f"{sys.executable} {sys.argv[0]} {name}"  # libFuzzer starts itself again to merge
atheris.Setup(sys.argv, TARGETS[name])
atheris.Fuzz()
