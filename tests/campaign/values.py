"""What a campaign is made of: frozen values without any behaviour of a cluster.

`Fault.strike` and `Workload.programs` are functions that act; everything else here is data, so that
the table of tests can be made, listed and compared without a machine that could run them.

A fault says what it *hits* (kinds of services), and a workload which kinds it *uses*: a test is a
pair that meets. A fault `needs` rights; a test whose rights are missing is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

from history.events import Anomaly, History, Operation, learn

if TYPE_CHECKING:
    from campaign.client import Job
    from campaign.cluster import World
    from campaign.verdict import Result

Durability: TypeAlias = Literal["async", "flushed", "sync"]
"""async: brokers flush later and a majority has the message; flushed: producers ask for
`acks="flushed"`; sync: brokers run with `--flush sync`.
"""
DURABILITIES: Final[tuple[Durability, ...]] = ("async", "flushed", "sync")
NAMESPACES: Final = "namespaces"
LOOPS: Final = "loops"
"""File systems of the test's own on loop devices."""
PRELOAD: Final = "preload"
"""Functions of the C library replaced in servers: see `broken_disk`."""
START_AND_END_S: Final = 60.0
"""About how long a test takes besides the time under faults, on two cores."""
SUBJECT: Final = "campaign"
"""What clients write to and read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike(Operation):
    """A fault: `invoke` before it begins, `info` when it took effect, and `ok` when it is healed
    and the cluster serves again; `fail` if it does not serve in time. `effect` says what was seen
    of the fault; without any, the fault was not met.
    """

    f: ClassVar[str] = "strike"
    fault: str
    targets: tuple[str, ...] = ()
    effect: str = ""
    at_ms: int = 0
    """The wall clock."""
    unsynced_ns: int = 0
    unsynced_ms: int = 0
    """Since when nothing was synced any more, by both clocks, if not since the beginning."""


learn(Strike, targets=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What a fault did."""

    targets: tuple[str, ...]
    effect: str
    """What was observed, such as "g1-a is dead"; empty if nothing was."""
    unsynced_ns: int = 0
    unsynced_ms: int = 0
    """See `Strike`."""


Strikes: TypeAlias = "Callable[[World], AbstractAsyncContextManager[Struck]]"
"""The block is the time of the fault; its end heals."""
Striking: TypeAlias = AsyncIterator[Struck]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault, struck again and again during a test."""

    name: str
    what: str
    strike: Strikes
    hits: frozenset[str] = frozenset({"brokers"})
    """Any of these kinds: brokers, etcds, metas, delays, drivers (of Spark), clients."""
    needs: frozenset[str] = frozenset()
    lasts_s: tuple[float, float] = (3.0, 7.0)
    etcds: int = 1
    """Members of etcd that it needs at least."""
    replicas: int = 3
    """Of each broker group."""
    durabilities: tuple[Durability, ...] = ("async",)
    """More than one only where durability decides what survives."""
    loses_sends: frozenset[Durability] = frozenset()
    """With which durabilities it may destroy the last acknowledged messages."""
    loses_acks: frozenset[Durability] = frozenset()
    """With which it may destroy the last acknowledgements of consumers."""
    disk_mib: int = 0
    """The size of a file system of each replica's own; 0: none."""
    checkers: tuple[str, ...] = ()
    """Those that judge the fault's own events, besides the workload's."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables of the brokers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A kind of client process."""

    name: str
    count: int
    is_sender: bool = False
    """Senders end first; the others read on until nothing is missing."""


Program: TypeAlias = "Callable[[Job], Awaitable[None]]"
Drained: TypeAlias = Callable[[Sequence[Operation]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A time in which what was acknowledged may be lost: shortly before and during a fault."""

    since_ns: int
    until_ns: int
    since_ms: int
    until_ms: int
    """The same by the wall clock."""

    def has(self, first_ns: int, last_ns: int, *, is_open: bool = False) -> bool:
        """Whether something that began and ended then is doubtful. `is_open`: it has no end."""
        return first_ns <= self.until_ns and (last_ns >= self.since_ns or is_open)


Doubting: TypeAlias = Callable[
    [Sequence[Operation], Sequence[Doubt]], tuple[Sequence[Operation], int]
]
"""The events as if nothing were known of what is doubtful, and how many messages that are. Pure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What clients do, and what judges it."""

    name: str
    what: str
    roles: tuple[Role, ...]
    programs: Mapping[str, Program]
    """Of each role. "setup" runs once before the others start."""
    checkers: tuple[str, ...]
    groups: tuple[str, ...]
    """Consumer groups that must see everything."""
    gates: Mapping[str, int]
    """How often each of these operations must have ended with `ok`."""
    is_drained: Drained
    """Whether readers have everything: pure, of the events so far."""
    doubting: Doubting | None = None
    """For other events than Send and Poll."""
    strict: tuple[str, ...] = ()
    """Groups with a strict gate."""
    uses: frozenset[str] = frozenset({"brokers", "etcds", "metas", "clients"})
    broker_groups: int = 1
    delays: int = 0
    metas: int = 1
    only: Collection[str] = ("*",)
    """Patterns of the cases (see `CampaignTest.case`) that it can see and no other workload sees as
    well, among those that hit what it uses; one with a `!` leaves out.
    """
    seconds: float = 30.0
    """How long it is under faults at least."""
    is_long: bool = False
    """Whether it takes longer than five minutes may."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables of the brokers; `{folder}` is the folder of the test."""
    lacks: Callable[[], str] = str
    """Why this machine cannot run its clients; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignTest:
    """A row of the table."""

    __test__: ClassVar[bool] = False
    workload: Workload
    fault: Fault
    durability: Durability = "async"
    run: Callable[[Path, int, Mapping[str, Checker]], Awaitable[Result]] | None = None
    """Instead of a cluster of processes: in a folder, with a seed, judged by these."""

    @property
    def case(self) -> str:
        """Such as `power-all-flushed`; the default durability is not named."""
        word = self.fault.name
        return word if self.durability == "async" else f"{word}-{self.durability}"

    @property
    def name(self) -> str:
        """Such as `log-power-all-flushed`."""
        return f"{self.workload.name}-{self.case}"

    @property
    def is_meant(self) -> bool:
        """Whether the workload can see what the fault breaks, and asks for it."""
        hits, only = self.fault.hits, self.workload.only
        left_out = [each[1:] for each in only if each.startswith("!")]
        return (
            (not hits or bool(hits & self.workload.uses))
            and any(fnmatchcase(self.case, each) for each in only)
            and not any(fnmatchcase(self.case, each) for each in left_out)
        )

    @property
    def minutes(self) -> float:
        """About how long it takes on two cores, with half a minute under faults or more."""
        return (START_AND_END_S + self.workload.seconds) / 60

    @property
    def checkers(self) -> tuple[str, ...]:
        """Those that judge it."""
        return (*self.workload.checkers, *self.fault.checkers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """What a checker may look at."""

    history: History
    is_drained: bool
    groups: tuple[str, ...] = ()
    strict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker:
    """A rule of the contract as a program. Pure."""

    name: str
    what: str
    find: Callable[[Evidence], Iterable[Anomaly]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A mistake that the campaign must find."""

    name: str
    what: str
    plant: Callable[[], None]
    """Runs in the server's process before the product's main function."""
    found_by: str
    """The test."""
    finds: tuple[str, ...]
    """Checkers of which one must report something."""
    into: frozenset[str] = frozenset({"brokers"})
    """The kinds of services that run with it."""
