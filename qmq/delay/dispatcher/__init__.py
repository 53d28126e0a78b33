"""Sends due messages to the real-time brokers: none is lost, none is stored twice, and ordered subjects keep their order.

DueDispatcher            (dispatcher.py)    takes due messages of all subjects
BatchPlanner             (dispatcher.py)    has each batch planned in the log before it leaves
SubjectDispatcher        (subject.py)       takes the messages of one subject, and finds out how it is ordered
SubjectOutcomes          (subject.py)       records the outcomes of its batches; keeps messages that cannot be sent
BalancedDispatcher       (subject.py)       of an unordered subject: to any of its broker groups
PartitionedDispatcher    (subject.py)       of an ordered subject: by the route, each key in order
DueConnection            (subject.py)       the connection of a window
DueBatcher               (due_batcher.py)   messages that wait to be planned; makes batches of them. Pure
DueWindow, DueBatch      (due_window.py)    the batches of one broker group or partition; decides what an answer means. Pure
"""

from __future__ import annotations

from qmq.delay.dispatcher.dispatcher import DueDispatcher

__all__ = ["DueDispatcher"]
