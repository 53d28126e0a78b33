"""Figures of the RocketMQ gateway: messages a second and latency with RocketMQ's own clients,
beside RocketMQ 5's broker and proxy.

    scripts/bench gateway [--count N] [--runs N]

Needs scripts/rocketmq_clients --servers. Every scenario runs at one gateway process and at
RocketMQ's proxy in turn, with the same client program. CPU time is that of each process: the
gateway (or proxy), the node (or broker), and the client.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.processes import Node, cpu_s

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from system.gateway_processes import PROGRAMS, Gateway, Load, RocketMQ

ROOM_S: Final = 20
TOPICS: Final = {100: "bench", 1_000: "bench-large"}
"""By the size of bodies."""


class Place(NamedTuple):
    """Where a scenario runs: the process that clients talk to, and the one that stores messages."""

    name: str
    address: str
    gateway_pid: int
    broker_pid: int


class Scenario(NamedTuple):
    """`kind` is the client and its operation; `at_once` is the number of messages in flight, or in
    one batch.
    """

    kind: str
    bytes: int
    at_once: int


SCENARIOS: Final = (
    Scenario("java send", 100, 64),
    Scenario("java send", 1_000, 64),
    Scenario("java send", 100, 1),
    Scenario("java receive", 100, 1),
    Scenario("java receive", 100, 32),
    Scenario("java receive", 1_000, 32),
    Scenario("python send", 100, 64),
    Scenario("python send", 1_000, 64),
    Scenario("python send", 100, 1),
)


def python_send(address: str, count: int, size: int, at_once: int) -> dict[str, Any]:
    """Send with RocketMQ's Python client, in a separate process: the client and QMQ both have
    modules of RocketMQ's API.
    """
    environment = {**os.environ, "HOME": tempfile.mkdtemp(prefix="rocketmq-load-")}
    command = [
        sys.executable,
        str(PROGRAMS.parent / "rocketmq_programs.py"),
        "load_producer",
        address,
        TOPICS[size],
        f"{count},{size},{at_once}",
    ]
    out = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    line = next(each for each in out.splitlines() if each.startswith("result "))
    return dict(json.loads(line.removeprefix("result ")))


def run(scenario: Scenario, place: Place, count: int, number: int) -> dict[str, float]:
    """One run: messages a second, CPU time of a message by process, latency if it was measured."""
    gateway_s, broker_s, client_s = (
        cpu_s(place.gateway_pid),
        cpu_s(place.broker_pid),
        _clients_cpu_s(),
    )
    topic = TOPICS[scenario.bytes]
    few = count // 10 if scenario.at_once == 1 else count
    if scenario.kind == "java send":
        found = Load(
            place.address, "send", topic, few, scenario.bytes, scenario.at_once, 0
        ).result()
    elif scenario.kind == "python send":
        few = few // 4
        found = python_send(place.address, few, scenario.bytes, scenario.at_once)
    else:
        few = few * 2 if scenario.at_once == 1 else few
        found = Load(
            place.address,
            "receive",
            topic,
            f"g-{number}-{scenario.at_once}",
            few,
            4,
            scenario.at_once,
            ROOM_S,
        ).result()
        few = found["received"]
    used = {
        "gateway": cpu_s(place.gateway_pid) - gateway_s,
        "broker": cpu_s(place.broker_pid) - broker_s,
        "client": _clients_cpu_s() - client_s,
    }
    figures = {"a second": few / found["seconds"]} | {
        f"{name} µs": spent_s / few * 1e6 for name, spent_s in used.items()
    }
    return figures | {
        f"{name} ms": found[f"{name}_us"] / 1000 for name in ("p50", "p99") if f"{name}_us" in found
    }


def _clients_cpu_s() -> float:
    """CPU time of the client programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(words: Sequence[str]) -> None:
    arguments = argparse.ArgumentParser("scripts/bench gateway", description=__doc__)
    arguments.add_argument("--count", type=int, default=20_000)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args(words)
    node, rocketmq = Node(), RocketMQ(*TOPICS.values())
    gateway = Gateway(node.address)
    places = [
        Place("QMQ", gateway.address, gateway.process.pid, node.pid),
        Place("RocketMQ", rocketmq.address, rocketmq.processes[-1].pid, rocketmq.processes[1].pid),
    ]
    results: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for place in places:  # warm up
            Load(place.address, "send", TOPICS[100], chosen.count // 2, 100, 64, 0).result()
        for scenario in SCENARIOS:
            runs: dict[str, list[dict[str, float]]] = {each.name: [] for each in places}
            for number in range(chosen.runs):
                for place in places if number % 2 == 0 else places[::-1]:
                    runs[place.name].append(run(scenario, place, chosen.count, number))
            medians = {
                name: {key: statistics.median([each[key] for each in of]) for key in of[0]}
                for name, of in runs.items()
            }
            title = f"{scenario.kind}, {scenario.bytes} B, {scenario.at_once} at once"
            results[title] = medians
            print(title)
            for name, figures in medians.items():
                print(
                    f"    {name:9} "
                    + ", ".join(f"{key} {value:,.1f}" for key, value in figures.items()),
                    flush=True,
                )
            print(
                f"    ratio     {medians['QMQ']['a second'] / medians['RocketMQ']['a second']:.2f}",
                flush=True,
            )
        if chosen.json:
            print(json.dumps(results))
    finally:
        gateway.stop()
        rocketmq.stop()
        node.stop()
