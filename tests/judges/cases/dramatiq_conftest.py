"""The fixtures of Dramatiq's tests, with a broker on QMQ; each test has its own queues."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from uuid import uuid4

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.middleware import default_middleware
from dramatiq.rate_limits import RateLimiterBackend
from dramatiq.rate_limits.backends import StubBackend as RateLimits
from dramatiq.results import ResultBackend
from dramatiq.results.backends import StubBackend as Results

from qmq.integrations.dramatiq import DramatiqBroker


class JudgedBroker(DramatiqBroker):
    """Takes the word `fail_fast`, by which a join raises the error of a task that failed. Only
    Dramatiq's broker in memory has it.
    """

    def join(
        self,
        queue_name: str,
        *,
        interval: int = 50,
        timeout: int | None = None,
        fail_fast: bool | None = None,
    ) -> None:
        super().join(queue_name, interval=interval, timeout=timeout)


@pytest.fixture
def stub_broker() -> Iterator[DramatiqBroker]:
    name = uuid4().hex
    broker = JudgedBroker(
        os.environ["QMQ_JUDGED"],
        group=name,
        prefix=f"{name}.",
        middleware=[each() for each in default_middleware if each.__name__ != "Prometheus"],
    )
    broker.emit_after("process_boot")
    dramatiq.set_broker(broker)
    yield broker
    broker.flush_all()
    broker.close()


@pytest.fixture
def redis_broker(stub_broker: DramatiqBroker) -> DramatiqBroker:
    return stub_broker


@pytest.fixture
def stub_worker(stub_broker: DramatiqBroker) -> Iterator[Worker]:
    made = Worker(stub_broker, worker_timeout=100, worker_threads=32)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def redis_worker(stub_worker: Worker) -> Worker:
    return stub_worker


@pytest.fixture
def info_logging() -> Iterator[None]:
    logging.getLogger().setLevel(logging.INFO)
    yield
    logging.getLogger().setLevel(logging.DEBUG)


@pytest.fixture
def stub_rate_limiter_backend() -> RateLimiterBackend:
    return RateLimits()


@pytest.fixture
def rate_limiter_backend(stub_rate_limiter_backend: RateLimiterBackend) -> RateLimiterBackend:
    return stub_rate_limiter_backend


@pytest.fixture
def stub_result_backend() -> ResultBackend:
    return Results()


@pytest.fixture
def result_backend(stub_result_backend: ResultBackend) -> ResultBackend:
    return stub_result_backend


@pytest.fixture
def redis_result_backend(stub_result_backend: ResultBackend) -> ResultBackend:
    return stub_result_backend


@pytest.fixture
def result_backends(stub_result_backend: ResultBackend) -> dict[str, ResultBackend]:
    return {"stub": stub_result_backend}
