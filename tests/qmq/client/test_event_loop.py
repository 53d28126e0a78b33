"""`qmq.run`: a program's loop, the faster one where it is installed."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

import qmq


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
