"""Traces of simulated groups are behaviours of the specifications, and traces of groups with planted bugs are not (docs/JUDGES.md).
`tools/run traces` checks more seeds, for a given time.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest
from sim.bugs import BUGS
from sim.traces import trace
from support import forms

from specs.model_checker import is_there
from specs.replication_traces import check_replicas, check_seed

pytestmark = [pytest.mark.long, pytest.mark.sampled, pytest.mark.skipif(not is_there(), reason="needs Java, and TLC: scripts/judges")]

REFUSED_AT: Final = {
    "commit entries of an older epoch by counting": 1,
    "commit without the others": 1,
    "count half as a majority": 1,
    "count learners": 2,
    "commit without a majority while the membership changes": 2,
    "count what was sent as stored": 1,
    "count acknowledgements of another epoch": 3,
    "count acknowledgements from before a peer lost its place": 3,
    "commit all that a slave has": 1,
    "let the commit position go back": 7,
    "commit before the log is known to match": 1,
    "take entries of an older epoch": 2,
    "answer a promise request without promising": 1,
    "promise without telling how far one is": 1,
    "count as in step with every new master": 1,
    "skip the promises": 1,
    "lead although another is ahead": 14,
    "two promises are always enough": 1,
    "let a replica that forgot have a say": 2,
    "let learners promise for voters": 2,
    "compare logs by length alone": 44,
    "be whole again at the first word from a master": 2,
    "be whole again before this epoch committed anything": 2,
    "match by index, not by epoch": 1,
    "cut at every sign of life that is behind": 1,
    "stream from a slave's end without looking where the logs part": 1,
    "take a lost answer for a success": 3,
    "read a lost answer back by its epoch alone": 97,
    "put the epoch without comparing": 4,
    "change the membership without comparing, and give up on a lost answer": 11,
    "change the membership while a change is under way": 2,
    "change the membership before the last change has a majority": 4,
    "change the membership before serving": 4,
    "keep promises in memory only": 1,
    "send before the promise is saved": 1,
    "do not cut what diverged": 7,
    "count at once after a power cut without flushes": 2,
    "accept messages of peers outside the group": 5,
}
"""Planted bugs of the simulator, with the first seed at which the specification does not allow what they do (`tools/run traces --bugs`)."""
EARLY: Final = (
    "commit without the others",
    "count half as a majority",
    "count what was sent as stored",
    "answer a promise request without promising",
    "skip the promises",
)
"""Those that are refused within the first hundred lines."""
EXTRA_SEEDS: Final = 20
"""When the code changes, so do the traces: from its remembered seed on, a bug may take so many more."""
LINES: Final = 1_000


def test_a_simulated_group_does_what_the_specification_allows(tmp_path: Path) -> None:
    for seed in random.Random(forms.SEED).sample(range(100_000), 3):
        verdict = check_seed(seed, 400, tmp_path / str(seed))
        assert verdict.is_accepted, f"seed {seed}: line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"


@pytest.mark.parametrize("bug", [pytest.param(each, marks=[] if each in EARLY else pytest.mark.longest) for each in REFUSED_AT])
def test_what_a_planted_bug_does_is_refused(bug: str, tmp_path: Path) -> None:
    for seed in range(REFUSED_AT[bug], REFUSED_AT[bug] + EXTRA_SEEDS):
        found = trace(seed, LINES, BUGS[bug])
        if found.lines != trace(seed, LINES).lines and not check_replicas(found, tmp_path / str(seed)).is_accepted:
            return
    pytest.fail(f"TLC allows what this bug does from seed {REFUSED_AT[bug]} on")
