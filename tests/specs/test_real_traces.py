"""What real clusters do are behaviours of the specifications: an ordered subject's partitions are
split, merged and moved under load while a master is killed; a group's master is killed and starts
again, and the next one is cut off.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from specs.model_checker import check_trace, is_there
from specs.ordering_traces import ordering_lines
from specs.replication_traces import check_replicas
from specs.traced_cluster import KEYS, ROUNDS, a_replicated_run, an_ordered_run

pytestmark = [
    pytest.mark.long,
    pytest.mark.sampled,
    pytest.mark.skipif(not is_there(), reason="needs Java, and TLC: scripts/judges"),
]


async def test_a_real_cluster_does_with_ordered_messages_what_is_specified(tmp_path: Path) -> None:
    found = ordering_lines((await an_ordered_run()).found)
    done = [line["do"] for line in found.lines]
    assert done.count("Publish") == 4
    assert done.count("Handle") == len(KEYS) * ROUNDS
    assert done.count("Advance") > 0
    verdict = check_trace("Ordering", found.constants, found.lines, tmp_path)
    assert verdict.is_accepted, f"line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"


async def test_a_real_group_does_what_is_specified_while_masters_die(tmp_path: Path) -> None:
    found = await a_replicated_run()
    done = [line["do"] for line in found.lines]
    assert done.count("Kill") == 1
    assert done.count("BecomeMaster") >= 3
    assert any(line["do"] == "AnswerAppend" and line["m"]["cut"] for line in found.lines)
    verdict = check_replicas(found, tmp_path / "whole")
    assert verdict.is_accepted, f"line {verdict.taken + 1} of {verdict.lines}: {verdict.refused}"
    without = replace(found, lines=[line for line in found.lines if line["do"] != "TakeAck"])
    assert not check_replicas(without, tmp_path / "without").is_accepted
