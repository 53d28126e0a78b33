"""How many of the broker's functions run for a message that arrives alone. A ceiling, so that the
number grows only on purpose; tests/qmq/client/test_calls_a_message.py has the client's.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType

from support import node_config, running

import qmq

PACKAGE = Path(qmq.__file__).parent
PARTS = tuple(f"{PACKAGE / part}/" for part in ("broker", "log", "security"))
MESSAGES = 500


async def test_a_message_alone_takes_at_most_55_calls_of_the_broker(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()

    def called(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PARTS):
            calls[frame.f_code.co_qualname] += 1

    async with running(node_config(tmp_path)) as node, qmq.connect(node.address) as mq:
        for _ in range(50):
            await mq.send("s", b"x")
        totals = [0]
        sys.setprofile(called)
        try:
            for _ in range(MESSAGES):
                await mq.send("s", b"x")
                totals.append(calls.total())
        finally:
            sys.setprofile(None)
    # The median: what the clock begins, such as a flush, falls into the time of some messages, of
    # more on a busy machine.
    usual = median(after - before for before, after in pairwise(totals))
    assert usual <= 55, ", ".join(
        f"{name} {count / MESSAGES:.1f}" for name, count in calls.most_common(60)
    )
