"""Replays dead letters until it is killed: `replaying_process.py ADDRESS GROUP PER_SECOND`. It prints how many are done."""

from __future__ import annotations

import asyncio
import sys

import qmq


async def main(address: str, group: str, per_second: float) -> None:
    async with qmq.connect(address, state_dir=False) as mq:
        count = await mq.dead_letters(group).replay(progress=lambda done: print(done, flush=True), per_second=per_second)
    print("end", count, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
