"""One Spark session for all tests that need one: a JVM takes seconds to start. Such tests run in
one process (the xdist group `spark`).
"""

from __future__ import annotations

from collections.abc import Iterator

import fast_session
import pytest
from file_support import traffic  # noqa: F401 - a fixture
from pyspark.sql import SparkSession
from pyspark_qmq import session


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add tests to the group before xdist reads groups. A test that is already in a group stays
    there.
    """
    if (
        "spark" in getattr(item, "fixturenames", ())
        and item.get_closest_marker("xdist_group") is None
    ):
        item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session with two threads; tables go to a folder of this run."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    conf = fast_session.conf() | {"spark.sql.warehouse.dir": str(warehouse)}
    found = session.session("tests", master=fast_session.MASTER, conf=conf)
    yield found
    found.stop()


@pytest.fixture(scope="session")
def connect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Spark Connect server for the xdist group `connect`."""
    with fast_session.connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url
