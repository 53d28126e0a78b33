"""Hands in the verdicts that earlier clients left in the spool (`ack_spool.py`), in the background
of a consumer:

    a file, locked ──reach its broker group's master──▶ ATTACH as that consumer, only to resume
        known still      SETTLE what is not void, DETACH: the rest goes back to the group; the file
                         is deleted
        not known        the lease was lost, the broker has put all messages back; the file is
                         deleted
        not reached      again after a pause; other files, and the consumer's own work, continue
                         meanwhile

A consumer that restarts under its name takes over the messages of its earlier incarnation. So the
verdicts of that incarnation are handed in before the consumer attaches to the same broker group
(`inherit`); verdicts of other names can wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import Final

from qmq.client.connection.connection import Connection, pause_s
from qmq.client.connection.pool import ConnectionPool, counted
from qmq.client.consuming.ack_spool import AckSpool, SpoolOwner, SpoolRemainder, still_valid
from qmq.client.consuming.acks import count, in_frames
from qmq.client.consuming.session import ANSWER_S, SubscriptionOptions
from qmq.errors import CallerError, ClientClosed, NotMaster, QmqError, UnknownConsumer
from qmq.process.event_loop import ms_of
from qmq.wire import frame_payloads as wire
from qmq.wire.frame import Frame, FrameKind

log = logging.getLogger("qmq.client")

WATCH_S: Final = 60.0
INHERIT_S: Final = 3.0
"""How long a consumer waits while another process hands in the verdicts of its
earlier incarnation.
"""


async def hand_in(connection: Connection, left: SpoolRemainder, links: ConnectionPool) -> int:
    """Send the verdicts of one file to the master of its broker group. Returns the number of
    messages, 0 if the lease was lost.

    Harmless to repeat. Raises the broker's error.
    """
    attach = left.owner.attach
    answer = await connection.call(FrameKind.ATTACH, attach.pack(), timeout_s=ANSWER_S)
    attached = wire.Attached.unpack(answer.payload)
    if not attached.resumed:
        return 0
    settlements = still_valid(left.kept, attached.next_pull_sequence, _now_ms(links))
    reporter = links.settle_reporter(attach.subject, attach.group, left.owner.broker_group)
    for part in in_frames(settlements):
        told = (
            reporter.watch(connection.address, counted(part), _ignored)
            if reporter is not None
            else _ignored
        )
        try:
            told(
                await connection.call(
                    FrameKind.SETTLE, wire.pack_settle(attached.session, part), timeout_s=ANSWER_S
                )
            )
        except QmqError as failure:
            told(failure)
            raise
    await connection.call(FrameKind.DETACH, wire.pack_detach(attached.session), timeout_s=ANSWER_S)
    return count(settlements)


async def inherit(
    connection: Connection,
    links: ConnectionPool,
    store: AckSpool,
    terms: SubscriptionOptions,
    broker_group: str,
) -> None:
    """Hand in what earlier incarnations of a consumer left for a broker group. Raises Unavailable:
    then attaching would fail, too.
    """

    def is_mine(owner: SpoolOwner) -> bool:
        return (owner.broker_group, owner.attach.consumer) == (broker_group, terms.name)

    loop = asyncio.get_running_loop()
    until_s = loop.time() + INHERIT_S
    while True:
        for left in store.left(terms.subject, terms.group, _now_ms(links)):
            try:
                if is_mine(left.owner):
                    await _try(connection, left, links)
            finally:
                left.put_back()
        others = [
            each
            for each in store.busy(terms.subject, terms.group)
            if each.attach.incarnation != terms.incarnation
        ]
        if loop.time() > until_s or not any(map(is_mine, others)):
            return
        await asyncio.sleep(links.timing.hand_in_retry_s[0])


async def _try(connection: Connection, left: SpoolRemainder, links: ConnectionPool) -> None:
    """Hand in a file and delete it. A file that this broker will never accept is deleted, too.
    Raises Unavailable.
    """
    try:
        handed = await hand_in(connection, left, links)
    except (CallerError, UnknownConsumer) as failure:
        if isinstance(failure, ClientClosed):
            raise
        log.warning(
            "verdicts of consumer %s are lost, its messages will be delivered again: %s",
            left.owner.attach.consumer,
            failure,
        )
    else:
        attach = left.owner.attach
        log.info(
            "verdicts of consumer %s on %s: %d handed in to %s",
            attach.consumer,
            attach.subject,
            handed,
            left.owner.broker_group,
        )
    left.delete()


def _now_ms(links: ConnectionPool) -> int:
    return ms_of(links.now_ns())


def _ignored(_: Frame | QmqError) -> None: ...


def _put_back(left: SpoolRemainder, _: object) -> None:
    left.put_back()


class SpoolSender:
    """Periodically looks for files of one consumer's subject and group."""

    def __init__(self, links: ConnectionPool, store: AckSpool, terms: SubscriptionOptions) -> None:
        self._links, self._store, self._terms = links, store, terms
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Harmless to repeat."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            for left in self._store.left(
                self._terms.subject, self._terms.group, _now_ms(self._links)
            ):
                if left.owner.attach.consumer == self._terms.name:
                    left.put_back()
                    continue
                task = asyncio.get_running_loop().create_task(self._carry(left))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(partial(_put_back, left))
            await asyncio.sleep(WATCH_S * random.uniform(0.7, 1.3))  # noqa: S311 - jitter, not a secret

    async def _carry(self, left: SpoolRemainder) -> None:
        """Retry until the file is handed in."""
        tries = 0
        while True:
            try:
                await self._carry_once(left)
                return
            except ClientClosed:
                return
            except QmqError as failure:
                log.debug("verdicts for %s wait: %s", left.owner.broker_group, failure)
            jitter = random.uniform(0.7, 1.3)  # noqa: S311 - no secret
            await asyncio.sleep(pause_s(self._links.timing.hand_in_retry_s, tries) * jitter)
            tries += 1

    async def _carry_once(self, left: SpoolRemainder) -> None:
        group = left.owner.broker_group
        master, connection = await self._links.reach(self._terms.subject, group)
        try:
            await _try(connection, left, self._links)
        except NotMaster:
            self._links.locator.doubt(group, master)
            raise

    async def close(self) -> None:
        """Stop. Files that are not handed in stay for the next consumer."""
        tasks = [*self._tasks, *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
