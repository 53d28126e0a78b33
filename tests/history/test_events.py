"""The format: what is recorded is what is loaded, also after a kill, by many threads and from
several files.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from history.cases import BAD, GOOD, Case
from history.events import (
    BRIEF_CHARS_MAX,
    Note,
    Poll,
    Record,
    Recorder,
    Reset,
    Send,
    brief,
    from_json,
    load,
    to_json,
)


@pytest.mark.parametrize("case", GOOD + BAD, ids=lambda case: case.name)
def test_every_event_survives_its_line(case: Case) -> None:
    for event in case.events:
        assert from_json(to_json(event)) == event


def test_a_line_leaves_out_unknown_fields() -> None:
    assert to_json(Send(process="p1", type="invoke", subject="s", values=(7,))) == (
        '{"process":"p1","type":"invoke","f":"send","t_ns":0,"subject":"s","values":[7]}'
    )
    poll = Poll(
        process="c1", type="ok", group="g", queue="s/0@g1", records=(Record(4, 7, 2),), t_ns=9
    )
    assert (
        to_json(poll)
        == '{"process":"c1","type":"ok","f":"poll","t_ns":9,"group":"g","queue":"s/0@g1","records":[[4,7,2]]}'  # noqa: E501
    )


def test_an_unknown_operation_is_a_note() -> None:
    assert from_json('{"process":"nemesis","type":"info","f":"pause","text":"broker 2"}') == Note(
        process="nemesis", type="info", f="pause", text="broker 2"
    )


@pytest.mark.parametrize(
    "line",
    [
        '{"process":"p","type":"done","f":"send"}',
        '{"process":"p","type":"ok","f":"send","colour":1}',
        "{",
    ],
)
def test_a_line_of_another_format_is_refused(line: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_json(line)


def test_recorded_events_are_stamped_and_loaded_in_order(tmp_path: Path) -> None:
    with Recorder(tmp_path / "h.jsonl", clock_ns=count(100).__next__) as recorder:
        begun = recorder.record(Send(process="p1", type="invoke", subject="s", values=(1,)))
        ended = recorder.record(begun.ended("ok", queue="s/0@g1", sequence=0))
        reset = recorder.record(Reset(process="o", type="ok", t_ns=7))
        assert [event.t_ns for event in load(tmp_path / "h.jsonl")] == [100, 101, 7], (
            "a line is in the file as soon as it is recorded"
        )
    assert load(tmp_path / "h.jsonl") == [begun, ended, reset]


def test_a_recorder_continues_with_a_file(tmp_path: Path) -> None:
    for value in (1, 2):
        with Recorder(tmp_path / "h.jsonl") as recorder:
            recorder.record(Send(process="p1", type="invoke", subject="s", values=(value,)))
    assert len(load(tmp_path / "h.jsonl")) == 2


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    line = to_json(Send(process="p1", type="invoke", subject="s", values=(1,)))
    (tmp_path / "h.jsonl").write_text(f"{line}\n{line[:20]}")
    assert len(load(tmp_path / "h.jsonl")) == 1


def test_lines_of_threads_do_not_mix(tmp_path: Path) -> None:
    def work(process: int) -> None:
        for value in range(200):
            recorder.record(
                Send(process=f"p{process}", type="invoke", subject="s", values=(value,) * 50)
            )

    with Recorder(tmp_path / "h.jsonl") as recorder, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(load(tmp_path / "h.jsonl")) == 800


def test_files_of_several_processes_are_merged_by_time(tmp_path: Path) -> None:
    for name, start in (("a", 1), ("b", 2)):
        with Recorder(tmp_path / name, clock_ns=count(start, 2).__next__) as recorder:
            for _ in range(3):
                recorder.record(Note(process=name, type="info", f="tick"))
    assert [event.t_ns for event in load(tmp_path / "a", tmp_path / "b")] == [1, 2, 3, 4, 5, 6]


def test_a_long_event_is_shown_in_brief() -> None:
    event = Send(process="p1", type="invoke", subject="s", values=tuple(range(1000)))
    assert len(brief(event)) == BRIEF_CHARS_MAX + 3
