"""The replication simulator in short: some hundred seeds, every planted bug, and that a seed always
tells the same story.

tools/run sim runs as many seeds as there is time for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import forms

from sim.bugs import BUGS
from sim.run import simulate

SEEDS = forms.seeds(gate=20, every=300, changing=20)
SEEDS_PER_TEST = 20
EXTRA_SEEDS = 60
"""When the code changes, so do the traces: from its remembered seed on, a bug may take so many
more.
"""

FOUND_AT = {
    "commit entries of an older epoch by counting": 165,
    "commit without the others": 1,
    "count half as a majority": 1,
    "count learners": 2,
    "commit without a majority while the membership changes": 2,
    "count what was sent as stored": 1,
    "count acknowledgements of another epoch": 55,
    "count acknowledgements from before a peer lost its place": 55,
    "commit all that a slave has": 1,
    "let the commit position go back": 1,
    "commit before the log is known to match": 1,
    "take entries of an older epoch": 4,
    "answer a promise request without promising": 7,
    "promise without telling how far one is": 1,
    "count as in step with every new master": 1,
    "skip the promises": 1,
    "lead although another is ahead": 1,
    "two promises are always enough": 55,
    "let a replica that forgot have a say": 8,
    "let learners promise for voters": 8,
    "compare logs by length alone": 5,
    "be whole again at the first word from a master": 16,
    "be whole again before this epoch committed anything": 484,
    "match by index, not by epoch": 1,
    "cut at every sign of life that is behind": 3,
    "stream from a slave's end without looking where the logs part": 1,
    "leave a replica in step behind when its next entry is gone": 4,
    "start over at a Reset that came twice": 4,
    "say nothing to a silent peer whose next entry is gone": 45,
    "take a lost answer for a success": 10,
    "read a lost answer back by its epoch alone": 59,
    "put the epoch without comparing": 1,
    "change the membership without comparing, and give up on a lost answer": 2,
    "change the membership while a change is under way": 4,
    "change the membership before the last change has a majority": 4,
    "change the membership before serving": 4,
    "remove a voter though too few of those that stay are there": 11,
    "acknowledge before the flush": 2,
    "count a flush that began before a cut": 15,
    "keep promises in memory only": 7,
    "promise although the disk has no room for the promise": 38,
    "send before the promise is saved": 347,
    "do not cut what diverged": 1,
    "count written as stored": 2,
    "cut entries, but still count them as stored, and cut committed ones": 7,
    "count a new disk at once": 5,
    "forget with a new disk what was promised": 7,
    "count at once after a power cut without flushes": 57,
    "answer everything that waits at any commit": 1,
    "acknowledge when the master has it": 1,
    "accept a hello without its proof": 4,
    "accept messages of peers outside the group": 4,
}
"""The seed that finds it first (tools/run sim --bugs --json)."""


@pytest.mark.parametrize("chunk", range(0, len(SEEDS), SEEDS_PER_TEST))
def test_nothing_that_was_promised_is_broken(chunk: int) -> None:
    """Ten simulated minutes of faults each, in four rounds, after each of which the group must
    recover.
    """
    for seed in SEEDS[chunk : chunk + SEEDS_PER_TEST]:
        result = simulate(seed)
        assert not result.failure, f"tools/run sim --replay {seed}: {result.failure}"
        assert result.acknowledged > 0


@pytest.mark.parametrize("name", forms.some(BUGS))
def test_a_planted_bug_is_found(name: str) -> None:
    """Beginning where it was found last; a bug without a seed has yet to be entered into the
    table.
    """
    first = FOUND_AT[name]
    assert any(simulate(seed, 10, BUGS[name]).failure for seed in range(first, first + EXTRA_SEEDS))


def test_every_planted_bug_has_a_seed_and_no_seed_is_left_over() -> None:
    assert set(FOUND_AT) == set(BUGS)
    assert len(BUGS) >= 25


def tell() -> str:
    """Some seeds, as one line."""
    return str(
        [
            (found.trace, found.events, found.acknowledged)
            for found in (simulate(seed, 3) for seed in range(40, 48))
        ]
    )


@pytest.mark.sampled
def test_a_seed_always_tells_the_same_story() -> None:
    """In this process, and in others, where string hashes differ."""
    folder = str(Path(__file__).parents[1])
    told = {tell()}
    for hash_seed in ("0",) if forms.FORM == "gate" else ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": folder}
        command = [sys.executable, "-c", "from sim.test_simulation import tell; print(tell())"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        told.add(done.stdout.strip())
    assert len(told) == 1
