"""Deletes subjects and dead-letter queues (docs/DELETION.md).

    mark      the subject's record is marked: from now on listings leave the subject out, and
              brokers refuse its messages
    drop      each broker group's master drops its queues; answered when that is committed and the
              broker has seen the mark
    forget    one transaction deletes the record and all other keys of the subject

Each step may be repeated by any metaserver. The leader continues deletions that a crash or a lost
broker group interrupted. It also deletes the addresses of replicas that are no members of their
group and whose process is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from qmq_coordination.broker_groups import presence_key, replica_key
from qmq_coordination.coordination_store import (
    CoordinationStore,
    Delete,
    KeyValue,
    absent,
    unchanged,
)
from qmq_coordination.ordered_records import ASSIGNMENTS, FENCES, MEMBERS, ROUTES
from qmq_coordination.subjects import (
    PAUSES,
    SETTINGS,
    PauseKind,
    SubjectCatalog,
    decode_subject,
    schemas_prefix,
    subject_key,
)
from qmq_coordination.view import ClusterView

from qmq.errors import CoordinationUnknown, InvalidArgument, Overloaded, QmqError, UnknownSubject
from qmq.meta.calls import TIMING, Brokers, MetaTiming
from qmq.meta.catalog import ClusterCatalog
from qmq.model import SubjectConfig, check_name, dead_letter_subject, is_dead_letters
from qmq.proto.v1 import control_pb2 as control

log = logging.getLogger("qmq.meta")

HEARD_S: Final = 0.05
HEARD_TRIES: Final = 40
"""Brokers see the mark by their watch, usually within milliseconds."""


class Deletion:
    def __init__(
        self,
        store: CoordinationStore,
        view: ClusterView,
        cluster: ClusterCatalog,
        brokers: Brokers,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        timing: MetaTiming = TIMING,
    ) -> None:
        self._store = store
        self._view = view
        self._cluster = cluster
        self._brokers = brokers
        self._catalog = SubjectCatalog(store)
        self._sleep = sleep
        self._timing = timing

    async def delete_subject(self, name: str) -> int:
        """Delete a subject, or continue its deletion. Returns the number of queues from which data
        was deleted.

        Raises UnknownSubject, InvalidArgument; NotConnected and Overloaded: the subject is marked,
        and its deletion continues later.
        """
        if is_dead_letters(check_name("subject", name)):
            raise InvalidArgument(
                f"{name!r} is a dead-letter queue: `qmq dlq delete "
                f"{name.removeprefix(dead_letter_subject(''))}`"
            )
        return await self._carry_on(await self._catalog.begin_deleting(name))

    async def purge_subject(self, name: str) -> tuple[int, int]:
        """Delete all current messages of a subject. Returns the number of queues and of messages. A
        repeated call deletes what was stored since. Raises UnknownSubject, InvalidArgument;
        NotConnected names the broker groups that must be asked again.
        """
        if is_dead_letters(check_name("subject", name)):
            raise InvalidArgument(
                f"{name!r} is a dead-letter queue: `qmq dlq purge "
                f"{name.removeprefix(dead_letter_subject(''))}`"
            )
        await self._view.refresh()
        record = await self._store.get(subject_key(name))
        if record is None or name in self._view.deleting():
            raise UnknownSubject(f"there is no subject {name!r}: see `qmq subject list`")
        hosts = self._hosts(decode_subject(record))
        answers = await self._ask(
            "PurgeSubject", name, hosts, "is not completely purged; purge it again"
        )
        log.info("subject %s is purged", name)
        return sum(each.queues for each in answers), sum(each.messages for each in answers)

    async def delete_dead_letters(self, subject: str) -> int:
        """Drop a dead-letter queue on all broker groups. Returns the number of groups that had
        content. Later dead letters are kept. Raises NotConnected.
        """
        if not is_dead_letters(check_name("subject", subject)):
            raise InvalidArgument(
                f"{subject!r} is no dead-letter queue: `qmq subject delete {subject}`"
            )
        return await self._drop(subject, tuple(self._cluster.group_names()), "delete again")

    async def run(self, is_leader: Callable[[], bool]) -> None:
        """Continue interrupted deletions while this metaserver is the leader. Never returns."""
        while True:
            await self._sleep(self._timing.sweep_s)
            if is_leader():
                await self._forget_replicas()
            for name in self._view.deleting() if is_leader() else ():
                try:
                    found = await self._store.get(subject_key(name))
                    if found is not None and name in self._view.deleting():
                        await self._carry_on(found)
                except QmqError as failure:
                    log.warning(
                        "deleting subject %s failed, it will be tried again: %s", name, failure
                    )
                except Exception:
                    log.exception("deleting subject %s failed, it will be tried again", name)

    async def _forget_replicas(self) -> None:
        for group in self._view.groups():
            members = group.items.get("members")
            if members is None:
                continue
            stays = {*group.voters, *group.learners, *self._view.present(group.name)}
            for replica in sorted(self._view.replicas(group.name).keys() - stays):
                try:
                    found = await self._store.get(replica_key(group.name, replica))
                    if found is not None:
                        compares = [
                            unchanged(members),
                            unchanged(found),
                            absent(presence_key(group.name, replica)),
                        ]
                        await self._store.txn(compares, [Delete(found.key)])
                except QmqError as failure:
                    log.warning(
                        "deleting the address of replica %s failed, it will be tried again: %s",
                        replica,
                        failure,
                    )

    async def _carry_on(self, record: KeyValue) -> int:
        """Drop the queues of a subject whose record is marked, and delete the record."""
        config = decode_subject(record)
        await self._view.refresh()  # all of its routes, and all broker groups
        then = "it is in no listing, and the rest is done when these broker groups are back"
        queues = await self._drop(config.name, self._hosts(config), then)
        await self._forget(config.name, record)
        log.info("subject %s is deleted", config.name)
        return queues

    def _hosts(self, config: SubjectConfig) -> tuple[str, ...]:
        """The broker groups that may hold messages of a subject."""
        known = set(self._cluster.group_names())
        return tuple(
            sorted(
                (set(self._cluster.hosts(config)) | {*config.groups, *config.former_groups}) & known
            )
        )

    async def _drop(self, subject: str, hosts: tuple[str, ...], then: str) -> int:
        answers = await self._ask(
            "DropSubject", subject, hosts, f"is not completely deleted yet; {then}"
        )
        return sum(answer.queues for answer in answers)

    async def _ask(
        self, call: str, subject: str, hosts: tuple[str, ...], unfinished: str
    ) -> list[control.DropSubjectResponse]:
        """Ask the masters of all hosts. Raises NotConnected, Overloaded."""
        request = control.DropSubjectRequest(subject=subject)
        for tries_left in reversed(range(HEARD_TRIES)):
            try:
                answers = await self._brokers.ask_masters(hosts, call, request, is_change=True)
                answers.require_all(f"{subject!r} {unfinished}")
                return list(answers.complete())
            except Overloaded:
                if not tries_left:
                    raise
            await self._sleep(HEARD_S)
        raise AssertionError

    async def _forget(self, name: str, record: KeyValue) -> None:
        """Delete all keys in one transaction.
        If the record has changed, another metaserver was faster.
        """
        prefixes = [f"{each}{name}/" for each in (ROUTES, MEMBERS, ASSIGNMENTS, SETTINGS)]
        prefixes += [
            f"{PAUSES}{kind.value}/{name}/" for kind in (PauseKind.GROUP, PauseKind.CONSUMER)
        ]
        prefixes += [f"{FENCES}{group}/{name}/" for group in self._cluster.group_names()]
        prefixes.append(schemas_prefix(name))
        gone = [Delete(each, is_prefix=True) for each in prefixes]
        try:
            await self._store.txn([unchanged(record)], [*gone, Delete(record.key)])
        except CoordinationUnknown:
            if await self._store.get(record.key) is not None:
                raise
