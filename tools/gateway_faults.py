"""RocketMQ's Java client sends and receives through gateways while they are killed, brokers fail
over, and routes split, merge and move.

    tools/run gateway_faults --count 1000000 --kills 20 --failovers 20   0 lost
    tools/run gateway_faults --count 20000 --groups 64 --changes 50      in order by message group,
                                                                         too

Exit status 1 if a message was lost, or came out of its message group's order. Needs
scripts/rocketmq_clients.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests")]

from system.gateway_run import GatewayRun, run  # noqa: E402


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--count", type=int, default=20_000, help="messages")
    options.add_argument("--bytes", type=int, default=100)
    options.add_argument(
        "--at-once",
        type=int,
        default=64,
        help="messages under way; of an ordered topic, sending threads",
    )
    options.add_argument(
        "--groups", type=int, default=0, help="message groups; with them the topic is ordered"
    )
    options.add_argument(
        "--changes", type=int, default=0, help="splits, merges and moves of an ordered topic"
    )
    options.add_argument("--kills", type=int, default=0, help="of gateways")
    options.add_argument("--failovers", type=int, default=0, help="of brokers: a master is killed")
    options.add_argument("--seed", type=int, default=random.randrange(1, 1 << 31))
    chosen = options.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    wanted = GatewayRun(
        count=chosen.count,
        bytes=chosen.bytes,
        at_once=chosen.at_once,
        groups=chosen.groups,
        changes=chosen.changes,
        gateway_kills=chosen.kills,
        failovers=chosen.failovers,
        seed=chosen.seed,
    )
    outcome = asyncio.run(run(wanted, lambda what: print(what, end=" ", flush=True)))
    print(f"\n{outcome}")
    return 1 if outcome.lost or outcome.out_of_order else 0


if __name__ == "__main__":
    raise SystemExit(main())
