"""`qmq.run`: a program's loop, the faster one where it is installed."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest
import uvloop

import qmq


@pytest.fixture(autouse=True)
def settings_of_this_process() -> Iterator[None]:
    """`qmq.run` changes the collector's settings; other tests in this process keep theirs."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def loop_of_program() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_a_program_runs_on_uvloop_where_it_is_installed() -> None:
    assert isinstance(qmq.run(loop_of_program()), uvloop.Loop)


def test_without_uvloop_a_program_runs_on_pythons_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    found = qmq.run(loop_of_program())
    assert isinstance(found, asyncio.AbstractEventLoop)
    assert not isinstance(found, uvloop.Loop)


def test_what_the_program_raises_comes_out() -> None:
    async def fails() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        qmq.run(fails())


PROGRAM: Final = """
import asyncio, resource, sys
import qmq

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

async def main():
    bytes(4 << 20)  # now the heap has a block of this size
    before = faults()
    for _ in range(50):
        bytearray(4 << 20)
    print(faults() - before)

RUN(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_a_program_reuses_freed_blocks_instead_of_faulting_them_in_again() -> None:
    plain, ours = [
        int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM.replace("RUN", by)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for by in ("asyncio.run", "qmq.run")
    ]
    assert ours * 4 < plain


def test_the_collector_leaves_alone_what_was_imported_before() -> None:
    program = (
        "import gc, qmq\nasync def main(): print(gc.get_freeze_count(), "
        "gc.get_threshold()[0])\nqmq.run(main())"
    )
    frozen, threshold = map(
        int,
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split(),
    )
    assert frozen > 10_000
    assert threshold > gc.get_threshold()[0]
