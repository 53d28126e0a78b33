"""kombu's own integration tests, which it runs against RabbitMQ, Redis and its other brokers.

Other projects' own tests, from their source distributions, which `scripts/judges` fetches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest
from support import needs

FOLDER = needs.CACHE / "judges"


def judging(package: str, path: str) -> ModuleType:
    """A module of the source distribution of the version that is installed. Skips if it is not
    there.
    """
    try:
        file = FOLDER / f"{package}-{version(package)}" / path
    except PackageNotFoundError:
        pytest.skip(f"needs {package}", allow_module_level=True)
    if not file.is_file():
        pytest.skip(f"needs {package}'s own tests: scripts/judges", allow_module_level=True)
    spec = spec_from_file_location(f"{package}_judge", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kombu = pytest.importorskip("kombu", reason="needs kombu: pip install 'qmq[celery]'")
common = judging("kombu", "t/integration/common.py")
import qmq.integrations.kombu  # noqa: E402

pytestmark = pytest.mark.long
assert qmq.integrations.kombu.Transport


@pytest.fixture
def options() -> dict[str, Any]:
    return {}


@pytest.fixture
def connection(address: str, options: dict[str, Any]) -> Iterator[Any]:
    made = kombu.Connection(f"qmq://{address}", transport_options=options)
    yield made
    made.close()


@pytest.fixture
def invalid_connection() -> Any:
    return kombu.Connection("qmq://127.0.0.1:1")


@pytest.fixture
def failover_connection(address: str) -> Iterator[Any]:
    made = kombu.Connection(f"qmq://127.0.0.1:1;qmq://{address}", failover_strategy="round-robin")
    yield made
    made.close()


class TestBasicFunctionality(common.BasicFunctionality):  # type: ignore[name-defined,misc]
    pass


class TestExchangeTypes(common.BaseExchangeTypes):  # type: ignore[name-defined,misc]
    pass


class TestTimeToLive(common.BaseTimeToLive):  # type: ignore[name-defined,misc]
    pass


class TestPriority(common.BasePriority):  # type: ignore[name-defined,misc]
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"priority_steps": [0, 3, 6, 9]}


class TestMessage(common.BaseMessage):  # type: ignore[name-defined,misc]
    pass


class TestEventLoop(common.BaseEventLoop):  # type: ignore[name-defined,misc]
    pass


class TestFailover(common.BaseFailover):  # type: ignore[name-defined,misc]
    pass
