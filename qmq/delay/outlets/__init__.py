"""How due messages get to the real-time brokers: never lost, never twice, and in order where the subject is ordered.

DueDispatcher            (due_dispatcher.py)           takes due messages of all subjects
SubjectDispatcher        (subject_dispatcher.py)       one subject's: finds out how it is ordered; what cannot leave waits here
BalancedDispatcher       (balanced_dispatcher.py)      of an unordered subject: to any of its broker groups
PartitionedDispatcher    (partitioned_dispatcher.py)   of an ordered subject: by the route, each key in order
DueBatcher               (due_batcher.py)              what waits to be planned; makes batches of it. Pure
BatchPlanner             (batch_planner.py)            has each batch planned in the log before it leaves
Channel                  (channel.py)                  the window of one broker group or partition; decides what an answer means. Pure
Courier                  (courier.py)                  the connection of a channel
"""

from __future__ import annotations

from qmq.delay.outlets.due_dispatcher import DueDispatcher

__all__ = ["DueDispatcher"]
