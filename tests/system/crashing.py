"""A server that dies at a chosen line: `python -m system.crashing POINT:COUNT WORDS...` runs `qmq
WORDS`, and the process kills itself when it reaches the point for the COUNT-th time, as by SIGKILL:
it flushes nothing and sends nothing.

    plan-written      a plan is written, and not committed
    plan-committed    the plan is committed, and nothing is sent
    stored            the batch is stored at the real-time broker, and DONE is not written
    done-written      DONE is written, and not committed
    slice             a slice of a bucket is being loaded
    intake            a batch is written
    checkpoint        a checkpoint's files are written, and the checkpoint is not
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import qmq.delay.plan_log as ledgers
import qmq.delay.wheel as wheels
from qmq.cli.main import main
from qmq.delay.schedule import Schedule
from qmq.log import checkpoint


def die() -> None:
    """Now."""
    os.kill(os.getpid(), signal.SIGKILL)


def _counted(count: int) -> Callable[[], None]:
    left = [count]

    def reached() -> None:
        left[0] -= 1
        if left[0] == 0:
            die()

    return reached


def _before(owner: Any, name: str, reached: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def patched(*args: Any, **named: Any) -> Any:
        reached()
        return original(*args, **named)

    setattr(owner, name, patched)


def _after(owner: Any, name: str, reached: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def patched(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        reached()
        return result

    setattr(owner, name, patched)


def _plan_committed(reached: Callable[[], None]) -> None:
    original = ledgers.StorePlanLog.plan

    async def patched(self: Any, draft: Any) -> Any:
        plan = await original(self, draft)
        reached()
        return plan

    ledgers.StorePlanLog.plan = patched  # type: ignore[method-assign]


def _on_act(kind: type, reached: Callable[[], None]) -> None:
    original = Schedule.act

    def patched(self: Any, index: int, append_time_ms: int, action: Any) -> None:
        original(self, index, append_time_ms, action)
        if isinstance(action, kind):
            reached()

    Schedule.act = patched  # type: ignore[method-assign]


POINTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "plan-written": lambda reached: _on_act(ledgers.PlanAction, reached),
    "plan-committed": _plan_committed,
    "stored": lambda reached: _before(ledgers.StorePlanLog, "done", reached),
    "done-written": lambda reached: _on_act(ledgers.PlanDone, reached),
    "slice": lambda reached: _before(wheels.Loader, "ahead", reached),
    "intake": lambda reached: _after(Schedule, "take", reached),
    "checkpoint": lambda reached: _before(checkpoint, "save", reached),
}


def arm(point: str) -> None:
    """Die at `NAME:COUNT`."""
    name, _, count = point.partition(":")
    POINTS[name](_counted(int(count)))


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    main()
