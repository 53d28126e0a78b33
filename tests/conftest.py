"""Fixtures (a node in this process, a node in a separate process, etcd), and the choice and order
of the tests that run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support import NodeProcess, forms, needs, node_config, running
from support.etcd_process import EtcdCluster, EtcdProcess
from support.secret_scan import pytest_runtest_makereport as pytest_runtest_makereport

from qmq.broker.maintenance import EXIT_FATAL
from qmq.node.dev_node import Node

SYSTEM = Path(__file__).parent / "system"
# A shell that starts the tests in the background has SIGINT ignored, and processes that tests start
# would inherit that.
for each in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(each) is signal.SIG_IGN:
        signal.signal(each, signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL)

settings.register_profile("qmq", deadline=None, max_examples=forms.examples(100), derandomize=False)
settings.load_profile("qmq")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--no-skips`: for CI, which installs what tests need."""
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="fail if a test is skipped, unless it needs an engine or the history",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Print why a broker stopped this process. Captured output would be lost with the process."""
    capture, stop = config.pluginmanager.getplugin("capturemanager"), os._exit

    def shown(status: int) -> None:
        if status == EXIT_FATAL and capture is not None:
            capture.suspend_global_capture()
            sys.stderr.write("".join(capture.read_global_capture()))
            sys.stderr.flush()
        stop(status)

    os._exit = shown  # type: ignore[assignment]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Distribute tests to workers as pytest-xdist's loadgroup does, without its cost for thousands
    of tests.

    Whenever a test ends, xdist 3.8 counts all tests that a worker ever got, which took 55 s of a
    run of 5,700 tests. This scheduler forgets a finished unit.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling
    from xdist.workermanage import WorkerController

    class GroupScheduling(LoadGroupScheduling):
        def mark_test_complete(
            self, node: WorkerController, item_index: int, duration: float = 0
        ) -> None:
            unit = self._split_scope(self.registered_collections[node][item_index])
            super().mark_test_complete(node, item_index, duration)
            given: dict[str, Any] = self.assigned_work[node]
            if all(given[unit].values()):
                del given[unit]

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this form leaves out (see support/forms.py), and put first what takes long."""
    left_out = outside_form(items)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [each for each in items if each not in left_out]
    if hasattr(config, "workerinput"):
        items.sort(key=place_in_queue)


def outside_form(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those that this form leaves out."""
    if forms.FORM == "all":
        return set()
    left_out: set[pytest.Item] = set()
    sampled: set[Path] = set()
    for item in items:
        if is_named(item):
            continue
        if is_too_long(item) or (
            is_sampled(item) and item.path in sampled and not item.get_closest_marker("smoke")
        ):
            left_out.add(item)
        elif is_sampled(item):
            sampled.add(item.path)
    return left_out


def is_named(item: pytest.Item) -> bool:
    """Whether the command line names this test or its file."""
    config = item.config
    named = [each.partition("::") for each in config.args]
    return any(
        colons or Path(config.invocation_params.dir, path) == item.path for path, colons, _ in named
    )


def is_too_long(item: pytest.Item) -> bool:
    return bool(
        item.get_closest_marker("longest")
        or (forms.FORM == "gate" and item.get_closest_marker("long"))
    )


def is_sampled(item: pytest.Item) -> bool:
    group = item.get_closest_marker("xdist_group")
    return bool(
        item.get_closest_marker("sampled")
        or (group and group.args[0] in forms.SAMPLED_GROUPS)
        or SYSTEM in item.path.parents
    )


def place_in_queue(item: pytest.Item) -> int:
    """The groups run first, since each runs in one worker from its first test to its last; then
    whole systems; then the others.
    """
    if item.get_closest_marker("xdist_group"):
        return 0
    return 1 if SYSTEM in item.path.parents else 2


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons of skipped tests, a line each, and the variables that repeat the run."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, count in sorted(Counter(reason_of(each) for each in skipped).items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    terminalreporter.write_line(
        f"repeat with QMQ_TEST_FORM={forms.FORM} QMQ_TEST_SEED={forms.SEED}"
    )


def reason_of(skipped: pytest.TestReport | pytest.CollectReport) -> str:
    told = skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else str(skipped.longrepr)
    return told.removeprefix("Skipped: ")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `--no-skips`, a test that was skipped fails the run; the summary lists each with its
    reason.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--no-skips") or reporter is None:
        return
    if [
        each
        for each in reporter.stats.get("skipped", ())
        if not {"docker", "history"} & set(each.keywords)
    ]:
        reporter.write_line(
            "tests were skipped that are not to be skipped here: see the list below", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary state folder, so that clients do not read or write the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QMQ_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node on an empty folder."""
    async with running(node_config(tmp_path / "node")) as found:
        yield found


@pytest.fixture
def node_process(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node process, not started yet; killed at the end."""
    found = NodeProcess(tmp_path / "node")
    yield found
    found.kill()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """An etcd for tests that do not disturb etcd. Each test uses its own namespace."""
    yield from _etcd_on(tmp_path_factory.mktemp("etcd"))


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd for a test that disturbs it."""
    yield from _etcd_on(tmp_path / "etcd")


def _etcd_on(folder: Path) -> Iterator[EtcdProcess]:
    needs.need_etcd()
    server = EtcdProcess(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def etcd_cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members, for a test that disturbs them."""
    needs.need_etcd()
    found = EtcdCluster(tmp_path / "etcd", 3)
    try:
        found.start()
        yield found
    finally:
        found.stop()
