"""Conclusions about a transaction whose answer was lost. On the embedded store; real losses are in
test_etcd_faults.
"""

from __future__ import annotations

import pytest
from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    CoordinationStore,
    Delete,
    Put,
    TxnDecision,
    TxnFate,
    absent,
    txn_decided,
    unchanged,
)
from qmq_coordination.embedded import EmbeddedStore
from support.stores import Fault, FaultyStore

from qmq.errors import CoordinationUnknown, InvalidArgument


def lossy(store: CoordinationStore, *, is_done: bool, others: list[Put | Delete]) -> FaultyStore:
    """The store, with a transaction that is done (or not) and then reported as unknown, after
    others did something.
    """

    async def meddle() -> None:
        for operation in others:
            await store.txn([], [operation])

    return FaultyStore(store, {1: Fault.UNANSWERED if is_done else Fault.LOST}, after=meddle)


@pytest.mark.parametrize(
    ("guard", "is_done", "others", "fate"),
    [
        ("unchanged", True, [], TxnFate.DONE),
        ("unchanged", True, [Put("k", b"theirs")], TxnFate.DONE),
        ("unchanged", True, [Delete("k"), Put("k", b"theirs"), Put("k", b"more")], TxnFate.DONE),
        ("unchanged", True, [Delete("k")], None),
        ("unchanged", False, [], TxnFate.NOT_YET),
        ("unchanged", False, [Put("k/below", b"")], TxnFate.NOT_YET),
        ("unchanged", False, [Put("k", b"theirs")], TxnFate.NOT_DONE),
        ("unchanged", False, [Put("k", b"theirs"), Put("k", b"old")], TxnFate.NOT_DONE),
        ("unchanged", False, [Delete("k")], None),
        ("version", False, [Put("k", b"theirs")], TxnFate.NOT_YET),
        ("version", True, [Put("k", b"theirs")], TxnFate.DONE),
        ("created", False, [Put("k", b"theirs")], TxnFate.NOT_YET),
        ("created", False, [Delete("k"), Put("k", b"theirs")], TxnFate.NOT_DONE),
        ("future", False, [Put("k", b"theirs")], TxnFate.NOT_YET),
        ("absent", False, [Put("other", b"theirs")], TxnFate.NOT_YET),
    ],
)
async def test_what_can_be_concluded_from_reading_back(
    guard: str, is_done: bool, others: list[Put | Delete], fate: TxnFate | None
) -> None:
    store = EmbeddedStore()
    await store.put("k", b"old")
    item = await store.get("k")
    assert item is not None
    guards = {
        "unchanged": unchanged(item),
        "version": Compare("k", CompareTarget.VERSION, "=", 1),
        "created": Compare("k", CompareTarget.CREATE, "=", item.create_revision),
        "future": Compare("k", CompareTarget.MOD, "=", item.mod_revision + 100),
        "absent": absent("other"),
    }
    proof = Put("k", b"mine")
    way = lossy(store, is_done=is_done, others=others)
    if fate is None:
        with pytest.raises(CoordinationUnknown, match="does not exist now"):
            await txn_decided(way, [guards[guard]], [proof], proof=proof)
    else:
        assert (await txn_decided(way, [guards[guard]], [proof], proof=proof)).fate is fate
    await store.close()


async def test_a_compacted_history_is_not_guessed() -> None:
    store = EmbeddedStore()
    await store.put("k", b"old")
    item = await store.get("k")
    assert item is not None
    proof = Put("k", b"mine")

    async def meddle_and_compact() -> None:
        await store.put("k", b"theirs")
        await store.compact((await store.list("")).revision)

    way = FaultyStore(store, {1: Fault.UNANSWERED}, after=meddle_and_compact)
    with pytest.raises(CoordinationUnknown, match="compacted"):
        await txn_decided(way, [unchanged(item)], [proof], proof=proof)
    await store.close()


async def test_an_answered_transaction_needs_no_reading_back() -> None:
    store = EmbeddedStore()
    proof = Put("k", b"mine")
    assert await txn_decided(store, [absent("k")], [proof], proof=proof) == TxnDecision(
        TxnFate.DONE, 2
    )
    assert await txn_decided(store, [absent("k")], [proof], proof=proof) == TxnDecision(
        TxnFate.NOT_DONE, 2
    )
    with pytest.raises(InvalidArgument):
        await txn_decided(store, [], [Delete("k")], proof=proof)
    await store.close()


async def test_a_read_back_without_an_answer_ends_as_unknown() -> None:
    store = EmbeddedStore()

    async def leave() -> None:
        way.cut("list")

    way = FaultyStore(store, {1: Fault.LOST}, after=leave)
    proof = Put("k", b"mine")
    with pytest.raises(CoordinationUnknown, match="could not be read back"):
        await txn_decided(way, [], [proof], proof=proof, within_s=0.2)
    await store.close()
