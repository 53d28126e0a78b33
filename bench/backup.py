"""A backup of a cluster with one broker group: whole, again with little new, verified, and restored.

`scripts/bench --only backup` runs it, with 2 GiB of 1 KB messages and a folder as the store. A producer sends 20,000 messages of 100 B a
second while the second backup is made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from qmq_coordination.etcd.process import EtcdProcess

from bench.cold import SIZE, fill, p99, pace
from bench.group import ReplicaSet
from bench.processes import together
from qmq.limits import MIB

MORE: Final = 256
"""MiB that are new in the second backup."""
SENDING_S: Final = 5.0

Figures = dict[str, float]


def whole_and_again(mib: int) -> Figures:
    """All figures. The seconds are those of the commands, start of the process included."""
    with tempfile.TemporaryDirectory(prefix="qmq-bench-backup-") as place:
        folder, where = Path(place), str(Path(place, "backups"))
        group = ReplicaSet(1)
        found: Figures = {}
        try:
            etcd = ("--etcd", group.etcd.endpoint.removeprefix("http://"))
            together((fill, group.address, mib * MIB // SIZE // 1000 * 1000))
            found |= _timed("create", "create", where, *etcd)
            first = _bytes(folder)
            together((fill, group.address, MORE * MIB // SIZE // 1000 * 1000))
            found["p99 of a producer alone, ms"] = p99(together((pace, group.address, SENDING_S))[0])
            with ThreadPoolExecutor(1) as thread:
                sending = thread.submit(together, (pace, group.address, SENDING_S))
                time.sleep(SENDING_S / 2)  # its process has started by then
                found |= _timed("create again", "create", where, *etcd)
                waited = sending.result()[0]
            found |= {"p99 of a producer meanwhile, ms": p99(waited), "worst of a producer meanwhile, ms": waited[-1]}
            found |= {"objects of the first, MB": first / 1e6, "more objects, MB": (_bytes(folder) - first) / 1e6}
        finally:
            group.stop()
        found |= _timed("verify", "verify", where)
        new = EtcdProcess(folder / "etcd")
        new.start()
        try:
            into = f"{group.names[0][0]}/{group.names[0]}={folder / 'new'}"
            found |= _timed("restore", "restore", where, "--etcd", new.endpoint.removeprefix("http://"), "--into", into)
        finally:
            new.stop()
        return found


def _timed(name: str, *words: str) -> Figures:
    """Wall time and CPU time of `qmq backup WORDS`."""
    begin, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-m", "qmq.cli", "backup", *words], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {f"{name}, s": time.monotonic() - begin, f"{name}, CPU time of the command, s": cpu_s}


def _bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in (folder / "backups").rglob("*") if each.is_file())
