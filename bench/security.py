"""Measures the cost of TLS and access rules: two nodes run side by side, and three forms are
measured in alternation.

    scripts/bench security [--rounds 5] [--messages 200000] [--forms tls,enforce]

plain: no TLS, mode off. tls: mutual TLS 1.3, mode off. enforce: the same node with its 200 rules
enforced, so that nothing else differs. One process is the client. Producer, consumer and node share
the machine's cores, so a ratio of rates is a ratio of CPU time. Each round begins with another
form, because later ones are slowed down by dirty pages of earlier ones.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from operator import truediv
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import qmq
from bench.processes import BATCH, Figures, Node, cpu_s
from qmq.security.certificates import create_authority, issue

FORMS: Final = ("plain", "tls", "enforce")
SIZES: Final = (100, 1024)
ALONE: Final = 2_000
RULES: Final = 200


def main(words: Sequence[str]) -> None:
    options = argparse.ArgumentParser(
        "scripts/bench security",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--messages", type=int, default=200_000)
    options.add_argument("--forms", default=",".join(FORMS), help="some of them, in this order")
    given = options.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(Path(folder), given.rounds, given.messages, given.forms.split(",")))


async def _measure(folder: Path, rounds: int, messages: int, forms: Sequence[str]) -> None:
    create_authority(folder)
    papers = {
        name: qmq.Tls(folder / "ca.pem", *issue(folder, name, kind, hosts)[:2])
        for name, kind, hosts in _NAMES
    }
    found: dict[tuple[str, str], list[float]] = {}
    async with AsyncExitStack() as stack:
        nodes = {
            is_plain: await stack.enter_async_context(_node(papers, is_plain=is_plain))
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
    print(
        "| | "
        + " | ".join(forms)
        + " | "
        + " | ".join(f"{one} / {other}" for one, other in pairs)
        + " |"
    )
    print("|---" * (len(forms) + len(pairs) + 1) + "|")
    for name in dict.fromkeys(name for name, _ in found):
        values = [median(found[name, form]) for form in forms]
        ratios = [
            f"{median(map(truediv, found[name, one], found[name, other])):.2f}"
            for one, other in pairs
        ]
        cells = [f"{each:,.3g}" if each < 1000 else f"{each:,.0f}" for each in values] + ratios
        print(f"| {name} | " + " | ".join(cells) + " |")


def batches(messages: int, size: int) -> int:
    """How many batches of bodies of this size are sent: fewer of large ones, at least one."""
    return max(messages * 100 // (size + 100) // BATCH, 1)


_NAMES: Final = (("node", "node", ["127.0.0.1"]), ("bench", "op", []))


class MeasuredNode(NamedTuple):
    """A node that runs."""

    mq: qmq.Client
    pid: int

    @property
    def cpu_s(self) -> float:
        """The CPU time of the process so far.
        Other load on the machine affects it less than rates.
        """
        return cpu_s(self.pid)


@asynccontextmanager
async def _node(papers: dict[str, qmq.Tls], *, is_plain: bool) -> AsyncIterator[MeasuredNode]:
    own = papers["node"]
    words = (
        ()
        if is_plain
        else ("--tls-ca", str(own.ca), "--tls-cert", str(own.cert), "--tls-key", str(own.key))
    )
    node = await asyncio.to_thread(Node, "--no-delay", *words)
    try:
        async with qmq.connect(node.address, tls=None if is_plain else papers["bench"]) as mq:
            if not is_plain:
                for kind in ("cluster", "subject", "group"):
                    await mq.access.put_rule("op:bench", [], kind)
                for number in range(RULES):
                    await mq.access.put_rule(
                        f"app:a{number}", ["produce"], "subject", f"s{number}.*"
                    )
            yield MeasuredNode(mq, node.pid)
    finally:
        await asyncio.to_thread(node.stop)


async def _round(node: MeasuredNode, messages: int, name: str) -> Figures:
    found, mq = Figures(), node.mq
    for size in SIZES:
        subject, body = f"{name}-{size}", bytes(size)
        bodies, count = [body] * BATCH, batches(messages, size)
        begin, used_s = time.perf_counter(), node.cpu_s
        for _ in range(count):
            await mq.send_many(subject, bodies)
        found[f"send {size} B, /s"] = count * BATCH / (time.perf_counter() - begin)
        found[f"send {size} B, the node's CPU time, ns a message"] = (
            (node.cpu_s - used_s) * 1e6 / count
        )
        begin, used_s, left = time.perf_counter(), node.cpu_s, count * BATCH
        async for batch in mq.consumer(subject, group="g").batches():
            left -= len(batch)
            if left <= 0:
                break
        found[f"consume {size} B, /s"] = count * BATCH / (time.perf_counter() - begin)
        found[f"consume {size} B, the node's CPU time, ns a message"] = (
            (node.cpu_s - used_s) * 1e6 / count
        )
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
