"""Measures the cost of TLS and access rules: two nodes run side by side, and three forms are measured in alternation.

    .venv/bin/python scripts/bench/security.py [--rounds 5] [--messages 200000] [--forms tls,enforce]

plain: no TLS, mode off. tls: mutual TLS 1.3, mode off. enforce: the same node with its 200 rules enforced, so that nothing else differs.
One process is the client. Producer, consumer and node share the machine's cores, so a ratio of rates is a ratio of CPU time. Each round
begins with another form, because later ones are slowed down by dirty pages of earlier ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import qmq
from qmq.security.certificates import create_authority, issue

FORMS: Final = ("plain", "tls", "enforce")
SIZES: Final = (100, 1024)
ALONE: Final = 2_000
RULES: Final = 200
BATCH: Final = 1_000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--messages", type=int, default=200_000)
    options.add_argument("--forms", default=",".join(FORMS), help="some of them, in this order")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(Path(folder), given.rounds, given.messages, given.forms.split(",")))


async def _measure(folder: Path, rounds: int, messages: int, forms: Sequence[str]) -> None:
    create_authority(folder)
    papers = {name: qmq.Tls(folder / "ca.pem", *issue(folder, name, kind, hosts)[:2]) for name, kind, hosts in _NAMES}
    found: dict[tuple[str, str], list[float]] = {}
    async with AsyncExitStack() as stack:
        nodes = {
            is_plain: await stack.enter_async_context(_node(folder / f"data{is_plain}", papers, is_plain=is_plain))
            for is_plain in {form == "plain" for form in forms}
        }
        for number in range(rounds + 1):
            for form in (*forms[number % len(forms) :], *forms[: number % len(forms)]):
                node = nodes[form == "plain"]
                if form != "plain":
                    await node.mq.access.set_mode("enforce" if form == "enforce" else "off")
                for name, value in (await _round(node, messages, f"{form}{number}")).items():
                    if number:  # The first run is a warm-up.
                        found.setdefault((name, form), []).append(value)
    _print(found, forms)


def _print(found: dict[tuple[str, str], list[float]], forms: Sequence[str]) -> None:
    pairs = [(one, other) for other, one in pairwise(forms)]
    print("| | " + " | ".join(forms) + " | " + " | ".join(f"{one} / {other}" for one, other in pairs) + " |")
    print("|---" * (len(forms) + len(pairs) + 1) + "|")
    for name in dict.fromkeys(name for name, _ in found):
        values = [median(found[name, form]) for form in forms]
        ratios = [ratio(found[name, one], found[name, other]) for one, other in pairs]
        cells = [f"{each:,.3g}" if each < 1000 else f"{each:,.0f}" for each in values] + ratios
        print(f"| {name} | " + " | ".join(cells) + " |")


def batches(messages: int, size: int) -> int:
    """How many batches of bodies of this size are sent: fewer of large ones, at least one."""
    return max(messages * 100 // (size + 100) // BATCH, 1)


def ratio(ones: Sequence[float], others: Sequence[float]) -> str:
    """The median of the rounds' ratios; a dash without one. The system counts CPU time in 10 ms, so a short round may have taken none."""
    found = [a / b for a, b in zip(ones, others, strict=True) if b]
    return f"{median(found):.2f}" if found else "-"


_NAMES: Final = (("node", "node", ["127.0.0.1"]), ("bench", "op", []))


class MeasuredNode(NamedTuple):
    """A node that runs."""

    mq: qmq.Client
    pid: int

    @property
    def cpu_s(self) -> float:
        """The CPU time of the process so far. Other load on the machine affects it less than rates."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _node(data: Path, papers: dict[str, qmq.Tls], *, is_plain: bool) -> AsyncIterator[MeasuredNode]:
    words = [sys.executable, "-m", "qmq.cli", "dev", "--data", str(data), "--no-delay"]
    words += [word for port in ("--port", "--data-port", "--control-port") for word in (port, "0")]
    if not is_plain:
        own = papers["node"]
        words += ["--tls-ca", str(own.ca), "--tls-cert", str(own.cert), "--tls-key", str(own.key)]
    process = await asyncio.to_thread(subprocess.Popen, words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = (await asyncio.to_thread(process.stdout.readline)).split(" ready at ")[1].split()[0]
        async with qmq.connect(address, tls=None if is_plain else papers["bench"]) as mq:
            if not is_plain:
                for kind in ("cluster", "subject", "group"):
                    await mq.access.put_rule("op:bench", [], kind)
                for number in range(RULES):
                    await mq.access.put_rule(f"app:a{number}", ["produce"], "subject", f"s{number}.*")
            yield MeasuredNode(mq, process.pid)
    finally:
        process.terminate()
        process.wait()


async def _round(node: MeasuredNode, messages: int, name: str) -> dict[str, float]:
    found, mq = dict[str, float](), node.mq
    for size in SIZES:
        subject, body = f"{name}-{size}", bytes(size)
        bodies, count = [body] * BATCH, batches(messages, size)
        begin, used_s = time.perf_counter(), node.cpu_s
        for _ in range(count):
            await mq.send_many(subject, bodies)
        found[f"send {size} B, /s"] = count * BATCH / (time.perf_counter() - begin)
        found[f"send {size} B, the node's CPU time, ns a message"] = (node.cpu_s - used_s) * 1e6 / count
        begin, used_s, left = time.perf_counter(), node.cpu_s, count * BATCH
        async for batch in mq.consumer(subject, group="g").batches():
            left -= len(batch)
            if left <= 0:
                break
        found[f"consume {size} B, /s"] = count * BATCH / (time.perf_counter() - begin)
        found[f"consume {size} B, the node's CPU time, ns a message"] = (node.cpu_s - used_s) * 1e6 / count
    used_s = node.cpu_s
    took: list[float] = []
    for _ in range(ALONE):
        begin = time.perf_counter()
        await mq.send(f"{name}-alone", b"x" * 100)
        took.append((time.perf_counter() - begin) * 1e6)
    found["one awaited send, the node's CPU time, µs"] = (node.cpu_s - used_s) * 1e6 / ALONE
    marks: list[Any] = quantiles(took, n=100)
    found["one awaited send, p50 µs"], found["one awaited send, p99 µs"] = marks[49], marks[98]
    return found


if __name__ == "__main__":
    main()
