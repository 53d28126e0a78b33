"""The simulator of ordered subjects in short: some dozen seeds, every planted bug, and that a seed
always tells the same story.

tools/run sim_order runs as many seeds as there is time for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from sim.world import World
from support import forms

from ordersim.bugs import BUGS
from ordersim.checks import Checks
from ordersim.loop import ProcessLoop, Violation, bury, own_violations
from ordersim.run import simulate

SEEDS = forms.seeds(gate=6, every=30, changing=3)
SEEDS_PER_TEST = 3
EXTRA_SEEDS = 40
"""When the code changes, so do the traces: from its remembered seed on, a bug may take so many
more.
"""

FOUND_AT = {
    "publish before the sources are sealed": 1,
    "prepare a change without comparing the latest version": 1,
    "call a change sealed without comparing": 3,
    "publish without comparing": 10,
    "advance when the first of several sources is finished": 1,
    "open a range when another one of its source is finished": 1,
    "skip a version": 3,
    "leave parked keys behind when a group moves on": 6,
    "take progress that is missing for done": 1,
    "put a frontier without comparing": 1,
    "fence without waiting for the lease": 3,
    "fence without comparing the master's key": 91,
    "leave a fence in the store for ever": 4,
    "remove a fence before its seal is known": 17,
    "never end the right by the clock": 4,
    "keep the right for longer than the lease": 4,
    "do not list the fences under a new lease": 13,
    "leave the last message of a parked key out of its replay": 7,
    "replay a key and let its reader read on": 7,
    "count what is given back as parked for ever": 7,
    "tell a reader of no parked keys": 6,
    "answer a grant before it is committed": 1,
    "grant a lane that overlaps another one": 1,
    "take a lane over while its lease runs": 16,
    "report a lane finished before that is committed": 65,
    "begin a target at its end": 1,
    "hand out after the lease may be over": 21,
    "hand out several messages of a key at once": 1,
    "let a zombie's verdicts count": 5,
    "count as done what is another lane's": 1,
    "settle a message when it is handed out": 1,
    "park a message without what follows for its key": 6,
    "continue with what was held under a token that is void": 6,
    "take batches without looking for gaps in their numbers": 8,
    "take batches behind the command message": 1,
    "say of a batch that is stored that it is not, once sealed": 9,
    "answer a seal before it is committed": 1,
    "begin a new session as another producer": 8,
    "take an unknown outcome for not stored": 3,
    "send on before the fate of earlier batches is known": 1,
    "send again under another message id": 79,
    "give up waiting for a partition that is not fenced": 72,
}
"""A seed that finds it soon: its simulation is short. tools/run sim_order --bugs --json tells the
first one.
"""


@pytest.mark.parametrize("chunk", range(0, len(SEEDS), SEEDS_PER_TEST))
def test_order_holds_while_subjects_split_merge_and_move(chunk: int) -> None:
    """Two rounds of faults; after each round all work must come to its end."""
    for seed in SEEDS[chunk : chunk + SEEDS_PER_TEST]:
        result = simulate(seed)
        assert not result.failure, f"tools/run sim_order --replay {seed}: {result.failure}"
        assert result.stored > 0


@pytest.mark.parametrize("name", forms.some(BUGS))
def test_a_planted_bug_is_found(name: str) -> None:
    """Beginning where it was found last; a bug without a seed has yet to be entered into the
    table.
    """
    first = FOUND_AT[name]
    assert any(simulate(seed, BUGS[name]()).failure for seed in range(first, first + EXTRA_SEEDS))


def test_every_planted_bug_has_a_seed_and_no_seed_is_left_over() -> None:
    assert set(FOUND_AT) == set(BUGS)
    assert len(BUGS) >= 20


def test_set_aside_rows_are_not_holes_in_a_replay_and_omitted_ones_are() -> None:
    """A lane is lost after message 3, and its successor parks the key at 2: 3 is not delivered
    again, and 4 is next.
    """
    for parked in ((2, 3), (2,)):
        group = SimpleNamespace(record=SimpleNamespace(start="earliest"))
        checks = Checks(SimpleNamespace(routes=SimpleNamespace(groups={"g": group})))  # type: ignore[arg-type]
        for number in (1, 2, 3, 1, 2):
            checks.require_order("g", "c", b"k", number, f"message {number}")
        for number in parked:
            checks.set_aside("g", b"k", number)
        with (
            own_violations(),
            nullcontext()
            if 3 in parked
            else pytest.raises(Violation, match="the replay has not come so far"),
        ):
            checks.require_order("g", "c", b"k", 4, "message 4")


def tell() -> str:
    """Some seeds, as one line."""
    found = [simulate(seed) for seed in (3,)]
    return str([(each.trace, each.events, each.stored, each.handed) for each in found])


def test_unstarted_tasks_of_a_paused_process_survive_its_death() -> None:
    async def never_begun() -> None:
        raise AssertionError

    world = World(seed=1)
    loop = ProcessLoop(world, "consumer", lambda *_: None)
    loop.pause()
    loop.create_task(never_begun())
    world.run(1)
    assert len(loop.frozen) == 1
    # Without a reference to the task, Python would warn of a coroutine that was never awaited.
    bury(loop.kill())


@pytest.mark.sampled
def test_a_seed_always_tells_the_same_story() -> None:
    """In this process, and in others, where string hashes differ."""
    folder = str(Path(__file__).parents[1])
    told = {tell()}
    for hash_seed in ("0",) if forms.FORM == "gate" else ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": folder}
        command = [sys.executable, "-c", "from ordersim.test_ordersim import tell; print(tell())"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        told.add(done.stdout.strip())
    assert len(told) == 1
