"""A log's history after retention deleted entries, as a reopened store gives it to its replica."""

from __future__ import annotations

from itertools import zip_longest

from qmq_replication.history import History


def kept_from(history: History, index: int) -> History:
    """The history of the same log, which begins with the entry at `index` now."""
    if index - 1 <= history.start_index:
        return history
    epoch = history.epoch_at(index - 1)
    assert epoch is not None
    runs = [
        run
        for run, following in zip_longest(history.runs, history.runs[1:])
        if following is None or following.first > index
    ]
    return History(runs, history.last_index, index - 1, epoch)
