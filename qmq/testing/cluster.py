"""A whole cluster in the test's own process and event loop. See docs/TESTING.md.

    broker-1, broker-2 ...    replicas of the broker groups: `brokers` of group-1, then as many of
                              group-2, and so on
    delay-1 ...               replicas of the delay group `delay`
    meta                      the metaserver
    coordination, clients     the coordination store; the application. Both can be cut off, but not
                              killed

The code is that of production: brokers on real files, replication, metaserver, delay server, gRPC.
Ports are replaced by sockets in a temporary folder, etcd by the store of `qmq dev`, and elections
take tenths of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from qmq_coordination.embedded import EmbeddedStore
from qmq_replication.driver import Driver

from qmq.blocking import beside
from qmq.client.client import Client
from qmq.errors import InvalidArgument, NotConnected, StorageError
from qmq.log.log_config import LogConfig
from qmq.node import process
from qmq.process.event_loop import Clock, SystemClock
from qmq.rpc.network import Network, TokenNetwork
from qmq.security.tokens import Token, token_source
from qmq.testing.machine import Machine, Metaserver, MortalDisk, ReplicaMachine, Site
from qmq.testing.parties import CLIENTS, COORDINATION, Parties
from qmq.testing.virtual_clock import VirtualClock

SERVERS: Final = ("broker", "coordination", "delay", "meta", "node", "replication", "rpc")
_LEVEL: Final = logging.ERROR - 1
"""An unusual level, by which this module recognises its own setting."""
_users = [0]


@contextmanager
def quiet() -> Iterator[None]:
    """Let servers log errors only, unless the test set a level for their loggers. May be entered
    several times concurrently.
    """
    loggers = [logging.getLogger(f"qmq.{each}") for each in SERVERS]
    _users[0] += 1
    for logger in loggers:
        if logger.level == logging.NOTSET:
            logger.setLevel(_LEVEL)
    try:
        yield
    finally:
        _users[0] -= 1
        for logger in loggers:
            if not _users[0] and logger.level == _LEVEL:
                logger.setLevel(logging.NOTSET)


log = logging.getLogger("qmq.testing")

META: Final = "meta"
DELAY: Final = "delay"
WAIT_S: Final = 20.0
"""The longest real time in which a group must have a master."""
CLOSE_S: Final = 1.0
"""The time limit for closing a client; after it, unsent messages are dropped."""
KEEP_MS: Final = 100 * 366 * 24 * 3_600_000
"""A hundred years, so that advancing the clock by years deletes no messages."""
REPLICAS_MAX: Final = 7
_POLL_S: Final = 0.005
_FOLDER_CHARS_MAX: Final = 60
"""The longest path of a temporary folder in which the paths of sockets are short enough."""

_given_up: Final[list[TestCluster]] = []
"""Clusters whose loop ended before them: their gRPC objects must not be garbage-collected."""


class TestCluster:
    """Use it with `async with`; the end of the block stops everything and deletes the files.

    There are `groups` broker groups of `brokers` replicas each; `delay` says whether there is a
    delay group, or how many replicas it has. With `clock=virtual()` the test moves the time; the
    default is the machine's clock. `log` configures the brokers' logs; unless it says otherwise
    messages are kept for a hundred years. `make_disk` gives each start of a machine its disk, by
    the machine's name: for tests of QMQ itself, on one that is slow or fails. `make_driver` and
    `make_store` make the replicas' drivers and the coordination store, for tests that take down
    what these do.

    Raises InvalidArgument.
    """

    __test__ = False  # pytest must not collect this class as tests

    def __init__(
        self,
        *,
        brokers: int = 1,
        groups: int = 1,
        delay: bool | int = True,
        clock: VirtualClock | None = None,
        log: LogConfig | None = None,
        make_disk: Callable[[str], MortalDisk] = lambda _: MortalDisk(),
        make_driver: Callable[..., Driver] = Driver,
        make_store: Callable[[Callable[[], float]], EmbeddedStore] = lambda monotonic_s: (
            EmbeddedStore(monotonic_s=monotonic_s)
        ),
    ) -> None:
        for what, count, least in (
            ("brokers", brokers, 1),
            ("groups", groups, 1),
            ("delay", int(delay), 0),
        ):
            if not least <= count <= REPLICAS_MAX:
                raise InvalidArgument(f"{what} must be {least} to {REPLICAS_MAX}, not {count}")
        self._shape = _shape(brokers, groups, int(delay))
        self._virtual = clock
        self._log = log or LogConfig(retention_ms=KEEP_MS)
        self._make_disk = make_disk
        self._make_driver, self._make_store = make_driver, make_store
        self._parties = Parties()
        self._machines: dict[str, Machine] = {}
        self._meta: Metaserver
        self.machine_clock: Clock
        """The clock of all machines, also where `clock` was not given."""
        self._clients: list[Client] = []
        self._strangers: list[str] = []
        """The machines that have only clients."""
        self.failures: list[str] = []
        """Replicas that stopped by themselves, with the causes:
        the end of the cluster raises them.
        """
        self._ending: contextlib.AsyncExitStack | None = None
        self._canary: asyncio.Task[Any]
        """A sleeping task. If the task is cancelled, the whole loop is ending."""

    # --- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> TestCluster:
        """Start, and wait until each group has a master. A cluster is entered once."""
        if self._ending is not None:
            raise InvalidArgument("a TestCluster can be entered only once: make another one")
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._ending = stack.pop_all()
        return self

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        if self._virtual is not None:
            self._virtual.attach(asyncio.get_running_loop())
        clock: Clock = self._virtual or SystemClock()
        stack.enter_context(quiet())
        folder = _temporary_folder()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store = self._make_store(lambda: clock.monotonic_ms() / 1000)
        stack.push_async_callback(store.close)
        self._canary = asyncio.create_task(asyncio.Event().wait())
        stack.push_async_callback(self._kill_all)
        site = Site(
            folder, store, self._parties, clock, self._log, self._make_disk, self._make_driver
        )
        self.machine_clock = clock
        self._meta = self._machines[META] = Metaserver(site, META)
        for group, names in self._shape.items():
            settings = process.DEFAULT if group == DELAY else None
            for name in names:
                self._machines[name] = ReplicaMachine(
                    site, group, name, names, settings=settings, failed=self._failed
                )
        started = await asyncio.gather(
            *[machine.start() for machine in self._machines.values()], return_exceptions=True
        )
        for failure in started:
            if failure is not None:
                raise failure
        for group in self._shape:
            await self.until_master(group)
        stack.push_async_callback(self._close_clients)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop everything. Raises StorageError if a server stopped by itself, unless the test
        failed already.
        """
        ending, self._ending = self._ending, contextlib.AsyncExitStack()
        assert ending is not None
        await ending.aclose()
        if self.failures and error is None:
            raise StorageError("; ".join(self.failures))

    async def _is_alone(self) -> bool:
        """True if all other tasks of the loop were cancelled, as by a runner that aborts a test.
        Only gRPC's servers are stopped then: they cannot be cancelled safely.
        """
        await asyncio.sleep(0)
        return self._canary.done()

    async def _close_clients(self) -> None:
        if await self._is_alone():
            return
        await asyncio.gather(*[self._close_client(each) for each in self._clients])

    async def _close_client(self, client: Client) -> None:
        try:
            await asyncio.wait_for(client.close(), CLOSE_S)
        except TimeoutError:
            log.info(
                "a client could not send or give back all of its messages within %s s", CLOSE_S
            )

    async def _kill_all(self) -> None:
        if await self._is_alone():
            for machine in self._machines.values():
                machine.shut()
            _given_up.append(self)
            return
        self._canary.cancel()
        await asyncio.gather(self._canary, return_exceptions=True)
        await asyncio.gather(*[machine.kill() for machine in self._machines.values()])

    def _failed(self, name: str, cause: BaseException) -> None:
        log.error("%s stopped by itself", name, exc_info=cause)
        self.failures.append(f"{name} stopped by itself: {type(cause).__name__}: {cause}")

    # --- parts ------------------------------------------------------------------------------------

    @property
    def clock(self) -> VirtualClock:
        """The clock that the cluster was made with. Raises InvalidArgument if there is none."""
        if self._virtual is None:
            raise InvalidArgument(
                "this cluster uses the machine's clock, which cannot be moved: use "
                "TestCluster(clock=virtual())"
            )
        return self._virtual

    @property
    def address(self) -> str:
        """The metaserver's address, for clients in this process that are independent of
        `client`: `unix:/path/socket`.
        """
        self._require_running()
        return self._meta.address

    @property
    def names(self) -> tuple[str, ...]:
        """All machines that can be killed."""
        return (*[name for names in self._shape.values() for name in names], META)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The broker groups and the delay group, with their replicas."""
        return dict(self._shape)

    def client(self, *, at: str = "", token: Token = None, **options: Any) -> Client:
        """A new client, closed with the cluster. `token` and `options` are those of `qmq.connect`;
        environment variables are ignored. `at` is the machine on which the client runs, whose
        partitions it shares: one of the cluster's machines, or any other name for a new machine.
        The default is `clients`. Raises InvalidArgument.
        """
        self._require_running()
        if at in (META, COORDINATION) or "/" in at:
            raise InvalidArgument(
                f"no client can run at {at!r}: name a broker's machine, or a new machine"
            )
        if at and at not in (*self._machines, *self._strangers, CLIENTS):
            self._strangers.append(at)
        network: Network = self._parties.network(at or CLIENTS)
        if token is not None and (source := token_source(token)) is not None:
            network = TokenNetwork(network, source)
        client = Client(
            self._meta.address,
            clock=self.machine_clock,
            network=network,
            for_threads=beside,
            **options,
        )
        self._clients.append(client)
        return client

    def master(self, group: str = "") -> str:
        """The master of a group, which may be omitted if there is one broker group. Raises
        NotConnected if it has none at the moment.
        """
        serving = [each for each in self._replicas(self._group(group)) if each.is_serving]
        if not serving:
            raise NotConnected(
                f"{self._group(group)} has no master at the moment: `await cluster.until_master()`"
            )
        return max(serving, key=lambda each: each.epoch).name

    async def until_master(self, group: str = "", *, other_than: str = "") -> str:
        """Wait until the group has a master that clients can find and that is not `other_than`.
        Returns its name.

        Raises NotConnected after twenty seconds without.
        """
        group, until_s = self._group(group), time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            with contextlib.suppress(NotConnected):
                found = self.master(group)
                if found != other_than and self._is_known(group, found):
                    return found
            await asyncio.sleep(_POLL_S)
        which = "other master" if other_than else "master"
        raise NotConnected(
            f"{group} has had no {which} for {WAIT_S} s: is a majority of it running and connected?"
        )

    def _is_known(self, group: str, name: str) -> bool:
        view = self._meta.view
        if view is None:
            return True
        master = view.group(group).master
        return master is not None and master.replica == name

    def _group(self, group: str) -> str:
        self._require_running()
        brokers = [each for each in self._shape if each != DELAY]
        if not group and len(brokers) > 1:
            raise InvalidArgument(f"name the group: {', '.join(self._shape)}")
        if group and group not in self._shape:
            raise InvalidArgument(
                f"there is no group {group!r}: there are {', '.join(self._shape)}"
            )
        return group or brokers[0]

    def _replicas(self, group: str) -> list[ReplicaMachine]:
        found = [self._machines[name] for name in self._shape[group]]
        return [each for each in found if isinstance(each, ReplicaMachine)]

    def machine(self, name: str) -> Machine:
        """The object of a machine, for tests of QMQ itself. Raises InvalidArgument."""
        self._require_running()
        found = self._machines.get(name)
        if found is None:
            raise InvalidArgument(
                f"there is no machine {name!r}: there are {', '.join(self.names)}"
            )
        return found

    def _require_running(self) -> None:
        if not self._machines:
            raise InvalidArgument(
                "this cluster is not started: use `async with TestCluster() as cluster`"
            )

    # --- faults -----------------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """End a machine as if its process had been killed: connections break, written files stay,
        and nothing more is written. Raises InvalidArgument if there is no such machine, or it does
        not run.
        """
        machine = self.machine(name)
        if not machine.is_running:
            raise InvalidArgument(f"{name} is not running: `await cluster.restart({name!r})` first")
        await machine.kill()

    async def restart(self, name: str) -> None:
        """Start a machine on its files; a running machine is killed first.
        Raises InvalidArgument.
        """
        machine = self.machine(name)
        await machine.kill()
        await machine.start()

    @asynccontextmanager
    async def partition(self, name: str, other: str = "") -> AsyncIterator[None]:
        """Inside the block, nothing passes between `name` and `other` in either direction; without
        `other`, between `name` and everything else: all machines, the coordination store, and the
        clients that are not `at` that machine. `name` and `other` may also be "coordination",
        "clients", and where a client is `at`. Raises InvalidArgument.
        """
        heal = self.cut(name, other)
        try:
            yield
        finally:
            heal()

    def cut(self, name: str, other: str = "") -> Callable[[], None]:
        """As `partition`, until the returned function is called. Raises InvalidArgument."""
        parties = (*self.names, COORDINATION, CLIENTS, *self._strangers)
        for each in (name, other or name):
            if each not in parties:
                raise InvalidArgument(
                    f"there is no {each!r} to be cut off: there are {', '.join(parties)}"
                )
        if name == other:
            raise InvalidArgument(f"{name} cannot be cut off from itself")
        pairs = [(name, each) for each in ((other,) if other else parties) if each != name]
        for pair in pairs:
            self._parties.cut(*pair)
        left = iter((pairs,))

        def heal() -> None:
            for pair in next(left, ()):
                self._parties.heal(*pair)

        return heal


def _shape(brokers: int, groups: int, delay: int) -> dict[str, tuple[str, ...]]:
    """Groups and their replicas."""
    shape = {
        f"group-{group + 1}": tuple(
            f"broker-{number + 1}" for number in range(group * brokers, (group + 1) * brokers)
        )
        for group in range(groups)
    }
    if delay:
        shape[DELAY] = tuple(f"delay-{number + 1}" for number in range(delay))
    return shape


def _temporary_folder() -> Path:
    """A new temporary folder; near the root, if the usual place is too deep for sockets."""
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) <= _FOLDER_CHARS_MAX
    folder = usual if is_short else "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="qmq-", dir=folder))
