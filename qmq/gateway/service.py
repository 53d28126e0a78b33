"""The gRPC service `apache.rocketmq.v2.MessagingService`: headers, routes and Telemetry. Other
modules serve the other calls.

Every answer has a status, and is counted by it. gRPC's own errors are only for calls that this
gateway does not serve.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import wraps
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from qmq.errors import InvalidArgument, QmqError
from qmq.gateway.clients import TelemetryStream
from qmq.gateway.config import (
    CONSUMERS,
    GatewayConfig,
    check_client_type,
    settings_for_consumer,
    settings_for_producer,
)
from qmq.gateway.messages import ORDERED_TYPES, PLAIN_TYPES, group_of_resource, subject_of_topic
from qmq.gateway.parts import GatewayParts
from qmq.gateway.status import OK, CallCounters, Refused, status_of_failure
from qmq.gateway.topics import Topic
from qmq.limits import BODY_BYTES_MAX
from qmq.model import GroupSettings
from qmq.process.address import parse
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.rocketmq import service_pb2_grpc

log = logging.getLogger("qmq.gateway")

CLIENT_ID: Final = "x-mq-client-id"
LANGUAGE: Final = "x-mq-language"
ORDERED_BROKER: Final = "qmq"
"""The broker name of an ordered topic's only queue. The topic's broker groups may change at any
time, and clients need not know them.
"""

Context = grpc.aio.ServicerContext[Any, Any]


class MessagingCaller(NamedTuple):
    """The client that calls, and the parts that serve it.
    The client waits for `remaining_s` seconds.
    """

    client_id: str
    language: str
    parts: GatewayParts
    remaining_s: float | None


_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer", bound="HasStatus")


class HasStatus(Protocol):
    """An answer with a status."""

    def __init__(self, *, status: api.Status) -> None: ...

    @property
    def status(self) -> api.Status: ...


def answered(
    answer: type[_Answer],
) -> Callable[
    [Callable[[MessagingService, _Request, MessagingCaller], Awaitable[_Answer]]],
    Callable[[MessagingService, _Request, Context], Awaitable[_Answer]],
]:
    """Makes a gRPC call with one answer of a method. An exception of the method becomes the status
    of the answer.
    """

    def decorate(
        serve: Callable[[MessagingService, _Request, MessagingCaller], Awaitable[_Answer]],
    ) -> Callable[[MessagingService, _Request, Context], Awaitable[_Answer]]:
        @wraps(serve)
        async def call(self: MessagingService, request: _Request, context: Context) -> _Answer:
            headers = headers_of(context)
            try:
                found = await serve(self, request, self.caller(serve.__name__, headers, context))
            except Exception as failure:
                found = answer(status=_status_of(failure))
            self.counters.note(serve.__name__, headers.get(LANGUAGE, ""), found.status.code)
            return found

        return call

    return decorate


def streamed(
    answer: type[_Answer],
) -> Callable[
    [Callable[[MessagingService, _Request, MessagingCaller], AsyncGenerator[_Answer, None]]],
    Callable[[MessagingService, _Request, Context], AsyncIterator[_Answer]],
]:
    """Makes a gRPC call with a stream of answers of a method. The first answer has the status."""

    def decorate(
        serve: Callable[
            [MessagingService, _Request, MessagingCaller], AsyncGenerator[_Answer, None]
        ],
    ) -> Callable[[MessagingService, _Request, Context], AsyncIterator[_Answer]]:
        @wraps(serve)
        async def call(
            self: MessagingService, request: _Request, context: Context
        ) -> AsyncIterator[_Answer]:
            headers = headers_of(context)
            try:
                caller = self.caller(serve.__name__, headers, context)
            except Exception as failure:
                self.counters.note(
                    serve.__name__, headers.get(LANGUAGE, ""), _status_of(failure).code
                )
                yield answer(status=_status_of(failure))
                return
            is_first = True
            async with aclosing(serve(self, request, caller)) as answers:
                async for each in answers:
                    if is_first:
                        self.counters.note(serve.__name__, caller.language, each.status.code)
                        is_first = False
                    yield each

        return call

    return decorate


def headers_of(context: Context) -> dict[str, str]:
    """The text headers of a call."""
    return {
        str(name): value
        for name, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    }


class MessagingService(service_pb2_grpc.MessagingServiceServicer):
    """Serves the gRPC calls. `parts_for` finds the parts that serve a call by its name, headers and
    peer; it raises Refused.
    """

    def __init__(
        self,
        parts_for: Callable[[str, Mapping[str, str], str], GatewayParts],
        config: GatewayConfig,
    ) -> None:
        self._parts_for = parts_for
        self._advertised = endpoints_of(config.advertise) if config.advertise else None
        self.counters = CallCounters()
        """Counts the answers of all calls."""

    def caller(self, call: str, headers: Mapping[str, str], context: Context) -> MessagingCaller:
        """Identify the caller. Raises Refused."""
        parts = self._parts_for(call, headers, context.peer())
        if not headers.get(CLIENT_ID):
            raise Refused(
                api.CLIENT_ID_REQUIRED,
                f"the call has no header {CLIENT_ID}: every client must send it",
            )
        return MessagingCaller(
            headers[CLIENT_ID], headers.get(LANGUAGE, ""), parts, context.time_remaining()
        )

    # --- where things are -------------------------------------------------------------------------

    @answered(calls.QueryRouteResponse)
    async def QueryRoute(
        self, request: calls.QueryRouteRequest, caller: MessagingCaller
    ) -> calls.QueryRouteResponse:
        return calls.QueryRouteResponse(
            status=OK, message_queues=await self._queues(caller, request.topic, request.endpoints)
        )

    @answered(calls.QueryAssignmentResponse)
    async def QueryAssignment(
        self, request: calls.QueryAssignmentRequest, caller: MessagingCaller
    ) -> calls.QueryAssignmentResponse:
        """Assign all queues to every consumer: the gateway divides messages among consumers when
        they ask.
        """
        group_of_resource(request.group)
        queues = await self._queues(caller, request.topic, request.endpoints)
        return calls.QueryAssignmentResponse(
            status=OK, assignments=[api.Assignment(message_queue=each) for each in queues]
        )

    async def _queues(
        self, caller: MessagingCaller, topic: api.Resource, endpoints: api.Endpoints
    ) -> list[api.MessageQueue]:
        subject, catalog = subject_of_topic(topic), caller.parts.catalog
        found = await catalog.find(subject)
        if found is None and not catalog.creates:
            raise Refused(
                api.TOPIC_NOT_FOUND,
                f"there is no topic {subject!r}: create it with `qmq subject create`",
            )
        way = self._advertised or endpoints
        if not way.addresses:
            raise Refused(
                api.ILLEGAL_ACCESS_POINT,
                "the request has no endpoints: they are the address that the client uses",
            )
        return queues_of(topic, found, way)

    # --- clients ----------------------------------------------------------------------------------

    @answered(calls.HeartbeatResponse)
    async def Heartbeat(
        self, request: calls.HeartbeatRequest, caller: MessagingCaller
    ) -> calls.HeartbeatResponse:
        check_client_type(request.client_type)
        caller.parts.sessions.touch(caller.client_id)
        return calls.HeartbeatResponse(status=OK)

    @answered(calls.NotifyClientTerminationResponse)
    async def NotifyClientTermination(
        self, request: calls.NotifyClientTerminationRequest, caller: MessagingCaller
    ) -> calls.NotifyClientTerminationResponse:
        caller.parts.sessions.end(caller.client_id)
        if request.group.name:
            caller.parts.receiving.client_ended(caller.client_id, group_of_resource(request.group))
        return calls.NotifyClientTerminationResponse(status=OK)

    async def Telemetry(  # type: ignore[override]  # it writes by the context, since commands go out at any time
        self, requests: AsyncIterator[calls.TelemetryCommand], context: Context
    ) -> None:
        """Answer the settings that a client sends; a client sends other commands as answers to the
        gateway's commands.
        """
        headers = headers_of(context)
        stream = TelemetryStream(
            context.write, lambda command: self._note(headers, command), _own_task().cancel
        )
        try:
            caller = self.caller("Telemetry", headers, context)
        except Exception as failure:
            await stream.send(calls.TelemetryCommand(status=_status_of(failure)))
            return
        sessions = caller.parts.sessions
        session = sessions.touch(caller.client_id)
        session.streams.append(stream)
        try:
            async for command in requests:
                sessions.touch(caller.client_id)
                if command.HasField("settings"):
                    answer = await self._settings_command(caller.parts, command.settings)
                    if answer.settings.HasField("publishing"):
                        session.published |= {
                            subject_of_topic(each) for each in answer.settings.publishing.topics
                        }
                    await stream.send(answer)
        except DecodeError:
            await stream.send(
                calls.TelemetryCommand(
                    status=_status_of(InvalidArgument("the bytes of the stream are not a command"))
                )
            )
        except asyncio.CancelledError:
            if not stream.is_cut:
                raise
            # A cancelled task sends no end to the client, and one that returns does.
        finally:
            session.streams.remove(stream)

    def _note(self, headers: Mapping[str, str], command: calls.TelemetryCommand) -> None:
        what = (
            command.WhichOneof("command") or "settings"
        )  # An answer without a command refuses the client's settings.
        self.counters.note(
            f"Telemetry: {what}", headers.get(LANGUAGE, ""), command.status.code or api.OK
        )

    async def _settings_command(
        self, parts: GatewayParts, told: api.Settings
    ) -> calls.TelemetryCommand:
        try:
            check_client_type(told.client_type)
            settings = (
                await self._consumer_settings(parts, told)
                if told.client_type in CONSUMERS
                else self._producer_settings(told)
            )
        except Exception as failure:
            return calls.TelemetryCommand(status=_status_of(failure))
        return calls.TelemetryCommand(status=OK, settings=settings)

    def _producer_settings(self, told: api.Settings) -> api.Settings:
        return settings_for_producer(told, BODY_BYTES_MAX)

    async def _consumer_settings(self, parts: GatewayParts, told: api.Settings) -> api.Settings:
        group = group_of_resource(told.subscription.group)
        subjects = [subject_of_topic(each.topic) for each in told.subscription.subscriptions]
        topics = [await parts.catalog.find(each) for each in subjects]
        plain = next((each for each in topics if each is not None and not each.is_ordered), None)
        settings = (
            GroupSettings()
            if plain is None
            else await self._group_settings(parts, plain.subject, group)
        )
        return settings_for_consumer(
            told, settings, is_fifo=any(each is not None and each.is_ordered for each in topics)
        )

    async def _group_settings(self, parts: GatewayParts, subject: str, group: str) -> GroupSettings:
        try:
            found = await parts.client.metadata.group_settings(subject, group)
        except QmqError as failure:
            log.info(
                (
                    "the settings of group %s on %s could not be asked for, clients get the "
                    "defaults: %s"
                ),
                group,
                subject,
                failure,
            )
            return GroupSettings()
        return GroupSettings(found.attempts_max, tuple(found.retry_delays_ms))

    # --- messages ---------------------------------------------------------------------------------

    @answered(calls.SendMessageResponse)
    async def SendMessage(
        self, request: calls.SendMessageRequest, caller: MessagingCaller
    ) -> calls.SendMessageResponse:
        if any(each.system_properties.message_type == api.TRANSACTION for each in request.messages):
            caller.parts.sessions.touch(caller.client_id).published |= {
                subject_of_topic(each.topic) for each in request.messages
            }
        return await caller.parts.sending.send(request)

    @answered(calls.EndTransactionResponse)
    async def EndTransaction(
        self, request: calls.EndTransactionRequest, caller: MessagingCaller
    ) -> calls.EndTransactionResponse:
        return await caller.parts.transactions.end(request)

    @answered(calls.RecallMessageResponse)
    async def RecallMessage(
        self, request: calls.RecallMessageRequest, caller: MessagingCaller
    ) -> calls.RecallMessageResponse:
        return await caller.parts.sending.recall(request)

    @streamed(calls.ReceiveMessageResponse)
    def ReceiveMessage(
        self, request: calls.ReceiveMessageRequest, caller: MessagingCaller
    ) -> AsyncGenerator[calls.ReceiveMessageResponse, None]:
        caller.parts.sessions.touch(caller.client_id)
        return caller.parts.receiving.receive(request, caller.client_id, caller.remaining_s)

    @answered(calls.AckMessageResponse)
    async def AckMessage(
        self, request: calls.AckMessageRequest, caller: MessagingCaller
    ) -> calls.AckMessageResponse:
        return await caller.parts.receiving.ack(request)

    @answered(calls.ChangeInvisibleDurationResponse)
    async def ChangeInvisibleDuration(
        self, request: calls.ChangeInvisibleDurationRequest, caller: MessagingCaller
    ) -> calls.ChangeInvisibleDurationResponse:
        return caller.parts.receiving.change_time(request)

    @answered(calls.ForwardMessageToDeadLetterQueueResponse)
    async def ForwardMessageToDeadLetterQueue(
        self, request: calls.ForwardMessageToDeadLetterQueueRequest, caller: MessagingCaller
    ) -> calls.ForwardMessageToDeadLetterQueueResponse:
        return caller.parts.receiving.forward(request)

    # --- pull consumers ---------------------------------------------------------------------------

    @streamed(calls.PullMessageResponse)
    def PullMessage(
        self, request: calls.PullMessageRequest, caller: MessagingCaller
    ) -> AsyncGenerator[calls.PullMessageResponse, None]:
        caller.parts.sessions.touch(caller.client_id)
        return caller.parts.pulling.pull(request, caller.remaining_s)

    @answered(calls.UpdateOffsetResponse)
    async def UpdateOffset(
        self, request: calls.UpdateOffsetRequest, caller: MessagingCaller
    ) -> calls.UpdateOffsetResponse:
        return await caller.parts.pulling.update(request)

    @answered(calls.GetOffsetResponse)
    async def GetOffset(
        self, request: calls.GetOffsetRequest, caller: MessagingCaller
    ) -> calls.GetOffsetResponse:
        return await caller.parts.pulling.get(request)

    @answered(calls.QueryOffsetResponse)
    async def QueryOffset(
        self, request: calls.QueryOffsetRequest, caller: MessagingCaller
    ) -> calls.QueryOffsetResponse:
        return await caller.parts.pulling.query(request)

    # --- what this gateway does not have ----------------------------------------------------------

    @answered(calls.SyncLiteSubscriptionResponse)
    async def SyncLiteSubscription(
        self, request: calls.SyncLiteSubscriptionRequest, caller: MessagingCaller
    ) -> calls.SyncLiteSubscriptionResponse:
        raise Refused(
            api.UNSUPPORTED, "this gateway has no lite topics: docs/ROCKETMQ.md says what it has"
        )


def queues_of(
    topic: api.Resource, found: Topic | None, endpoints: api.Endpoints
) -> list[api.MessageQueue]:
    """The queues of a topic as clients see them: one for each broker group; one in all if the topic
    is ordered or does not exist yet.
    """
    brokers = (ORDERED_BROKER,) if found is None or found.is_ordered else found.broker_groups
    accepted = PLAIN_TYPES if found is not None and not found.is_ordered else ORDERED_TYPES
    return [
        api.MessageQueue(
            topic=topic,
            id=number,
            permission=api.READ_WRITE,
            broker=api.Broker(name=name, id=0, endpoints=endpoints),
            accept_message_types=accepted,
        )
        for number, name in enumerate(brokers)
    ]


def endpoints_of(address: str) -> api.Endpoints:
    """Convert a HOST:PORT address for clients. Raises InvalidArgument."""
    place = parse(address)
    host = place.host.strip("[]")
    try:
        scheme = api.IPv6 if ipaddress.ip_address(host).version == 6 else api.IPv4
    except ValueError:
        scheme = api.DOMAIN_NAME
    return api.Endpoints(scheme=scheme, addresses=[api.Address(host=host, port=place.port)])


def _own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None  # a call is served in a task
    return task


def _status_of(failure: Exception) -> api.Status:
    if not isinstance(failure, Refused | QmqError):
        log.error("a call failed", exc_info=failure)
    return status_of_failure(failure)
