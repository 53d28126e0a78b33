"""The road of a message: the modules, calls and forwards from `send` to the acknowledgement, by a
profile.

    tools/run road [--show]      a message, a delayed one, a split; with --show the modules and the
                                 forwards by name

A function counts if it runs while the message is on its way, and not also while the cluster is idle
(timers). What four messages have in common counts, since a rare timer falls into the time of one
message, not of all. A forward is a function that only calls another with what it was given.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

import qmq
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb
from qmq.testing import TestCluster

ROOT: Final = Path(qmq.__file__).resolve().parents[1]
PACKAGES: Final = tuple(
    str(ROOT / each) + "/" for each in ("qmq", "coordination", "ordering", "replication")
)
TESTING: Final = str(ROOT / "qmq" / "testing") + "/"
MESSAGES: Final = 4
IDLE_S: Final = 1.2
"""Longer than the periods of heartbeats, leases and ticks in a test cluster."""

Function = tuple[str, int, str]
"""(file, first line, qualified name)."""


@dataclass(frozen=True, slots=True)
class Road:
    """`modules` by path, and `forwards` by name, in order of the alphabet;
    `calls`: of one message.
    """

    modules: list[str]
    calls: int
    forwards: list[str]


@contextmanager
def functions_run() -> Iterator[Counter[Function]]:
    """The functions of ours that are called in this thread."""
    found: Counter[Function] = Counter()

    def called(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        is_ours = (
            event == "call"
            and code.co_filename.startswith(PACKAGES)
            and not code.co_filename.startswith(TESTING)
        )
        if is_ours and code.co_name != "<module>":
            found[code.co_filename, code.co_firstlineno, code.co_qualname] += 1

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


async def measured(once: Callable[[], Awaitable[Counter[Function]]]) -> Road:
    """The road of what `once` does, when connections and sessions are there."""
    await asyncio.sleep(0.3)
    with functions_run() as timers:
        await asyncio.sleep(IDLE_S)
    runs = [await once() for _ in range(MESSAGES)]
    common = set.intersection(*[set(run) for run in runs]) - set(timers)
    modules = sorted({str(Path(file).relative_to(ROOT)) for file, _, _ in common})
    calls = min(sum(run[each] for each in common) for run in runs)
    return Road(
        modules, calls, sorted(name for file, line, name in common if line in forwards_of(file))
    )


@cache
def forwards_of(file: str) -> frozenset[int]:
    """The first lines of the functions of a file that only forward."""
    functions = (
        each
        for each in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return frozenset(
        min([each.lineno, *(mark.lineno for mark in each.decorator_list)])
        for each in functions
        if is_forward(each)
    )


def is_forward(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its body is one call with nothing but names, attributes and constants."""
    body = [
        each
        for each in function.body
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or body[0].value is None:
        return False
    value = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(value, ast.Call) or function.name.startswith("__"):
        return False
    given = [*value.args, *(each.value for each in value.keywords)]
    return all(
        isinstance(each, ast.Name | ast.Attribute | ast.Constant | ast.Starred) for each in given
    )


async def of_a_message(cluster: TestCluster, delay: timedelta | None = None) -> Road:
    """From `send` to the acknowledgement."""
    mq = cluster.client()
    consumer = mq.consumer("s", "g")

    async def once() -> Counter[Function]:
        with functions_run() as found:
            received = asyncio.ensure_future(anext(consumer))
            await mq.send("s", b"body", delay=delay)
            await (await received).ack()
            await asyncio.sleep(0.05)
        return found

    await once()
    return await measured(once)


async def of_a_split(cluster: TestCluster) -> Road:
    """A split of a partition, from the operator's call to its answer."""
    mq = cluster.client()
    await mq.metadata.create_subject(
        SubjectConfig("o", order=Order.STRICT, logical_partitions=64), partitions=2
    )
    sender = cluster.client()
    await sender.send("o", b"body", key="k")
    await sender.close()  # it would learn the new routes at moments of its own

    async def once() -> Counter[Function]:
        route = (await mq.metadata.describe_route("o")).route
        with functions_run() as found:
            split = pb.SplitOperation(partition=route.partitions[0].number, parts=2)
            await mq.metadata.change_route("o", split=split, from_version=route.version)
        return found

    return await measured(once)


async def main(*, shows: bool) -> None:
    async with TestCluster(delay=False) as cluster:
        roads = {"a message": await of_a_message(cluster), "a split": await of_a_split(cluster)}
    async with TestCluster() as cluster:
        roads["a delayed message"] = await of_a_message(cluster, timedelta(milliseconds=200))
    for name, road in roads.items():
        print(
            f"{name}: {len(road.modules)} modules, {road.calls} calls, {len(road.forwards)} "
            "forwards"
        )
        if shows:
            print("".join(f"    {each}\n" for each in (*road.modules, *road.forwards)), end="")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--show", action="store_true", help="name the modules and forwards")
    asyncio.run(main(shows=arguments.parse_args().show))
