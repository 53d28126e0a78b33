"""RocketMQ's calls as gRPC has them (`apache.rocketmq.v2.MessagingService`): headers, routes, Telemetry; the rest is handed on.

Every answer has a status; gRPC's own errors are for what this gateway does not have.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import grpc

from qmq.errors import QmqError
from qmq.gateway.client_sessions import TelemetryStream
from qmq.gateway.client_settings import CONSUMERS, check_client_type, settings_for_consumer, settings_for_producer
from qmq.gateway.gateway_config import GatewayConfig
from qmq.gateway.gateway_parts import GatewayParts
from qmq.gateway.message_mapping import ORDERED_TYPES, PLAIN_TYPES
from qmq.gateway.rocketmq_names import group_of_resource, subject_of_topic
from qmq.gateway.status_codes import OK, Refused, status_of_failure
from qmq.gateway.topic_catalog import Topic
from qmq.model import GroupSettings
from qmq.network import parse
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.rocketmq import service_pb2_grpc

log = logging.getLogger("qmq.gateway")

CLIENT_ID: Final = "x-mq-client-id"
ORDERED_BROKER: Final = "qmq"
"""The broker of an ordered topic's one queue: which broker groups it is on may change at any time, and clients need not know."""

Context = grpc.aio.ServicerContext[Any, Any]


class MessagingCaller(NamedTuple):
    """Which client calls, and what serves it."""

    client_id: str
    parts: GatewayParts


class MessagingService(service_pb2_grpc.MessagingServiceServicer):
    """Serves them. `parts_for` finds what serves a call by its headers; it raises Refused."""

    def __init__(self, parts_for: Callable[[Mapping[str, str]], GatewayParts], config: GatewayConfig) -> None:
        self._parts_for, self._config = parts_for, config
        self._advertised = endpoints_of(config.advertise) if config.advertise else None

    def _caller(self, context: Context) -> MessagingCaller:
        """Who calls. Raises Refused."""
        headers = {str(name): value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        parts = self._parts_for(headers)
        if not headers.get(CLIENT_ID):
            raise Refused(api.CLIENT_ID_REQUIRED, f"the call has no header {CLIENT_ID}: every client names itself")
        return MessagingCaller(headers[CLIENT_ID], parts)

    # --- where things are ----------------------------------------------------------------------------------------------

    async def QueryRoute(self, request: calls.QueryRouteRequest, context: Context) -> calls.QueryRouteResponse:
        try:
            caller = self._caller(context)
            return calls.QueryRouteResponse(status=OK, message_queues=await self._queues(caller, request.topic, request.endpoints))
        except Exception as failure:
            return calls.QueryRouteResponse(status=_told(failure))

    async def QueryAssignment(self, request: calls.QueryAssignmentRequest, context: Context) -> calls.QueryAssignmentResponse:
        """Every consumer reads all queues: messages are divided as they are asked for."""
        try:
            caller = self._caller(context)
            group_of_resource(request.group)
            queues = await self._queues(caller, request.topic, request.endpoints)
        except Exception as failure:
            return calls.QueryAssignmentResponse(status=_told(failure))
        return calls.QueryAssignmentResponse(status=OK, assignments=[api.Assignment(message_queue=each) for each in queues])

    async def _queues(self, caller: MessagingCaller, topic: api.Resource, endpoints: api.Endpoints) -> list[api.MessageQueue]:
        subject, catalog = subject_of_topic(topic), caller.parts.catalog
        found = await catalog.find(subject)
        if found is None and not catalog.creates:
            raise Refused(api.TOPIC_NOT_FOUND, f"there is no topic {subject!r}: create it with `qmq subject create`")
        way = self._advertised or endpoints
        if not way.addresses:
            raise Refused(api.ILLEGAL_ACCESS_POINT, "the request has no endpoints: they say by which address the client came")
        return queues_of(topic, found, way)

    # --- clients -------------------------------------------------------------------------------------------------------

    async def Heartbeat(self, request: calls.HeartbeatRequest, context: Context) -> calls.HeartbeatResponse:
        try:
            caller = self._caller(context)
            check_client_type(request.client_type)
            caller.parts.sessions.hear(caller.client_id)
        except Exception as failure:
            return calls.HeartbeatResponse(status=_told(failure))
        return calls.HeartbeatResponse(status=OK)

    async def NotifyClientTermination(
        self, request: calls.NotifyClientTerminationRequest, context: Context
    ) -> calls.NotifyClientTerminationResponse:
        try:
            caller = self._caller(context)
            caller.parts.sessions.end(caller.client_id)
            if request.group.name:
                caller.parts.receiving.client_ended(caller.client_id, group_of_resource(request.group))
        except Exception as failure:
            return calls.NotifyClientTerminationResponse(status=_told(failure))
        return calls.NotifyClientTerminationResponse(status=OK)

    async def Telemetry(  # type: ignore[override]  # it writes by the context, since commands go out at any time
        self, requests: AsyncIterator[calls.TelemetryCommand], context: Context
    ) -> None:
        """Settings come in and are answered; other commands of clients answer what was asked of them."""
        stream = TelemetryStream(context.write)
        try:
            caller = self._caller(context)
        except Exception as failure:
            await stream.send(calls.TelemetryCommand(status=_told(failure)))
            return
        sessions = caller.parts.sessions
        session = sessions.hear(caller.client_id)
        session.streams.append(stream)
        try:
            async for command in requests:
                sessions.hear(caller.client_id)
                if command.HasField("settings"):
                    answer = await self._settled(caller.parts, command.settings)
                    if answer.settings.HasField("publishing"):
                        session.published |= {subject_of_topic(each) for each in answer.settings.publishing.topics}
                    await stream.send(answer)
        finally:
            session.streams.remove(stream)

    async def _settled(self, parts: GatewayParts, told: api.Settings) -> calls.TelemetryCommand:
        try:
            check_client_type(told.client_type)
            settings = await self._consumer_settings(parts, told) if told.client_type in CONSUMERS else self._producer_settings(told)
        except Exception as failure:
            return calls.TelemetryCommand(status=_told(failure))
        return calls.TelemetryCommand(status=OK, settings=settings)

    def _producer_settings(self, told: api.Settings) -> api.Settings:
        return settings_for_producer(told, self._config.body_bytes_max)

    async def _consumer_settings(self, parts: GatewayParts, told: api.Settings) -> api.Settings:
        group = group_of_resource(told.subscription.group)
        subjects = [subject_of_topic(each.topic) for each in told.subscription.subscriptions]
        topics = [await parts.catalog.find(each) for each in subjects]
        plain = next((each for each in topics if each is not None and not each.is_ordered), None)
        settings = GroupSettings() if plain is None else await self._group_settings(parts, plain.subject, group)
        return settings_for_consumer(told, settings, is_fifo=any(each is not None and each.is_ordered for each in topics))

    async def _group_settings(self, parts: GatewayParts, subject: str, group: str) -> GroupSettings:
        try:
            found = await parts.client.metadata.group_settings(subject, group)
        except QmqError as failure:
            log.info("the settings of group %s on %s could not be asked for, clients get the defaults: %s", group, subject, failure)
            return GroupSettings()
        return GroupSettings(found.attempts_max, tuple(found.retry_delays_ms))

    # --- messages ------------------------------------------------------------------------------------------------------

    async def SendMessage(self, request: calls.SendMessageRequest, context: Context) -> calls.SendMessageResponse:
        try:
            caller = self._caller(context)
            if any(each.system_properties.message_type == api.TRANSACTION for each in request.messages):
                caller.parts.sessions.hear(caller.client_id).published |= {subject_of_topic(each.topic) for each in request.messages}
        except Exception as failure:
            return calls.SendMessageResponse(status=_told(failure))
        return await caller.parts.sending.send(request)

    async def EndTransaction(self, request: calls.EndTransactionRequest, context: Context) -> calls.EndTransactionResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.EndTransactionResponse(status=_told(failure))
        return await caller.parts.transactions.end(request)

    async def RecallMessage(self, request: calls.RecallMessageRequest, context: Context) -> calls.RecallMessageResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.RecallMessageResponse(status=_told(failure))
        return await caller.parts.sending.recall(request)

    async def ReceiveMessage(self, request: calls.ReceiveMessageRequest, context: Context) -> AsyncIterator[calls.ReceiveMessageResponse]:
        try:
            caller = self._caller(context)
        except Exception as failure:
            yield calls.ReceiveMessageResponse(status=_told(failure))
            return
        caller.parts.sessions.hear(caller.client_id)
        async with aclosing(caller.parts.receiving.receive(request, caller.client_id, context.time_remaining())) as answers:
            async for answer in answers:
                yield answer

    async def AckMessage(self, request: calls.AckMessageRequest, context: Context) -> calls.AckMessageResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.AckMessageResponse(status=_told(failure))
        return await caller.parts.receiving.ack(request)

    async def ChangeInvisibleDuration(
        self, request: calls.ChangeInvisibleDurationRequest, context: Context
    ) -> calls.ChangeInvisibleDurationResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.ChangeInvisibleDurationResponse(status=_told(failure))
        return caller.parts.receiving.change_time(request)

    async def ForwardMessageToDeadLetterQueue(
        self, request: calls.ForwardMessageToDeadLetterQueueRequest, context: Context
    ) -> calls.ForwardMessageToDeadLetterQueueResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.ForwardMessageToDeadLetterQueueResponse(status=_told(failure))
        return caller.parts.receiving.forward(request)

    # --- pull consumers ------------------------------------------------------------------------------------------------

    async def PullMessage(self, request: calls.PullMessageRequest, context: Context) -> AsyncIterator[calls.PullMessageResponse]:
        try:
            caller = self._caller(context)
        except Exception as failure:
            yield calls.PullMessageResponse(status=_told(failure))
            return
        caller.parts.sessions.hear(caller.client_id)
        async with aclosing(caller.parts.pulling.pull(request, context.time_remaining())) as answers:
            async for answer in answers:
                yield answer

    async def UpdateOffset(self, request: calls.UpdateOffsetRequest, context: Context) -> calls.UpdateOffsetResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.UpdateOffsetResponse(status=_told(failure))
        return await caller.parts.pulling.update(request)

    async def GetOffset(self, request: calls.GetOffsetRequest, context: Context) -> calls.GetOffsetResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.GetOffsetResponse(status=_told(failure))
        return await caller.parts.pulling.get(request)

    async def QueryOffset(self, request: calls.QueryOffsetRequest, context: Context) -> calls.QueryOffsetResponse:
        try:
            caller = self._caller(context)
        except Exception as failure:
            return calls.QueryOffsetResponse(status=_told(failure))
        return await caller.parts.pulling.query(request)

    # --- what this gateway does not have -------------------------------------------------------------------------------

    async def SyncLiteSubscription(
        self, request: calls.SyncLiteSubscriptionRequest, context: Context
    ) -> calls.SyncLiteSubscriptionResponse:
        return calls.SyncLiteSubscriptionResponse(status=_told(_missing("lite topics")))


def queues_of(topic: api.Resource, found: Topic | None, endpoints: api.Endpoints) -> list[api.MessageQueue]:
    """The queues of a topic as clients see them: one for each broker group, or one for all if it is ordered, or does not exist yet."""
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
    """HOST:PORT as clients are told it. Raises InvalidArgument."""
    place = parse(address)
    host = place.host.strip("[]")
    try:
        scheme = api.IPv6 if ipaddress.ip_address(host).version == 6 else api.IPv4
    except ValueError:
        scheme = api.DOMAIN_NAME
    return api.Endpoints(scheme=scheme, addresses=[api.Address(host=host, port=place.port)])


def _missing(what: str) -> Refused:
    return Refused(api.UNSUPPORTED, f"this gateway does not serve {what}: docs/ROCKETMQ.md says what it serves")


def _told(failure: Exception) -> api.Status:
    if not isinstance(failure, Refused | QmqError):
        log.error("a call failed", exc_info=failure)
    return status_of_failure(failure)
