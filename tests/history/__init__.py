"""A fault test records what happens in a history, and checkers judge the history afterwards.

    events     the history format: JSON lines, one for the beginning and one for the end of each
               operation; `Recorder`, `load`, `History`
    checkers   `check_all`: all checkers, and the `Report`
    cases      small histories for tests of the checkers
    ordered    the same for ordered subjects, with separate events and checkers: `check_ordered`

Three lines in a test: `recorder.record(...)` around each call, `report = check_all(load(path),
drained=True)`, `assert report.ok, report`.
"""

from history.checkers import Report, check_all
from history.events import (
    Ack,
    Anomaly,
    Event,
    History,
    Note,
    Poll,
    Record,
    Recorder,
    Reset,
    Send,
    load,
)

__all__ = [
    "Ack",
    "Anomaly",
    "Event",
    "History",
    "Note",
    "Poll",
    "Record",
    "Recorder",
    "Report",
    "Reset",
    "Send",
    "check_all",
    "load",
]
