"""The lines that a replica's steps have in a trace for TLC (replica_tracer.py)."""

from __future__ import annotations

from specs.replication_traces import trace_of_a_late_promise


def test_a_step_that_waits_for_room_on_the_disk_has_its_lines_when_it_is_done() -> None:
    _, full, after = trace_of_a_late_promise()
    assert full == [], (
        "nothing is done while the promise cannot be saved, and what arrives meanwhile is dropped"
    )
    promise, answer, mismatch, *_ = after
    assert [promise["do"], answer["do"], mismatch["do"]] == [
        "PromiseEpoch",
        "AnswerAppend",
        "Report",
    ]
    assert answer["m"]["epoch"] == mismatch["m"]["epoch"] == promise["epoch"]
    assert (mismatch["m"]["kind"], mismatch["m"]["to"]) == ("Mismatch", answer["m"]["from"])
    assert mismatch["m"]["round"] == answer["m"]["round"]
