"""Decides transactions: serves EndTransaction, and asks producers about transactions without a decision.

Every gateway with connected producers regularly looks for half messages that are old enough, and asks one producer of
the message's topic over its Telemetry stream; the producer answers with EndTransaction. If two gateways ask about the same transaction, its
producers decide it twice, and the second decision changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from qmq.client.client import Client
from qmq.client.delayed_message import DelayedMessage
from qmq.clock import Clock, time_of
from qmq.errors import InvalidArgument, MessageNotFound, QmqError, TooLate
from qmq.gateway.client_sessions import ClientSessions, TelemetryStream
from qmq.gateway.half_messages import CheckPlan, check_decision, outcome_before
from qmq.gateway.message_mapping import half_message_for_client
from qmq.gateway.rocketmq_names import subject_of_topic
from qmq.gateway.status_codes import OK, Refused, status_of_failure
from qmq.model import DelayedId
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls

log = logging.getLogger("qmq.gateway")

ASK_S: Final = 2.0
"""The stream of a producer that has not read a question by then is cut: others wait for their questions."""
ASKED_AT_ONCE: Final = 16
"""The whole messages that an identity's questions hold in memory at one time."""
CHECKS_AT_ONCE: Final = 10_000
"""One look considers at most this many half messages of a topic, the oldest first."""


class TopicTransactions:
    """Decides the transactions of one gateway."""

    def __init__(self, client: Client, sessions: ClientSessions, clock: Clock, plan: CheckPlan) -> None:
        self._client, self._sessions, self._clock, self._plan = client, sessions, clock, plan
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)

    # --- deciding ------------------------------------------------------------------------------------------------------

    async def end(self, request: calls.EndTransactionRequest) -> calls.EndTransactionResponse:
        """Commit or roll back a transaction. A repeated call changes nothing."""
        try:
            await self._decide(subject_of_topic(request.topic), request.transaction_id, request.resolution)
        except Exception as failure:
            return calls.EndTransactionResponse(status=status_of_failure(failure))
        return calls.EndTransactionResponse(status=OK)

    async def _decide(self, subject: str, transaction_id: str, wanted: api.TransactionResolution.ValueType) -> None:
        if not await self._is_open(subject, transaction_id, wanted):
            return
        try:
            await (self._commit(transaction_id) if wanted == api.COMMIT else self._client.delayed.cancel(transaction_id))
        except TooLate as failure:
            # Another call decided in between, or the transaction timed out: the log says which.
            if await self._is_open(subject, transaction_id, wanted):
                raise Refused(
                    api.INVALID_TRANSACTION_ID, f"transaction {transaction_id} is being rolled back: no decision came in time"
                ) from failure

    async def _commit(self, transaction_id: str) -> None:
        """The half message's own time is in the past by the delay group's clock; this machine's clock may be wrong."""
        await self._client.delayed.move(transaction_id, time_of(DelayedId.parse(transaction_id).append_ms))

    async def _is_open(self, subject: str, transaction_id: str, wanted: api.TransactionResolution.ValueType) -> bool:
        """True if the transaction has no decision yet. Raises Refused if the opposite was decided, or if there is no such transaction."""
        try:
            found = await self._client.delayed.show(transaction_id)
        except (InvalidArgument, MessageNotFound) as failure:
            raise Refused(api.INVALID_TRANSACTION_ID, failure.message) from failure
        if found.subject != subject:
            raise Refused(api.INVALID_TRANSACTION_ID, f"topic {subject!r} has no transaction {transaction_id!r}")
        return check_decision(wanted, outcome_before(found), transaction_id)

    # --- asking --------------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Ask about transactions that are due, and roll back those with too many checks. Failures are logged, and the next look tries
        again.
        """
        halves: set[str] = set()
        is_complete = True
        async with asyncio.TaskGroup() as checks:
            for subject in sorted(self._sessions.published):
                try:
                    async for each in self._client.delayed.list(subject, limit=CHECKS_AT_ONCE, is_half=True, silent={}):
                        halves.add(each.id)
                        await self._places.acquire()
                        checks.create_task(self._checked(each))
                except QmqError as failure:
                    is_complete = False
                    log.warning("transactions of topic %s without a decision could not be searched: %s", subject, failure)
                except Exception:
                    is_complete = False
                    log.exception("transactions of topic %s without a decision could not be searched", subject)
        if is_complete:
            self._plan.keep_only(halves)

    async def _checked(self, half: DelayedMessage) -> None:
        try:
            await self._check(half)
        except Exception:
            log.exception("transaction %s cannot be checked, and the next one is", half.id)
            self._plan.failed(half, self._clock.monotonic_ms())
        finally:
            self._places.release()

    async def _check(self, half: DelayedMessage) -> None:
        now_ms = self._clock.monotonic_ms()
        if not self._plan.is_time(half, self._clock.time_ms(), now_ms):
            return
        if self._plan.is_over(half):
            await self._give_up(half)
        elif await self._ask(half):
            self._plan.asked(half, now_ms)

    async def _ask(self, half: DelayedMessage) -> bool:
        """Ask a producer about the transaction. Returns False if no producer could be asked: that is no check."""
        if not self._sessions.producers_of(half.subject):
            return False
        try:
            whole = await self._client.delayed.show(half.id)
        except QmqError as failure:
            log.info("half message %s could not be read, it is asked about later: %s", half.id, failure)
            return False
        command = calls.RecoverOrphanedTransactionCommand(message=half_message_for_client(whole), transaction_id=half.id)
        streams = self._sessions.producers_of(half.subject)
        return bool(streams) and await self._sent(random.choice(streams), command, half)  # noqa: S311 - any will do

    async def _sent(self, stream: TelemetryStream, command: calls.RecoverOrphanedTransactionCommand, half: DelayedMessage) -> bool:
        """False if gRPC did not take the command. What it took in part keeps the stream busy, so the stream is cut."""
        try:
            async with asyncio.timeout(ASK_S):
                await stream.send(calls.TelemetryCommand(recover_orphaned_transaction_command=command))
        except Exception as failure:  # gRPC's own errors have no common class
            log.info("a producer of %s left, or did not read, before it could be asked: %r", half.subject, failure)
            stream.cut()
            return False
        return True

    async def _give_up(self, half: DelayedMessage) -> None:
        log.warning("transaction %s of topic %s is rolled back: no producer decided it in time", half.id, half.subject)
        try:
            await self._client.delayed.cancel(half.id)
        except QmqError as failure:
            log.warning("transaction %s could not be rolled back: %s", half.id, failure)
