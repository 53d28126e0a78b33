"""Sends due messages to the real-time brokers: none is lost, none is stored twice, and ordered
subjects keep their order.

DueDispatcher            (dispatcher.py)    takes due messages of all subjects, and has each batch
                                            planned in the log before it leaves
SubjectDispatcher        (dispatcher.py)    decides which destination gets the next batch of one
                                            subject, and keeps what cannot be sent
DueDestination           (dispatcher.py)    the window of a broker group or a partition, with its
                                            connection
DueBatcher               (due_window.py)    messages that wait to be planned; makes batches of them.
                                            Pure
DueWindow, DueBatch      (due_window.py)    the batches of one broker group or partition; decides
                                            what an answer means. Pure
"""

from __future__ import annotations

from qmq.delay.dispatcher.dispatcher import DueDispatcher

__all__ = ["DueDispatcher"]
