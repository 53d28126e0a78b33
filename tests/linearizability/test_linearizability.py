"""Porcupine judges what clients of the coordination store saw while answers, requests and servers
were lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
from linearizability.register_history import JUDGE, Call, histories_of, judged
from qmq_coordination.coordination_store import Compare, KeyValue, Operation, TxnResult
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.etcd.store import EtcdStore
from support import forms
from support.etcd_process import EtcdProcess
from support.stores import Fault, FaultyStore, Proxy, proxied, unique_namespace

from qmq.errors import CoordinationUnknown

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(
        not JUDGE.is_file(), reason="needs porcupine: put Go on the PATH and run scripts/judges"
    ),
]

CLIENTS = 4
REGISTERS = 5_000 if forms.FORM == "all" else 200
REGISTERS_OF_ETCD = 100 if forms.FORM == "all" else 12  # a lost answer costs each client 0.6 s
SEEDS = forms.seeds(gate=1, every=1, changing=1)
TRIES = 5


def linearizable(history: Sequence[Call], folder: Path) -> None:
    code, printed = judged(history, folder)
    assert code == 0, f"{printed}; pictures are in {folder}"


def faults_of(random: Random) -> dict[int, Fault]:
    """A fault for every fifth transaction, more or less."""
    return {
        number: random.choice(list(Fault))
        for number in range(1, REGISTERS * 10)
        if random.random() < 0.2
    }


def faulty(kind: type[FaultyStore], inner: EmbeddedStore, random: Random) -> FaultyStore:
    """A client's way to the store. It lets the other clients act before and after each
    transaction.
    """
    return kind(
        inner, faults_of(random), before=lambda: asyncio.sleep(0), after=lambda: asyncio.sleep(0)
    )


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_embedded_store_is_linearizable_where_answers_are_lost(
    seed: int, tmp_path: Path
) -> None:
    random = Random(seed)
    inner = EmbeddedStore()
    stores = [faulty(FaultyStore, inner, random) for _ in range(CLIENTS)]

    async def arrive() -> None:
        for each in stores:
            if random.random() < 0.5:
                await each.deliver_delayed()
                each.delayed.clear()

    linearizable(await histories_of(stores, REGISTERS, random, arrive), tmp_path)
    await inner.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
async def test_etcd_is_linearizable_where_links_break_and_it_is_killed(
    seed: int, own_etcd: EtcdProcess, tmp_path: Path
) -> None:
    random, namespace = Random(seed), unique_namespace()
    async with AsyncExitStack() as links:
        proxies = [
            await links.enter_async_context(proxied(own_etcd.client_port)) for _ in range(CLIENTS)
        ]
        stores = [
            EtcdStore([each.endpoint], namespace=namespace, call_s=0.3, total_s=0.6)
            for each in proxies
        ]

        async def disturb() -> None:
            await disturb_one(random.choice(proxies), random)
            if random.random() < 0.1:
                own_etcd.kill()
                own_etcd.spawn()
                await asyncio.to_thread(own_etcd.wait_healthy)

        history = await histories_of(stores, REGISTERS_OF_ETCD, random, disturb)
        for each in stores:
            await each.close()
    assert any(each.unknown for each in history)
    linearizable(history, tmp_path)


async def disturb_one(proxy: Proxy, random: Random) -> None:
    """Lose a client's requests or answers from now on, break its connections, or end its faults."""
    fault = random.choice(["none", "cut", "requests", "answers"])
    await proxy.heal() if fault in ("none", "cut") else None
    proxy.loses_requests, proxy.loses_answers = fault == "requests", fault == "answers"


def pictures_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.html"))


class StaleReads(FaultyStore):
    """A store that answers some reads with what it read before."""

    _before: KeyValue | None = None

    async def get(self, key: str) -> KeyValue | None:
        found = (
            self._before
            if self._before is not None and self._before.key == key
            else await self.inner.get(key)
        )
        self._before = found
        await asyncio.sleep(0)
        return found  # type: ignore[no-any-return]


class ForgottenCompares(FaultyStore):
    """A store that does not compare."""

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        await asyncio.sleep(0)
        return await self.inner.txn([], success, failure)  # type: ignore[no-any-return]


class RepeatedTransactions(FaultyStore):
    """A store that repeats a transaction whose answer is lost, and says that it was not done if it
    is not done now.
    """

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        try:
            return await super().txn(compares, success, failure)
        except CoordinationUnknown:
            return await super().txn(compares, success, failure)


@pytest.mark.parametrize("broken", [StaleReads, ForgottenCompares, RepeatedTransactions])
async def test_a_store_with_a_planted_mistake_is_found(
    broken: type[FaultyStore], tmp_path: Path
) -> None:
    """By one of a few seeds: which calls overlap is up to the event loop, too."""
    for seed in range(TRIES):
        random, folder = Random(seed), tmp_path / str(seed)
        folder.mkdir()
        inner = EmbeddedStore()
        stores = [faulty(broken, inner, random) for _ in range(CLIENTS)]
        code, printed = judged(await histories_of(stores, 50, random), folder)
        await inner.close()
        if code:
            assert code == 1, printed
            assert pictures_in(folder)
            return
    pytest.fail(f"{TRIES} seeds did not find it")
