"""A fault test records what happens in a history, and checkers judge the history afterwards.

    events     the history format: JSON lines, one for the beginning and one for the end of each operation; `Recorder`, `load`
    past       `History`: the events, indexed for the checkers
    losses     lost, lost_below, phantom
    positions  duplicate_stored, inconsistent_positions, send_order, two_masters
    deliveries delivered_after_ack, delivered_twice, recovered
    gaps       availability
    checkers   `check_all`: all of them, and the `Report`
    ordered    the same for ordered subjects, with separate events and checkers: `check_ordered`

Three lines in a test: `recorder.record(...)` around each call, `report = check_all(load(path), drained=True)`, `assert report.ok, report`.
"""

from history.checkers import Report, check_all
from history.events import Ack, Event, Note, Poll, Record, Recorder, Reset, Send, load
from history.past import Anomaly, History

__all__ = ["Ack", "Anomaly", "Event", "History", "Note", "Poll", "Record", "Recorder", "Report", "Reset", "Send", "check_all", "load"]
