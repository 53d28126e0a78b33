"""Sends messages for clients: SendMessage and RecallMessage; and decides transactions:
EndTransaction.

Messages of one request are sent concurrently, and messages of many requests share a batch, as with
any producer. FIFO messages of a group are ordered by their arrival at the gateway: a client sends
the next one when it has the answer to the one before.

The message of a transaction is sent as a half message.

A recall handle is the message's id at its client and its delayed id in QMQ, base64: enough for any
gateway.

Every gateway with connected producers regularly looks for half messages that are old enough, and
asks one producer of the message's topic over its Telemetry stream; the producer answers with
EndTransaction. If two gateways ask about the same transaction, its producers decide it twice, and
the second decision changes nothing.

A *half message* is how a transaction's message waits for its commit: a delayed message of its topic
that waits for a decision (docs/DELAY.md), due when its transaction is too old. Its transaction id
is its delayed id. A commit moves it to now, a rollback cancels it. The delay group's log decides
once which of the two happens, and a committed message is delivered exactly once, even if processes
die. Without a decision it is cancelled when it is due.

    half ──COMMIT: move to now────────────▶ delivered
      ├────ROLLBACK: cancel───────────────▶ gone
      ├────the last question unanswered───▶ gone
      └────due────────────────────────────▶ gone
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import random
from dataclasses import dataclass
from typing import Final

from qmq.client.client import Client
from qmq.client.producing.delayed import DelayedMessage, DelayedProducer, time_ms
from qmq.client.producing.receipts import Receipt
from qmq.errors import (
    CallerError,
    InvalidArgument,
    MessageNotFound,
    OrderMismatch,
    QmqError,
    TooLate,
    UnknownSubject,
)
from qmq.gateway.clients import ClientSessions, TelemetryStream
from qmq.gateway.messages import (
    CHECK_AFTER_MS,
    TYPE,
    TopicMessage,
    half_message_for_client,
    message_from_client,
    subject_of_topic,
)
from qmq.gateway.status import OK, Refused, joined_status, status_of_failure
from qmq.gateway.topics import Topic, TopicCatalog, serve_entries
from qmq.limits import BODY_BYTES_MAX
from qmq.model import DelayedId
from qmq.process.event_loop import Clock, time_of
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.text import whole_number

FIRST_CHECK_MS: Final = 6_000
"""The gateway asks about a transaction for the first time at this age, unless its message says
another; RocketMQ's default.
"""
CHECK_PAUSES_MS: Final = (10_000, 20_000, 30_000, 60_000)
"""The pauses between the checks of a transaction; the last pause holds for all further checks."""
CHECKS_MAX: Final = 15
"""The gateway rolls a transaction back after this many checks; RocketMQ's default."""
LIMIT_MS: Final = 12 * 3600 * 1000
"""The gateway rolls a transaction back at this age, even if no producer could be asked."""


@dataclass(frozen=True, slots=True)
class TransactionTiming:
    """When the gateway asks about transactions, in milliseconds of their age, and how often it
    looks for them.
    """

    first_check_ms: int = FIRST_CHECK_MS
    pauses_ms: tuple[int, ...] = CHECK_PAUSES_MS
    checks_max: int = CHECKS_MAX
    look_ms: int = 3_000


TIMING: Final = TransactionTiming()


def outcome_before(found: DelayedMessage) -> api.TransactionResolution.ValueType:
    """The decision that was already made on a transaction; unspecified if none was. Raises Refused
    if the message belongs to no transaction.
    """
    if found.headers.get(TYPE) != b"TRANSACTION":
        raise Refused(
            api.INVALID_TRANSACTION_ID, f"{found.id} is a delayed message, not a transaction"
        )
    if found.state == "half":
        return api.TRANSACTION_RESOLUTION_UNSPECIFIED
    return api.ROLLBACK if found.state == "cancelled" else api.COMMIT


def check_decision(
    wanted: api.TransactionResolution.ValueType,
    before: api.TransactionResolution.ValueType,
    transaction_id: str,
) -> bool:
    """True if the decision still has to be carried out. Raises Refused if the opposite was decided,
    or if no decision is given.
    """
    if wanted not in (api.COMMIT, api.ROLLBACK):
        raise Refused(api.BAD_REQUEST, "a transaction ends with COMMIT or ROLLBACK")
    if before in (api.COMMIT, api.ROLLBACK) and before != wanted:
        done = "committed" if before == api.COMMIT else "rolled back"
        raise Refused(api.INVALID_TRANSACTION_ID, f"transaction {transaction_id} was {done} before")
    return before != wanted


def check_recovery(check_after_ms: int) -> None:
    """Raises Refused if a message wants its first check at an age that its
    transaction never has.
    """
    if not 0 <= check_after_ms < LIMIT_MS:
        raise Refused(
            api.BAD_REQUEST,
            f"an orphaned_transaction_recovery_duration is less than {LIMIT_MS / 1000:g} s, "
            f"after which a transaction is rolled back; not {check_after_ms / 1000:g} s",
        )


def first_check_ms(half: DelayedMessage, default_ms: int) -> int:
    """The age at which to ask about the transaction for the first time: what its message says, if
    that is more than 0.
    """
    return whole_number(half.headers.get(CHECK_AFTER_MS, b"")) or default_ms


class CheckPlan:
    """Chooses the half messages to ask about now. The pauses between checks are monotonic time, so
    no step of the machine's clock ends the checks, or makes them follow each other at once.
    """

    def __init__(self, timing: TransactionTiming = TIMING) -> None:
        self.timing = timing
        self._checks: dict[str, tuple[int, int]] = {}
        """By transaction: the number of checks so far, and the time of the next check."""
        self._seen_ms: dict[str, int] = {}
        """When this gateway saw each transaction first."""

    def is_time(self, half: DelayedMessage, wall_ms: int, now_ms: int) -> bool:
        """True if the transaction is old enough, by the wall clock or since this gateway saw it,
        and its next check is due.
        """
        age_ms = max(
            wall_ms - time_ms(half.create_time), now_ms - self._seen_ms.setdefault(half.id, now_ms)
        )
        return (
            age_ms >= first_check_ms(half, self.timing.first_check_ms)
            and self._checks.get(half.id, (0, now_ms))[1] <= now_ms
        )

    def is_over(self, half: DelayedMessage) -> bool:
        """True if the transaction has had its last check."""
        return self._checks.get(half.id, (0, 0))[0] >= self.timing.checks_max

    def note_check(self, half: DelayedMessage, now_ms: int) -> None:
        """Record a check of the transaction."""
        self._pause(half, now_ms, 1)

    def note_failure(self, half: DelayedMessage, now_ms: int) -> None:
        """Record that the transaction could not be checked: that is no check, and the next try
        comes after the same pause.
        """
        self._pause(half, now_ms, 0)

    def _pause(self, half: DelayedMessage, now_ms: int, checks: int) -> None:
        count = self._checks.get(half.id, (0, 0))[0]
        pauses = self.timing.pauses_ms
        self._checks[half.id] = count + checks, now_ms + pauses[min(count, len(pauses) - 1)]

    def keep_only(self, ids: set[str]) -> None:
        """Forget all transactions except these: the others are decided."""
        for each in [each for each in self._seen_ms if each not in ids]:
            del self._seen_ms[each]
            self._checks.pop(each, None)


log = logging.getLogger("qmq.gateway")

ASK_S: Final = 2.0
"""The stream of a producer that has not read a question by then is cut:
others wait for their questions.
"""
ASKED_AT_ONCE: Final = 16
"""The whole messages that an identity's questions hold in memory at one time."""
CHECKS_AT_ONCE: Final = 10_000
"""One look considers at most this many half messages of a topic, the oldest first."""


class TopicTransactions:
    """Decides the transactions of one gateway."""

    def __init__(
        self, client: Client, sessions: ClientSessions, clock: Clock, plan: CheckPlan
    ) -> None:
        self._client, self._sessions, self._clock, self._plan = client, sessions, clock, plan
        self._places = asyncio.Semaphore(ASKED_AT_ONCE)

    # --- deciding ---------------------------------------------------------------------------------

    async def end(self, request: calls.EndTransactionRequest) -> calls.EndTransactionResponse:
        """Commit or roll back a transaction. A repeated call changes nothing."""
        try:
            await self._decide(
                subject_of_topic(request.topic), request.transaction_id, request.resolution
            )
        except Exception as failure:
            return calls.EndTransactionResponse(status=status_of_failure(failure))
        return calls.EndTransactionResponse(status=OK)

    async def _decide(
        self, subject: str, transaction_id: str, wanted: api.TransactionResolution.ValueType
    ) -> None:
        if not await self._is_open(subject, transaction_id, wanted):
            return
        try:
            await (
                self._commit(transaction_id)
                if wanted == api.COMMIT
                else self._client.delayed.cancel(transaction_id)
            )
        except TooLate as failure:
            # Another call decided in between, or the transaction timed out: the log says which.
            if await self._is_open(subject, transaction_id, wanted):
                raise Refused(
                    api.INVALID_TRANSACTION_ID,
                    f"transaction {transaction_id} is being rolled back: no decision came in time",
                ) from failure

    async def _commit(self, transaction_id: str) -> None:
        """The half message's own time is in the past by the delay group's clock; this machine's
        clock may be wrong.
        """
        await self._client.delayed.move(
            transaction_id, time_of(DelayedId.parse(transaction_id).append_ms)
        )

    async def _is_open(
        self, subject: str, transaction_id: str, wanted: api.TransactionResolution.ValueType
    ) -> bool:
        """True if the transaction has no decision yet. Raises Refused if the opposite was decided,
        or if there is no such transaction.
        """
        try:
            found = await self._client.delayed.show(transaction_id)
        except (InvalidArgument, MessageNotFound) as failure:
            raise Refused(api.INVALID_TRANSACTION_ID, failure.message) from failure
        if found.subject != subject:
            raise Refused(
                api.INVALID_TRANSACTION_ID,
                f"topic {subject!r} has no transaction {transaction_id!r}",
            )
        return check_decision(wanted, outcome_before(found), transaction_id)

    # --- asking -----------------------------------------------------------------------------------

    async def check_due(self) -> None:
        """Ask about transactions that are due, and roll back those with too many checks. Failures
        are logged, and the next look tries again.
        """
        halves: set[str] = set()
        is_complete = True
        async with asyncio.TaskGroup() as checks:
            for subject in sorted(self._sessions.published):
                try:
                    async for each in self._client.delayed.list(
                        subject, limit=CHECKS_AT_ONCE, is_half=True, silent={}
                    ):
                        halves.add(each.id)
                        await self._places.acquire()
                        checks.create_task(self._checked(each))
                except QmqError as failure:
                    is_complete = False
                    log.warning(
                        "transactions of topic %s without a decision could not be searched: %s",
                        subject,
                        failure,
                    )
                except Exception:
                    is_complete = False
                    log.exception(
                        "transactions of topic %s without a decision could not be searched", subject
                    )
        if is_complete:
            self._plan.keep_only(halves)

    async def _checked(self, half: DelayedMessage) -> None:
        try:
            await self._check(half)
        except Exception:
            log.exception("transaction %s cannot be checked, and the next one is", half.id)
            self._plan.note_failure(half, self._clock.monotonic_ms())
        finally:
            self._places.release()

    async def _check(self, half: DelayedMessage) -> None:
        now_ms = self._clock.monotonic_ms()
        if not self._plan.is_time(half, self._clock.time_ms(), now_ms):
            return
        if self._plan.is_over(half):
            await self._give_up(half)
        elif await self._ask(half):
            self._plan.note_check(half, now_ms)

    async def _ask(self, half: DelayedMessage) -> bool:
        """Ask a producer about the transaction. Returns False if no producer could be asked: that
        is no check.
        """
        if not self._sessions.producers_of(half.subject):
            return False
        try:
            whole = await self._client.delayed.show(half.id)
        except QmqError as failure:
            log.info(
                "half message %s could not be read, it is asked about later: %s", half.id, failure
            )
            return False
        command = calls.RecoverOrphanedTransactionCommand(
            message=half_message_for_client(whole), transaction_id=half.id
        )
        streams = self._sessions.producers_of(half.subject)
        return bool(streams) and await self._sent(random.choice(streams), command, half)  # noqa: S311 - any will do

    async def _sent(
        self,
        stream: TelemetryStream,
        command: calls.RecoverOrphanedTransactionCommand,
        half: DelayedMessage,
    ) -> bool:
        """False if gRPC did not take the command. What it took in part keeps the stream busy, so
        the stream is cut.
        """
        try:
            async with asyncio.timeout(ASK_S):
                await stream.send(
                    calls.TelemetryCommand(recover_orphaned_transaction_command=command)
                )
        except Exception as failure:  # gRPC's own errors have no common class
            log.info(
                "a producer of %s left, or did not read, before it could be asked: %r",
                half.subject,
                failure,
            )
            stream.cut()
            return False
        return True

    async def _give_up(self, half: DelayedMessage) -> None:
        log.warning(
            "transaction %s of topic %s is rolled back: no producer decided it in time",
            half.id,
            half.subject,
        )
        try:
            await self._client.delayed.cancel(half.id)
        except QmqError as failure:
            log.warning("transaction %s could not be rolled back: %s", half.id, failure)


class TopicSending:
    """Serves sending and recalling, with one client for all callers."""

    def __init__(self, client: Client, catalog: TopicCatalog, clock: Clock) -> None:
        self._client, self._catalog, self._clock = client, catalog, clock
        self._halves: dict[str, DelayedProducer] = {}
        """By subject: the producer of half messages."""

    async def send(self, request: calls.SendMessageRequest) -> calls.SendMessageResponse:
        """Send the messages of a request. Each entry has its own status,
        in the order of the request.
        """
        entries = await serve_entries(self._entry, request.messages)
        return calls.SendMessageResponse(
            status=joined_status([each.status for each in entries]), entries=entries
        )

    async def _entry(self, message: api.Message) -> calls.SendResultEntry:
        try:
            found = message_from_client(message, BODY_BYTES_MAX)
            receipt = await self._send(found)
        except Exception as failure:
            return calls.SendResultEntry(
                status=status_of_failure(failure), message_id=message.system_properties.message_id
            )
        answer = calls.SendResultEntry(
            status=OK, message_id=found.message_id, offset=receipt.sequence
        )
        if found.kind == api.TRANSACTION:
            answer.transaction_id = receipt.delayed_id or ""
        elif receipt.delayed_id:
            answer.recall_handle = recall_handle(found.message_id, receipt.delayed_id)
        return answer

    async def _send(self, message: TopicMessage) -> Receipt:
        is_fifo = message.kind == api.FIFO
        topic = await self._catalog.find_or_create(message.subject, is_fifo=is_fifo)
        if is_fifo and not topic.is_ordered:
            raise Refused(
                api.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                f"subject {message.subject!r} is unordered, and does not take FIFO messages: `qmq "
                "subject create NAME --order strict` makes an ordered one, which takes all types",
            )
        try:
            if message.kind == api.TRANSACTION:
                return await self._send_half(message, topic)
            return await self._client.send(
                message.subject,
                message.body,
                key=message.key(is_ordered=topic.is_ordered),
                tags=[message.tag] if message.tag else None,
                headers=message.headers,
                at=None if message.due_ms is None else time_of(message.due_ms),
            )
        except (UnknownSubject, OrderMismatch):
            self._catalog.forget(message.subject)  # the subject was deleted, or was created again
            raise

    async def _send_half(self, message: TopicMessage, topic: Topic) -> Receipt:
        producer = self._halves.get(message.subject)
        check_recovery(int(message.headers.get(CHECK_AFTER_MS, 0)))
        if producer is None:
            producer = self._halves[message.subject] = self._client.delayed_producer(
                message.subject, is_half=True
            )
        if producer.full:
            await producer.drain()
        ticket = producer.send(
            message.body,
            message.key(is_ordered=topic.is_ordered),
            [message.tag] if message.tag else None,
            message.headers,
            due_ms=self._clock.time_ms() + LIMIT_MS,
        )
        place = producer.place_of_last(ticket)
        return (await ticket).receipt(place)

    async def recall(self, request: calls.RecallMessageRequest) -> calls.RecallMessageResponse:
        """Cancel a delayed message."""
        try:
            subject = subject_of_topic(request.topic)
            message_id, delayed_id = parse_recall_handle(request.recall_handle)
            found = await self._client.delayed.show(delayed_id)
            if found.subject != subject:
                raise MessageNotFound(
                    f"topic {subject!r} has no delayed message with this recall handle"
                )
            await self._client.delayed.cancel(delayed_id)
        except Exception as failure:
            return calls.RecallMessageResponse(status=status_of_failure(failure))
        return calls.RecallMessageResponse(status=OK, message_id=message_id)


def recall_handle(message_id: str, delayed_id: str) -> str:
    """The handle by which a client recalls a delayed message."""
    return base64.urlsafe_b64encode(f"{message_id} {delayed_id}".encode()).decode().rstrip("=")


def parse_recall_handle(text: str) -> tuple[str, str]:
    """The client's message id and the delayed id of a handle. Raises CallerError."""
    try:
        message_id, delayed_id = (
            base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().split(" ")
        )
    except (ValueError, binascii.Error):
        raise CallerError(
            "this is not a recall handle: use the one that the send returned"
        ) from None
    return message_id, delayed_id
