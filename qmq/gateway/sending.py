"""Sends messages for clients: SendMessage and RecallMessage.

Messages of one request are sent concurrently, and messages of many requests share a batch, as with any producer. FIFO messages of a group
are ordered by their arrival at the gateway: a client sends the next one when it has the answer to the one before.

The message of a transaction is sent as a half message (`transactions.py`).

A recall handle is the message's id at its client and its delayed id in QMQ, base64: enough for any gateway.
"""

from __future__ import annotations

import base64
import binascii

from qmq.client.client import Client
from qmq.client.producing.delayed import DelayedProducer
from qmq.client.producing.receipts import Receipt
from qmq.errors import CallerError, MessageNotFound, OrderMismatch, UnknownSubject
from qmq.gateway.call_entries import serve_entries
from qmq.gateway.messages import CHECK_AFTER_MS, TopicMessage, message_from_client, subject_of_topic
from qmq.gateway.status import OK, Refused, joined_status, status_of_failure
from qmq.gateway.topics import Topic, TopicCatalog
from qmq.gateway.transactions import LIMIT_MS, check_recovery
from qmq.limits import BODY_BYTES_MAX
from qmq.process.event_loop import Clock, time_of
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls


class TopicSending:
    """Serves sending and recalling, with one client for all callers."""

    def __init__(self, client: Client, catalog: TopicCatalog, clock: Clock) -> None:
        self._client, self._catalog, self._clock = client, catalog, clock
        self._halves: dict[str, DelayedProducer] = {}
        """By subject: the producer of half messages."""

    async def send(self, request: calls.SendMessageRequest) -> calls.SendMessageResponse:
        """Send the messages of a request. Each entry has its own status, in the order of the request."""
        entries = await serve_entries(self._entry, request.messages)
        return calls.SendMessageResponse(status=joined_status([each.status for each in entries]), entries=entries)

    async def _entry(self, message: api.Message) -> calls.SendResultEntry:
        try:
            found = message_from_client(message, BODY_BYTES_MAX)
            receipt = await self._send(found)
        except Exception as failure:
            return calls.SendResultEntry(status=status_of_failure(failure), message_id=message.system_properties.message_id)
        answer = calls.SendResultEntry(status=OK, message_id=found.message_id, offset=receipt.sequence)
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
                f"subject {message.subject!r} is unordered, and does not take FIFO messages: `qmq subject create NAME --order strict` "
                "makes an ordered one, which takes all types",
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
            producer = self._halves[message.subject] = self._client.delayed_producer(message.subject, is_half=True)
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
                raise MessageNotFound(f"topic {subject!r} has no delayed message with this recall handle")
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
        message_id, delayed_id = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().split(" ")
    except (ValueError, binascii.Error):
        raise CallerError("this is not a recall handle: use the one that the send returned") from None
    return message_id, delayed_id
