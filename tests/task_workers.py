"""Parts of the workers of Celery and Dramatiq, without processes and threads. They read a message as a worker does, and a test judges by
them what a decoder lets through: an error that comes out of them would end a worker, or keep a place of its pool for ever.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pickle import dumps
from queue import PriorityQueue
from time import monotonic
from types import SimpleNamespace
from typing import Any

from billiard.pool import TimeoutHandler
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.worker import state
from celery.worker.consumer import Consumer
from dramatiq import Actor, MessageProxy
from dramatiq.broker import Consumer as DramatiqConsumer
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import default_middleware
from dramatiq.worker import ConsumerThread, WorkerThread
from kombu.asynchronous.timer import Timer


class FullPool:
    """A pool that does with a task what Celery's pool of processes does before a process has it."""

    def apply_async(self, target: object, args: Any, soft_timeout: Any, timeout: Any, **callbacks: Any) -> object:
        dumps(args)
        for each in (soft_timeout, timeout):
            if each:
                Timer().call_after(each, print)
        job = SimpleNamespace(_time_accepted=monotonic(), _soft_timeout=soft_timeout, _timeout=timeout, ready=lambda: True)
        next(TimeoutHandler([], {1: job}, None, None).handle_timeouts(), None)
        return job


class TaskConsumer(Consumer):
    """Celery's consumer of tasks, whose pool has a place for each."""

    def __init__(self, app: Celery) -> None:
        self.app, self.hostname, self.pool, self.hub = app, "worker@here", FullPool(), None
        self.strategies, self.task_buckets, self.on_task_message = {}, defaultdict(lambda: None), set()
        self.connection_errors, self.disable_rate_limits, self.restart_count = (), True, 0
        self._maximum_prefetch_restored = True
        self.controller = SimpleNamespace(state=state)
        self.event_dispatcher = SimpleNamespace(enabled=True, send=lambda name, **fields: json.dumps([name, fields]).encode())
        self.timer = SimpleNamespace(call_at=lambda time, function, arguments, priority: function(*arguments))
        self.qos = SimpleNamespace(increment_eventually=int, decrement_eventually=int)
        self.on_task_request = self.run
        self.has_place = False
        self.update_strategies()

    def run(self, request: Any) -> None:
        """What a worker does with a request that has a place of the pool, also when it came too late or was revoked meanwhile."""
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
    """Hand a message of kombu to a worker. Raises what would end a pool's place; the channel sets aside a message that fails before."""
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

    broker = StubBroker(middleware=[each() for each in default_middleware if each.__name__ != "Prometheus"])
    Actor(work, broker=broker, actor_name="a", queue_name="q", priority=0, options={})
    waiting: PriorityQueue[Any] = PriorityQueue()
    consumer = ConsumerThread(broker=broker, queue_name="q", prefetch=1, work_queue=waiting, worker_timeout=1)
    consumer.consumer = MessageVerdicts()
    return broker, consumer, WorkerThread(broker=broker, consumers={"q": consumer}, work_queue=waiting, worker_timeout=1)


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
