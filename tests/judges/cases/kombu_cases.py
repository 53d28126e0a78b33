"""Subclasses of the classes of kombu's tests, as kombu has for each of its transports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import kombu
import pytest
from t.integration import common

from qmq.integrations.kombu import Transport

ADDRESS = os.environ["QMQ_JUDGED"]
assert Transport


@pytest.fixture
def options() -> dict[str, Any]:
    return {}


@pytest.fixture
def connection(options: dict[str, Any]) -> Iterator[Any]:
    made = kombu.Connection(f"qmq://{ADDRESS}", transport_options=options)
    yield made
    made.close()


@pytest.fixture
def invalid_connection() -> Any:
    return kombu.Connection("qmq://127.0.0.1:1")


@pytest.fixture
def failover_connection() -> Iterator[Any]:
    made = kombu.Connection(f"qmq://127.0.0.1:1;qmq://{ADDRESS}", failover_strategy="round-robin")
    yield made
    made.close()


class TestBasicFunctionality(common.BasicFunctionality):
    pass


class TestExchangeTypes(common.BaseExchangeTypes):
    pass


class TestTimeToLive(common.BaseTimeToLive):
    pass


class TestPriority(common.BasePriority):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"priority_steps": [0, 3, 6, 9]}


class TestMessage(common.BaseMessage):
    pass


class TestEventLoop(common.BaseEventLoop):
    pass


class TestFailover(common.BaseFailover):
    pass
