"""Parts of the workers of Celery and Dramatiq, without processes and threads. They read a message
as a worker does, and a test judges by them what a decoder lets through: an error that comes out of
them would end a worker, or keep a place of its pool for ever.

The decoders of gateways, HTTP, task queues and the console.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from pickle import dumps
from queue import PriorityQueue
from time import monotonic
from types import SimpleNamespace
from typing import Any, Final

import hostile_values as values
from billiard.pool import TimeoutHandler
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.worker import state
from celery.worker.consumer import Consumer
from dramatiq import Actor, MessageProxy
from dramatiq.broker import Consumer as DramatiqConsumer
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import DecodeError
from dramatiq.middleware import default_middleware
from dramatiq.worker import ConsumerThread, WorkerThread
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hostile_values import (
    LETTER_HEADERS,
    LETTERS,
    OURS,
    Decoder,
    delayed,
    each_delayed,
    in_file,
    shown,
    tolerant,
)
from hypothesis import strategies as st
from kombu.asynchronous.timer import Timer
from kombu.transport import virtual

import qmq
from qmq import errors
from qmq.client import payloads
from qmq.client.dead_letters import letter_of
from qmq.client.producing.delayed import DelayedMessage
from qmq.console.bodies import body_view
from qmq.console.oidc import OidcConfig, OidcFlow, OidcTokens
from qmq.console.pages import delays, subject
from qmq.console.pages.dead_letters import LetterFilter, ReplayPlan
from qmq.console.pages.message import MessageQuery, ReadPlace, moment_ms, shown_message
from qmq.gateway import filters, messages, sending
from qmq.gateway.clients import GatewayCredentials
from qmq.gateway.receipts import ReceiptHandle
from qmq.gateway.status import Refused
from qmq.integrations import cloud_event, dramatiq, starlette, taskiq
from qmq.integrations.django.task_ids import task_id
from qmq.integrations.faststream.messages import decode, parse_message
from qmq.integrations.http import requests, site
from qmq.integrations.kombu import envelope
from qmq.model import DelayedId
from qmq.operations import letters
from qmq.process.event_loop import time_of
from qmq.proto.rocketmq import definition_pb2 as api


class FullPool:
    """A pool that does with a task what Celery's pool of processes does before a process has it."""

    def apply_async(
        self, target: object, args: Any, soft_timeout: Any, timeout: Any, **callbacks: Any
    ) -> object:
        dumps(args)
        for each in (soft_timeout, timeout):
            if each:
                Timer().call_after(each, print)
        job = SimpleNamespace(
            _time_accepted=monotonic(),
            _soft_timeout=soft_timeout,
            _timeout=timeout,
            ready=lambda: True,
        )
        next(TimeoutHandler([], {1: job}, None, None).handle_timeouts(), None)
        return job


class TaskConsumer(Consumer):
    """Celery's consumer of tasks, whose pool has a place for each."""

    def __init__(self, app: Celery) -> None:
        self.app, self.hostname, self.pool, self.hub = app, "worker@here", FullPool(), None
        self.strategies, self.task_buckets, self.on_task_message = (
            {},
            defaultdict(lambda: None),
            set(),
        )
        self.connection_errors, self.disable_rate_limits, self.restart_count = (), True, 0
        self._maximum_prefetch_restored = True
        self.controller = SimpleNamespace(state=state)
        self.event_dispatcher = SimpleNamespace(
            enabled=True, send=lambda name, **fields: json.dumps([name, fields]).encode()
        )
        self.timer = SimpleNamespace(
            call_at=lambda time, function, arguments, priority: function(*arguments)
        )
        self.qos = SimpleNamespace(increment_eventually=int, decrement_eventually=int)
        self.on_task_request = self.run
        self.has_place = False
        self.update_strategies()

    def run(self, request: Any) -> None:
        """What a worker does with a request that has a place of the pool, also when it came too
        late or was revoked meanwhile.
        """
        self.has_place = True
        for revoked in (False, True):
            if revoked:
                state.revoked.add(request.id)
            try:
                request.execute_using_pool(self.pool)
            except TaskRevokedError:
                pass
            finally:
                state.revoked.discard(request.id)
        self.has_place = False


@cache
def celery_consumer() -> tuple[TaskConsumer, Callable[[Any], object]]:
    app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(result_extended=True, worker_send_task_events=True, task_send_sent_event=True)

    @app.task(name="t")  # type: ignore[untyped-decorator]
    def work(*args: object, **kwargs: object) -> None:
        """Is not run here."""

    app.finalize()
    state.revoked_stamps["a"] = ["z"]
    consumer = TaskConsumer(app)
    return consumer, consumer.create_task_handler()


def run_in_celery(message: Any) -> None:
    """Hand a message of kombu to a worker. Raises what would end a pool's place; the channel sets
    aside a message that fails before.
    """
    consumer, handler = celery_consumer()
    consumer.has_place = False
    try:
        handler(message)
    except Exception:
        if consumer.has_place:
            raise


class MessageVerdicts(DramatiqConsumer):
    """A consumer to which verdicts are given."""

    def ack(self, message: MessageProxy) -> None:
        """Nothing is there to settle."""

    def nack(self, message: MessageProxy) -> None:
        """Nothing is there to settle."""


@cache
def dramatiq_threads() -> tuple[StubBroker, ConsumerThread, WorkerThread]:
    def work(*args: object, **kwargs: object) -> None:
        raise ValueError(args, kwargs)

    broker = StubBroker(
        middleware=[each() for each in default_middleware if each.__name__ != "Prometheus"]
    )
    Actor(work, broker=broker, actor_name="a", queue_name="q", priority=0, options={})
    waiting: PriorityQueue[Any] = PriorityQueue()
    consumer = ConsumerThread(
        broker=broker, queue_name="q", prefetch=1, work_queue=waiting, worker_timeout=1
    )
    consumer.consumer = MessageVerdicts()
    return (
        broker,
        consumer,
        WorkerThread(
            broker=broker, consumers={"q": consumer}, work_queue=waiting, worker_timeout=1
        ),
    )


def run_in_dramatiq(message: Any) -> None:
    """Hand a message to the threads of a worker. Raises what would end one of them."""
    broker, consumer, worker = dramatiq_threads()
    consumer.handle_message(MessageProxy(message))
    consumer.handle_delayed_messages()
    while not worker.work_queue.empty():
        worker.process_message(worker.work_queue.get().message)
    while not consumer.delay_queue.empty():
        consumer.delay_queue.get()
    broker.flush_all()


# --- RocketMQ's gateway ---------------------------------------------------------------------------

TOPIC: Final = api.Resource(name="s")


def for_client(message: Any) -> None:
    for is_ordered in (True, False):
        messages.message_for_client(
            message, TOPIC, is_ordered=is_ordered, handle="h", invisible_ms=5
        ).SerializeToString()


def half(message: DelayedMessage) -> None:
    messages.half_message_for_client(message).SerializeToString()
    sending.CheckPlan().is_time(message, 10**15, 5)
    sending.outcome_before(message)


@st.composite
def sent(draw: st.DrawFn) -> api.Message:
    """Messages as any program may send them: Protobuf holds UTF-8 and numbers of its sizes only."""
    text, int64, int32 = (
        values.WIRE_TEXTS,
        st.integers(-(2**63), 2**63 - 1),
        st.integers(-(2**31), 2**31 - 1),
    )
    message = api.Message(
        topic=api.Resource(name=draw(st.just("s") | text)), body=draw(values.BYTES)
    )
    message.user_properties.update(draw(st.dictionaries(text, text, max_size=4)))
    system = message.system_properties
    system.message_id, system.message_group, system.born_host, system.trace_context = (
        draw(st.just("") | text) for _ in range(4)
    )
    system.message_type, system.body_encoding = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    system.body_digest.type, system.body_digest.checksum = draw(st.integers(0, 5)), draw(text)
    system.keys.extend(draw(st.lists(text, max_size=3)))
    if draw(st.booleans()):
        system.tag = draw(text)
    if draw(st.booleans()):
        system.delivery_timestamp.CopyFrom(Timestamp(seconds=draw(int64), nanos=draw(int32)))
    if draw(st.booleans()):
        system.orphaned_transaction_recovery_duration.CopyFrom(
            Duration(seconds=draw(int64), nanos=draw(int32))
        )
    return message


def _with(body: bytes = b"b", /, **fields: Any) -> api.Message:
    """A message with these system properties."""
    return api.Message(topic=TOPIC, body=body, system_properties=api.SystemProperties(**fields))


def _each_sent() -> Iterator[api.Message]:
    for text in values.WIRE_EXAMPLES:
        for name in ("message_id", "message_group", "born_host", "trace_context", "tag"):
            yield _with(**{name: text})
        yield _with(keys=[text], tag=text)
        yield api.Message(topic=TOPIC, body=b"b", user_properties={text: text})
        yield _with(body_digest=api.Digest(type=api.MD5, checksum=text))
    for seconds, nanos in product(
        (-(2**63), -1, 0, 253_402_300_800, 2**63 - 1), (-(2**31), 0, 2**31 - 1)
    ):
        due = Timestamp(seconds=seconds, nanos=nanos)
        after = Duration(seconds=seconds, nanos=nanos)
        for kind in range(6):
            yield _with(
                message_type=kind,
                delivery_timestamp=due,
                orphaned_transaction_recovery_duration=after,
            )
    yield from [_with(each, body_encoding=2) for each in values.BYTE_EXAMPLES]


EACH_SENT: Final = tuple(_each_sent())


def from_client(message: api.Message) -> None:
    found = messages.message_from_client(message, 1_000)
    time_of(found.due_ms or 0)


def filtered(given: tuple[str, str, Any]) -> None:
    kind, expression, message = given
    asked = api.FilterExpression(type=api.SQL if kind == "SQL" else api.TAG, expression=expression)
    filters.filter_of_request(asked).wants(message)


PIECES: Final = (
    *("a", "b", "TAGS", "'x'", "''", "1", "1e999", "9" * 400, "²", "="),
    *("<>", ">", "AND", "OR", "NOT", "(", ")", "IN", ",", "IS NULL"),
)
NESTED: Final = (
    "(" * 900,
    "NOT " * 900 + "a = 1",
    "(" * 500 + "a = 1" + ")" * 500,
    "(" * 50 + "a = 1" + ")" * 50,
)
CONDITIONS: Final = st.lists(
    st.sampled_from((*PIECES, "BETWEEN", "CONTAINS", "-", "true", "||", "*")), max_size=12
).map(" ".join) | st.sampled_from(NESTED)

GATEWAY: Final = (
    Decoder(
        "gateway: a message for a client",
        values.received(values.headers(*OURS)),
        for_client,
        always=values.each_received(dict.fromkeys(OURS, b"1")),
    ),
    Decoder("gateway: a half message", delayed(), half, (Refused,), always=each_delayed()),
    Decoder("gateway: a message from a client", sent(), from_client, (Refused,), always=EACH_SENT),
    Decoder(
        "gateway: a filter, and what it asks of a message",
        st.tuples(
            st.sampled_from(["SQL", "TAG"]),
            CONDITIONS | values.WIRE_TEXTS,
            values.received(values.headers("a", "b")),
        ),
        filtered,
        (Refused,),
        always=tuple(
            (kind, text, message)
            for kind in ("SQL", "TAG")
            for text in (*values.WIRE_EXAMPLES, "a = 1 OR b > a", *NESTED)
            for message in values.each_received({"a": b"1"})[::50]
        ),
    ),
    Decoder(
        "gateway: a receipt handle",
        values.BASE64,
        ReceiptHandle.parse,
        (Refused,),
        ("qmq.gateway.receipts.ReceiptHandle.parse",),
        always=values.WIRE_EXAMPLES,
    ),
    Decoder(
        "gateway: a recall handle",
        values.BASE64,
        lambda text: DelayedId.parse(sending.parse_recall_handle(text)[1]),
        (errors.CallerError,),
        ("qmq.gateway.sending.parse_recall_handle",),
        always=values.WIRE_EXAMPLES,
    ),
    Decoder(
        "gateway: names",
        st.builds(api.Resource, name=values.WIRE_TEXTS, resource_namespace=values.WIRE_TEXTS),
        lambda each: (messages.subject_of_topic(each), messages.group_of_resource(each)),
        (Refused,),
        always=tuple(
            api.Resource(name=each, resource_namespace=each) for each in values.WIRE_EXAMPLES
        ),
    ),
    Decoder(
        "gateway: a signature",
        st.fixed_dictionaries(
            {
                "x-mq-date-time": values.TEXTS,
                "authorization": values.TEXTS
                | values.TEXTS.map(
                    lambda text: (
                        f"MQv2-HMAC-SHA1 Credential={text}, SignedHeaders=x-mq-date-time, "
                        f"Signature={'a' * 40}"
                    )
                ),
            }
        ).map(
            lambda found: {
                name: text.encode("latin-1", "replace").decode("latin-1")
                for name, text in found.items()
            }
        ),
        GatewayCredentials({}).authenticate,
        (Refused,),
        always=tuple(
            {"x-mq-date-time": each, "authorization": each} for each in values.WIRE_EXAMPLES
        ),
    ),
    Decoder(
        "gateway: the file of keys",
        values.json_of(
            st.lists(
                values.objects(access_key=values.TEXTS, secret_key=values.TEXTS, token=values.TEXTS)
            )
        ),
        in_file(GatewayCredentials.load),
        (errors.InvalidArgument,),
        ("qmq.gateway.clients.GatewayCredentials.load",),
        always=values.each_change([{"access_key": "a", "secret_key": "b", "token": "c"}]),
    ),
)

# --- HTTP, CloudEvents, server-sent events --------------------------------------------------------

ATTRIBUTES: Final = (
    *("ce-id", "ce-source", "ce-type", "ce-specversion", "ce-partitionkey"),
    *("content-type", "ce-x"),
)
EVENT: Final = {"id": "1", "source": "/s", "type": "t", "specversion": "1.0"}
EVENTS: Final = values.objects(
    data=values.JSON_VALUES,
    data_base64=values.BASE64,
    datacontenttype=st.just("text/plain"),
    x=values.TEXTS,
    partitionkey=values.TEXTS,
).map(lambda fields: {**EVENT, **fields})
MORE_EVENT: Final = {
    **EVENT,
    "data": {"a": [1]},
    "datacontenttype": "text/plain",
    "x": "y",
    "partitionkey": "k",
}
MEDIA: Final = st.sampled_from(
    [cloud_event.STRUCTURED, cloud_event.BATCH, "application/json", "text/plain", ""]
)


def event_headers(more: Mapping[str, bytes]) -> dict[str, bytes]:
    return {"ce-id": b"1", "ce-source": b"s", "ce-type": b"t", "ce-specversion": b"1.0", **more}


HTTP: Final = (
    Decoder(
        "HTTP: a message in an answer",
        values.received(
            values.headers(*ATTRIBUTES) | values.headers(*ATTRIBUTES).map(event_headers)
        ),
        lambda message: shown(site.message_fields("r", message)),
        (),
        ("qmq.integrations.cloud_event.Event.structured",),
        always=(
            *values.each_received(dict.fromkeys(ATTRIBUTES, b"1")),
            *values.each_received(event_headers({})),
        ),
    ),
    Decoder(
        "HTTP: a request that sends, and CloudEvents in each mode",
        st.tuples(
            MEDIA,
            st.dictionaries(st.sampled_from(ATTRIBUTES), values.TEXTS),
            values.json_of(EVENTS | st.lists(EVENTS, max_size=2)),
        ),
        lambda given: [
            each.headers
            for each in requests.messages_of({**given[1], "content-type": given[0]}, given[2])
        ],
        (errors.InvalidArgument,),
        ("qmq.integrations.http.requests._json", "qmq.integrations.cloud_event.of_structured"),
        always=tuple(
            (media, {}, each)
            for media in (cloud_event.STRUCTURED, cloud_event.BATCH, "")
            for each in values.each_change(MORE_EVENT)
        ),
    ),
    Decoder(
        "HTTP: a request that receives",
        values.json_of(
            values.objects(
                messages_max=values.NUMBERS, wait_s=values.NUMBERS, invisible_s=values.NUMBERS
            )
        ),
        requests.receive_of,
        (errors.InvalidArgument,),
        ("qmq.integrations.http.requests._number",),
        always=values.each_change({"messages_max": 1, "wait_s": 1, "invisible_s": 1}),
    ),
    Decoder(
        "HTTP: a request that settles",
        values.json_of(
            values.objects(
                receipts=st.lists(values.TEXTS, min_size=1),
                verdict=st.just("nack"),
                delay_s=values.NUMBERS,
                error=values.TEXTS,
            )
        ),
        requests.settle_of,
        (errors.InvalidArgument,),
        always=values.each_change(
            {"receipts": ["r"], "verdict": "nack", "delay_s": 1, "error": "e"}
        ),
    ),
    Decoder(
        "HTTP: options of a request that sends",
        st.dictionaries(st.sampled_from(["key", "delay_s"]), values.TEXTS),
        lambda query: requests.send_options(query, ()),
        (errors.InvalidArgument,),
        always=tuple({name: each} for name in ("key", "delay_s") for each in values.TEXT_EXAMPLES),
    ),
    Decoder(
        "server-sent events: Last-Event-ID",
        values.TEXTS
        | st.lists(st.tuples(values.DIGITS, values.DIGITS), min_size=1, max_size=2).map(
            lambda each: ",".join(f"g1/{a}/{b}" for a, b in each)
        ),
        lambda text: starlette.position_text(starlette.positions_of(text)),
        (errors.InvalidArgument,),
        (),
        always=(
            *values.TEXT_EXAMPLES,
            *[f"g1/{each}/5" for each in values.TEXT_EXAMPLES],
            *[f"g1/0/{each}" for each in values.TEXT_EXAMPLES],
        ),
    ),
)

# --- task queues ----------------------------------------------------------------------------------

TASK: Final = {
    **{
        "task": "t",
        "id": "1",
        "eta": "2027-01-01T00:00:00",
        "expires": None,
        "timelimit": [1, None],
        "retries": 1,
        "group": None,
    },
    **{
        "group_index": 1,
        "stamped_headers": ["a"],
        "stamps": {"a": ["b"]},
        "shadow": "s",
        "argsrepr": "()",
        "ignore_result": False,
    },
}
FOLLOWING: Final[dict[str, Any]] = {
    "callbacks": None,
    "errbacks": [{"task": "t"}],
    "chain": None,
    "chord": {"task": "t"},
}
TASK_BODY: Final = [[1], {"a": 1}, FOLLOWING]
FIRST_PROTOCOL: Final = {
    **TASK,
    **FOLLOWING,
    "args": [1],
    "kwargs": {"a": 1},
    "utc": True,
    "taskset": "g",
}
KOMBU: Final = {
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "headers": TASK,
    "properties": {
        "expiration": "5000",
        "delivery_info": {"exchange": "e", "routing_key": "r"},
        "body_encoding": None,
    },
}


DRAMATIQ: Final = {
    **{"queue_name": "q", "actor_name": "a", "message_id": "1", "message_timestamp": 5},
    **{
        "args": [1],
        "kwargs": {"a": 1},
        "options": {"retries": 1, "eta": 5, "throws": None, "time_limit": 5, "max_retries": 1},
    },
}


def unpacked(given: tuple[bytes, bytes, int]) -> None:
    body, header, created_ms = given
    found = envelope.unpacked(body, header, tag="t", attempt=1)
    envelope.expired(found, created_ms, 10**13)
    envelope.task_of(found)
    in_celery(found)


class TaskVerdicts(virtual.Channel):
    """A channel to which verdicts are given."""

    do_restore = False

    def __init__(self) -> None:
        """No connection."""

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        return body

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Nothing is there to settle."""

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Nothing is there to settle."""


def in_celery(found: dict[str, Any]) -> None:
    """What passes our checks ends no worker of Celery."""
    message = virtual.Message(found, channel=TaskVerdicts())  # type: ignore[no-untyped-call]
    message.accept = {"application/json"}
    try:
        message.payload  # noqa: B018
    except Exception:  # the channel sets such a message aside before the worker has it
        return
    envelope.check_payload(message)
    run_in_celery(message)


def in_dramatiq(body: bytes) -> None:
    """What passes our check ends no thread of a worker of Dramatiq."""
    run_in_dramatiq(dramatiq.decoded(body, "q"))


async def faststream(message: Any) -> None:
    await decode(await parse_message(message))


TASKIQ: Final = {
    **{
        "task_id": "1",
        "task_name": "t",
        "labels": {"delay": "5", "x": "y"},
        "labels_types": {"delay": 1, "x": 5},
    },
    **{"args": [1], "kwargs": {"a": 1}},
}
FORMATTER: Final = taskiq.QmqBroker().formatter


def taskiq_task(body: bytes) -> None:
    """What a worker does with a message: it looks for the task by its name, and says so if it has
    none.
    """
    for own_id in ("", "0" * 32):
        name, _ = taskiq.task_of(FORMATTER, body, own_id)
        shown(f"no worker knows task {name!r}")


TASKS: Final = (
    Decoder(
        "Taskiq: a message",
        values.json_of(values.changed(TASKIQ)),
        taskiq_task,
        (errors.InvalidArgument,),
        ("qmq.integrations.taskiq.task_of",),
        always=values.each_change(TASKIQ),
    ),
    Decoder(
        "kombu and Celery: a message",
        st.tuples(
            values.BYTES
            | values.json_of(values.changed(TASK_BODY) | values.changed(FIRST_PROTOCOL)),
            values.json_of(values.changed(KOMBU)),
            values.TIMES_MS,
        ),
        unpacked,
        (envelope.NotKombu,),
        ("qmq.integrations.kombu.envelope.unpacked", "qmq.integrations.kombu.envelope.expired"),
        always=(
            *[(json.dumps(TASK_BODY).encode(), each, 5) for each in values.each_change(KOMBU)],
            *[(each, json.dumps(KOMBU).encode(), 5) for each in values.each_change(TASK_BODY)],
            *[
                (each, json.dumps({**KOMBU, "headers": {}}).encode(), 5)
                for each in values.each_change(FIRST_PROTOCOL)
            ],
            *[(each, json.dumps(KOMBU).encode(), 5) for each in values.BYTE_EXAMPLES],
        ),
    ),
    Decoder(
        "Celery: a command of remote control",
        values.json_of(
            values.objects(method=st.just("revoke"), arguments=values.objects(task_id=values.TEXTS))
        ),
        envelope.revoked_tasks,
        (),
        ("qmq.integrations.kombu.envelope.revoked_tasks",),
        always=values.each_change({"method": "revoke", "arguments": {"task_id": ["a"]}}),
    ),
    Decoder("kombu: a queue's name", values.TEXTS, envelope.name_of, always=values.TEXT_EXAMPLES),
    Decoder(
        "Dramatiq: a message",
        values.json_of(values.changed(DRAMATIQ)),
        in_dramatiq,
        (DecodeError,),
        ("qmq.integrations.dramatiq.decoded",),
        always=values.each_change(DRAMATIQ),
    ),
    Decoder(
        "Django: a task's message",
        values.BYTES | st.text("0aZ", min_size=32, max_size=32).map(str.encode),
        lambda body: shown(task_id(body)),
        (qmq.Reject,),
        ("qmq.integrations.django.task_ids.task_id",),
        always=(
            *values.BYTE_EXAMPLES,
            b"a" * 32,
            b"\xff" * 32,
            b"\x00" * 32,
            "\u00b2".encode() * 16,
        ),
    ),
    Decoder(
        "FastStream: a message",
        values.received(
            values.headers(
                "content-type",
                "correlation_id",
                "reply_to",
                text=st.just("application/json") | values.WIRE_TEXTS,
            )
        ),
        lambda message: asyncio.run(faststream(message)),
        (payloads.Undecodable,),
        always=values.each_received(
            {"content-type": b"application/json", "correlation_id": b"1", "reply_to": b"r"}
        ),
    ),
)

# --- the console ----------------------------------------------------------------------------------

MASKED: Final = frozenset({"a", "card"})
FORM: Final = st.dictionaries(
    st.sampled_from(
        ["subject", "error", "since", "id", "rate", "max", "set", "unset", "body", "edit"]
    ),
    values.WIRE_TEXTS
    | st.sampled_from(
        ["a.b=1", "a=[1", 'a="\\ud800"', "a=" + "[" * 5_000, "a.=1", "body", "a=" + "9" * 5_000]
    ),
)

EACH_FORM: Final = tuple(
    {name: each}
    for name in ("subject", "error", "since", "id", "rate", "max", "set", "unset", "body", "edit")
    for each in (
        *values.WIRE_EXAMPLES,
        "a.b=1",
        "a=[1",
        'a="\\ud800"',
        "a=" + "[" * 5_000,
        "a.=1",
        "body",
        "a=" + "9" * 5_000,
    )
)


def on_a_page(message: Any) -> None:
    for masked in (MASKED, frozenset[str]()):
        found = shown_message(message, masked)
        subject.event("message", subject.message_fields(found), "1")
        shown([found.key, found.headers, found.body.text, found.body.line])
        MessageQuery(key="k", header="h=v", content="c").wants(message, masked)


def replayed(given: tuple[dict[str, str], Any]) -> None:
    form, message = given
    found = letter_of(message)
    for each in form.values():
        edit = tolerant(lambda text: letters.LetterEdit.parse([text], [text]))(each)
        if isinstance(edit, letters.LetterEdit):
            shown(edit.options())
            tolerant(lambda edit: body_view(edit.of(found).body, MASKED))(edit)
    plan = ReplayPlan.of(form)
    LetterFilter.of(form).choose()(found)
    edit = plan.edit()
    shown(edit.options())


def on_the_wire(sequence: int) -> bytes:
    """A sequence as a request to a broker carries it."""
    return sequence.to_bytes(8, "little", signed=True)


def provider(answers: tuple[bytes, bytes]) -> None:
    """A flow whose identity provider answers this; the second answer is that to a request for
    tokens.
    """
    flow = OidcFlow(
        OidcConfig("https://idp", "console", "https://c/cb"),
        ask=lambda _, form: answers[form is not None],
    )
    flow.renewed(OidcTokens("shown", "refresh"))


DESCRIPTION: Final = {
    "issuer": "https://idp",
    **dict.fromkeys(("authorization_endpoint", "token_endpoint", "jwks_uri"), "https://idp/x"),
}
ANSWER: Final = {"access_token": "a", "id_token": "i", "refresh_token": "r", "expires_in": 5}

CONSOLE: Final = (
    Decoder(
        "console: a message",
        values.browsed(),
        on_a_page,
        (),
        (
            "qmq.console.bodies._fields_of",
            "qmq.console.bodies._flat",
            "qmq.console.bodies.text_or_hex",
        ),
        always=values.each_browsed(),
    ),
    Decoder(
        "console: a delayed message",
        delayed(),
        lambda message: (delays.next_runs(message), body_view(message.body or b"", MASKED)),
        always=each_delayed(),
    ),
    Decoder(
        "console: a place in a subject",
        values.TEXTS
        | st.tuples(*[values.DIGITS] * 3).map(lambda each: f"{each[0]},{each[1]}:{each[2]}:g1"),
        lambda text: [on_the_wire(at) for at in ReadPlace.parse(text).positions.values()],
        (errors.InvalidArgument,),
        (),
        always=(
            *values.TEXT_EXAMPLES,
            *[f"{each},0:0:g1" for each in values.TEXT_EXAMPLES],
            *[f"0,{each}:{each}:g1" for each in values.TEXT_EXAMPLES],
        ),
    ),
    Decoder(
        "console: a time",
        values.TIME_TEXTS | values.WIRE_TEXTS,
        lambda text: time_of(moment_ms(text)),
        (errors.InvalidArgument,),
        ("qmq.console.pages.message.moment_ms",),
        always=values.TEXT_EXAMPLES,
    ),
    Decoder(
        "console: a form for dead letters, and the letters",
        st.tuples(FORM, values.received(st.just(LETTER_HEADERS) | LETTERS)),
        replayed,
        (errors.InvalidArgument,),
        (
            "qmq.client.dead_letters.letter_of",
            "qmq.operations.letters._field",
            "qmq.operations.letters._object",
            "qmq.operations.letters.LetterEdit.options",
        ),
        always=tuple(
            (form, message)
            for form in EACH_FORM
            for message in values.each_received(LETTER_HEADERS)[:: len(EACH_FORM)]
        ),
    ),
    Decoder(
        "console: the identity provider's answers",
        st.tuples(
            st.just(json.dumps(DESCRIPTION).encode()) | values.BYTES,
            values.json_of(
                values.objects(
                    access_token=values.TEXTS,
                    id_token=values.TEXTS,
                    refresh_token=values.TEXTS,
                    expires_in=st.just(10**400),
                )
            ),
        ),
        provider,
        (errors.NotAuthenticated, errors.InvalidArgument),
        ("qmq.console.oidc._object",),
        always=(
            *[(each, b"{}") for each in values.each_change(DESCRIPTION)],
            *[(json.dumps(DESCRIPTION).encode(), each) for each in values.each_change(ANSWER)],
        ),
    ),
)
