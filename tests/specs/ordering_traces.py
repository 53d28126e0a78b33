"""Checks what a simulated cluster does with an ordered subject against Ordering.tla."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ordersim.plan import Plan, draw
from ordersim.run import SUBJECT, simulate
from ordersim.traced import TracedSimulation, UncheckedSimulation
from ordersim.tracer import Observation, Tracer

from specs.model_checker import TraceVerdict, check_trace
from specs.ordering_trace import ordering_lines

Bug = Callable[[], AbstractContextManager[None]]

FENCING: Final = {"is_lease": True, "change_every_ms": 10_000, "fault_every_ms": 3_000, "faults": ("hide_group",), "consumers": 1}
METASERVERS: Final = {"metaservers": 3, "arrow_stall": 0.5, "change_every_ms": 700, "handler_ms": 5}
LANES: Final = {"consumers": 3, "keys": 8, "concurrency": 1, "handler_ms": 200, "send_every_ms": 700, "gate": "lanes"}
SEVERAL: Final = {
    **LANES,
    "metaservers": 3,
    "arrow_stall": 0.1,
    "change_every_ms": 1_500,
    "handler_ms": 100,
    "partitions": 2,
    "changes": ("move", "split", "split_many"),
}
SLOW: Final = {**LANES, "handler_ms": 1_000}
WRITES: Final = {**SLOW, "consumers": 1, "keys": 2, "send_every_ms": 300, "faults": ("disk_full",), "fault_every_ms": 1_000}
AIMED: Final = {"send_every_ms": 300, "consumers": 1, "aim": 1.0, "change_every_ms": 2_000, "faults": ("silence_group", "cut_connections")}
NEEDS: Final[dict[str, dict[str, Any]]] = {
    "prepare a change without comparing the latest version": METASERVERS,
    "call a change sealed without comparing": METASERVERS,
    "publish without comparing": METASERVERS,
    "put a frontier without comparing": SEVERAL,
    "advance when the first of several sources is finished": {**SLOW, "partitions": 3, "changes": ("merge", "split_many")},
    "open a range when another one of its source is finished": {**LANES, "partitions": 1, "changes": ("move", "split")},
    "skip a version": {**SLOW, "change_every_ms": 700, "changes": ("move", "split")},
    "leave parked keys behind when a group moves on": {"on_failure": "park", "handler_fails": 0.2, "changes": ("move", "split")},
    "park a message without what follows for its key": {"on_failure": "park", "handler_fails": 0.2, "prefetch": 40},
    "fence without waiting for the lease": FENCING,
    "fence without comparing the master's key": {**FENCING, "faults": ("hide_group", "isolate_group_long"), "aim": 1.0},
    "never end the right by the clock": FENCING,
    "keep the right for longer than the lease": {**FENCING, "send_every_ms": 300, "concurrency": 1, "handler_ms": 1_000},
    "do not list the fences under a new lease": FENCING,
    "report a lane finished before that is committed": {"change_every_ms": 1_000, "faults": ("stall_group",), "fault_every_ms": 1_000},
    "take a lane over while its lease runs": {
        **SLOW,
        "prefetch": 40,
        "faults": ("join_consumer", "isolate_client"),
        "fault_every_ms": 1_500,
    },
    "hand out after the lease may be over": {**SLOW, "prefetch": 40, "faults": ("pause_consumer_long",), "fault_every_ms": 1_500},
    "let a zombie's verdicts count": {**SLOW, "prefetch": 40, "faults": ("pause_consumer_long", "isolate_client"), "fault_every_ms": 1_500},
    "continue with what was held under a token that is void": {**SLOW, "prefetch": 40, "faults": ("pause_consumer_long", "isolate_client")},
    "count as done what is another lane's": {**SLOW, "partitions": 1},
    "take batches without looking for gaps in their numbers": WRITES,
    "say of a batch that is stored that it is not, once sealed": AIMED,
    "send on before the fate of earlier batches is known": AIMED,
    "give up waiting for a partition that is not fenced": AIMED,
}
"""What planted bugs of the simulator need, so that they have an effect within a few seeds: other values of the plan."""
OUTSIDE: Final = {
    "leave a fence in the store for ever": "removed fences",
    "remove a fence before its seal is known": "removed fences",
    "leave the last message of a parked key out of its replay": "replays",
    "replay a key and let its reader read on": "replays",
    "count what is given back as parked for ever": "replays",
    "begin a new session as another producer": "failed messages",
    "take an unknown outcome for not stored": "failed messages",
    "send again under another message id": "message ids",
}
"""Planted bugs of the simulator in what the specification leaves out."""
LEFT_OUT: Final = ("kill_producer", "new_group", "unpark")
"""Faults after which a trace would end at once."""


def _plan(seed: int, needs: Mapping[str, Any]) -> Plan:
    """Changes follow each other faster than in other plans: groups fall behind, and partitions are closed that nobody has read."""
    chance = random.Random(f"trace {seed}")
    drawn = draw(chance)
    is_parking = chance.random() < 0.3
    plan = replace(
        drawn,
        rounds=1,
        producers=1,
        groups=("g",),
        unknown="resend",
        delivery_s=600.0,
        hold_every_ms=0,
        on_failure="park" if is_parking else "block",
        handler_fails=0.1 if is_parking else drawn.handler_fails,
        change_every_ms=chance.choice((700, 2_000, 4_000)),
        faults=tuple(each for each in drawn.faults if each not in LEFT_OUT) or ("kill_master",),
    )
    return replace(plan, **needs)


def traced(seed: int, observations_max: int, bug: Bug | None = None, needs: Mapping[str, Any] | None = None) -> Tracer:
    """What is seen of a seed's run: of one producer and one group, without messages that fail. With a bug, the simulator's checks are off;
    `needs` replaces values of the plan.
    """
    tracer = Tracer(SUBJECT, "g", observations_max, lambda body: int(body.rpartition(b"/")[2]))
    simulation_class = TracedSimulation if bug is None else UncheckedSimulation
    result = simulate(seed, None if bug is None else bug(), plan=_plan(seed, needs or {}), tracer=tracer, simulation_class=simulation_class)
    if result.failure and bug is None:
        raise RuntimeError(f"seed {seed}: {result.failure}")
    return tracer


def check_observations(found: Sequence[Observation], folder: Path) -> TraceVerdict:
    """Whether what was seen is a behaviour of the specification."""
    lines = ordering_lines(found)
    return check_trace("Ordering", lines.constants, lines.lines, folder)


def check_ordering_seed(seed: int, observations_max: int, folder: Path) -> TraceVerdict:
    """Whether the first observations of a seed's run are a behaviour of the specification."""
    return check_observations(traced(seed, observations_max).found, folder)
