"""Receipts of single messages, which are parts of their batches' receipts."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from qmq.client.producing.receipts import BatchReceipt, CutReceipt, DelayedBatchReceipt
from qmq.model import MessageId

BATCH = BatchReceipt("s", 2, 100, 3, 7, 1, 5_000, "g1")


def test_a_message_is_counted_from_the_first_of_its_batch() -> None:
    receipt = BATCH.receipt(2)
    assert (receipt.subject, receipt.partition, receipt.sequence, receipt.id) == (
        "s",
        2,
        102,
        MessageId(7, 1, 2),
    )
    assert (receipt.append_time_ms, receipt.broker_group, receipt.delayed_id) == (5_000, "g1", None)


def test_receipts_are_equal_if_their_values_are_though_their_batches_differ() -> None:
    part = CutReceipt.join(
        [((0, 2), BatchReceipt("s", 2, 100, 2, 7, 1, 5_000, "g1")), ((1,), BATCH)], 3
    )
    assert part.receipt(0) == BATCH.receipt(0)
    assert part.receipt(2) != BATCH.receipt(2)
    assert BATCH.receipt(0) != BATCH.receipt(1)
    assert len({part.receipt(0), *BATCH, *BATCH}) == 3


def test_a_delayed_receipt_has_its_due_time_and_differs_from_one_that_is_not_delayed() -> None:
    delayed = DelayedBatchReceipt("s", 2, 100, 3, 7, 1, 5_000, "g1", None, [1, 2, 3])
    assert [each.due_ms for each in map(delayed.receipt, range(3))] == [1, 2, 3]
    assert delayed.receipt(1).delayed_id == delayed.delayed_id(1)
    assert delayed.receipt(1) != BATCH.receipt(1)
    assert delayed.receipt(1) == delayed.receipt(1)


def test_a_receipt_cannot_be_changed_and_says_what_it_is_for() -> None:
    receipt = BATCH.receipt(1)
    with pytest.raises(FrozenInstanceError):
        receipt.index = 0  # type: ignore[misc]
    assert repr(receipt) == f"<Receipt {MessageId(7, 1, 1)} s/2/101 at g1>"
