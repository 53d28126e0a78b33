"""The view: all keys of the coordination store under /qmq/, in memory. Metaservers and brokers
answer from it.

    list at revision R ──▶ watch from R + 1 ──▶ ...            the view's revision only grows
            ▲                    │ Compacted, or any failure
            └────────────────────┘ after a pause, with jitter

* A watch is a hint: every `relist_s` all keys are listed again, unless the store's revision has not
  changed. The store is asked for its revision every two seconds, so the view knows for how long the
  store has been silent (`silent_ms`).
* While the store cannot be reached, the view stays as it is, and brokers continue to serve from it.
* After changing a key, `read_back` reads it into the view, without waiting for the watch (read your
  writes).

Example: subjects `a` and `b` are listed at revision 7. Revision 8 puts `c`, 9 deletes `a`. The
watch brings 8; a listing that was on its way brings {b, c} at revision 9; then the watch brings 9,
which is known already. Callbacks get {c}, then {a}, each once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, TypeVar

from qmq_ordering.lanes import Assignment

from qmq.errors import Compacted, CoordinationError, CoordinationUnavailable, QmqError
from qmq.model import Order, SubjectConfig
from qmq.security.access import AccessState
from qmq_coordination.access_records import ACCESS, read_access
from qmq_coordination.broker_groups import (
    CLUSTER,
    GROUPS,
    PRESENCE,
    REPLICAS,
    BrokerGroupState,
    ReplicaRecord,
)
from qmq_coordination.coordination_store import (
    CoordinationStore,
    KeyListing,
    KeyValue,
    WatchedChanges,
)
from qmq_coordination.ordered_records import (
    ASSIGNMENTS,
    FENCES,
    MEMBERS,
    ROUTES,
    Fence,
    MemberRecord,
    OrderedState,
)
from qmq_coordination.subjects import (
    PAUSES,
    SETTINGS,
    DeliverySettings,
    decode_subject,
    is_deleting,
)
from qmq_coordination.subjects import PREFIX as SUBJECTS

log = logging.getLogger("qmq.coordination")

ROOT: Final = "/qmq/"
PROBE: Final = "/qmq/probe/"
"""This key never exists: listing it costs the store little, and returns the store's revision."""
PROBE_S: Final = 2.0
RELIST_S: Final = 10.0
PAUSE_S_MAX: Final = 5.0

_T = TypeVar("_T")
_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class ViewChange:
    """The changed records: names of subjects, by their settings or their latest route; of broker
    groups by their own keys (master, mode, members); by their replicas' keys; by the fences on
    them; (subject, consumer group) by frontier, members or assignment. `delivery`: how messages are
    tried again, or who is paused. `access`: who may do what.
    """

    subjects: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    replicas: frozenset[str] = frozenset()
    fenced: frozenset[str] = frozenset()
    consumption: frozenset[tuple[str, str]] = frozenset()
    delivery: bool = False
    access: bool = False
    created: frozenset[str] = frozenset()
    """Those of `subjects` that did not exist before. Nobody can know anything about them that is no
    longer true.
    """

    def __bool__(self) -> bool:
        return bool(
            self.subjects
            or self.groups
            or self.replicas
            or self.fenced
            or self.consumption
            or self.delivery
            or self.access
        )


OnChange = Callable[[ViewChange], None]


@dataclass(slots=True)
class Picture:
    """The keys at a revision, decoded.
    Pure: takes listings and changes, returns the differences.
    """

    revision: int = 0
    items: dict[str, KeyValue] = field(default_factory=dict)
    subjects: dict[str, SubjectConfig] = field(default_factory=dict)
    deleting: dict[str, SubjectConfig] = field(default_factory=dict)
    """Subjects that are being deleted, which are no longer in `subjects`."""
    subject_counts: Counter[str] = field(default_factory=Counter)
    """The number of subjects of each broker group. It is updated with each subject, because each
    new subject needs the counts.
    """
    groups: dict[str, BrokerGroupState] = field(default_factory=dict)
    replicas: dict[str, dict[str, ReplicaRecord]] = field(default_factory=dict)
    present: dict[str, dict[str, ReplicaRecord]] = field(default_factory=dict)
    ordered: dict[str, OrderedState] = field(default_factory=dict)
    fences: dict[str, dict[tuple[str, int], Fence]] = field(default_factory=dict)
    members: dict[tuple[str, str], dict[str, MemberRecord]] = field(default_factory=dict)
    assignments: dict[tuple[str, str], Assignment] = field(default_factory=dict)
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    access: AccessState = field(default_factory=AccessState)

    def show(self, listing: KeyListing) -> ViewChange:
        """Replace everything by a listing, unless it is older."""
        if listing.revision < self.revision:
            return ViewChange()
        now = {item.key: item for item in listing.items}
        created = now.keys() - self.items.keys()
        gone = [
            item
            for key, item in self.items.items()
            if key not in now and item.mod_revision <= listing.revision
        ]
        changed = [self._put(item) for item in now.values()] + [
            self._drop(item.key) for item in gone
        ]
        self.revision = listing.revision
        return _change([key for key in changed if key], created)

    def follow(self, changes: WatchedChanges) -> ViewChange:
        """Apply one revision of a watch, unless it is applied already."""
        if changes.revision <= self.revision:
            return ViewChange()
        self.revision = changes.revision
        created = {event.key for event in changes.events if event.key not in self.items}
        return _change(
            [
                key
                for event in changes.events
                if (key := self._event(event.key, event.mod_revision, event.now))
            ],
            created,
        )

    def learn(self, item: KeyValue) -> ViewChange:
        """Apply one key that was read alone. The key may be newer than the revision."""
        if item.mod_revision <= self.revision and item.key not in self.items:
            return ViewChange()  # the key was deleted after it was read
        created = {item.key} - self.items.keys()
        return _change([key] if (key := self._put(item)) else [], created)

    def _event(self, key: str, revision: int, now: KeyValue | None) -> str:
        if now is not None:
            return self._put(now)
        known = self.items.get(key)
        return self._drop(key) if known is not None and known.mod_revision < revision else ""

    def _put(self, item: KeyValue) -> str:
        """Apply a key if it is newer than the known one."""
        known = self.items.get(item.key)
        if known is not None and known.mod_revision >= item.mod_revision:
            return ""
        self.items[item.key] = item
        self._read(item.key, item)
        return item.key

    def _drop(self, key: str) -> str:
        del self.items[key]
        self._read(key, None)
        return key

    def _read(self, key: str, item: KeyValue | None) -> None:
        """Apply the meaning of a key. An unreadable value counts as absent: one bad key must not
        hide the others.
        """
        try:
            if key.startswith(SUBJECTS):
                name, config = key[len(SUBJECTS) :], None if item is None else decode_subject(item)
                is_going = item is not None and is_deleting(item)
                _keep(self.deleting, name, config if is_going else None)
                self._read_subject(name, None if is_going else config)
            elif key.startswith(GROUPS):
                self._read_group(key, item)
            elif key.startswith((REPLICAS, PRESENCE)):
                kind = self.replicas if key.startswith(REPLICAS) else self.present
                group, _, replica = key.split("/", 3)[3].partition("/")
                _keep(
                    kind.setdefault(group, {}),
                    replica,
                    None if item is None else ReplicaRecord.decode(item.value),
                )
            elif key.startswith(_ORDERED):
                self._read_ordered(key, item)
            elif key.startswith(_DELIVERY):
                self.delivery.read(key, item)
            elif key.startswith(ACCESS):
                read_access(self.access, key, item)
        except (ValueError, TypeError, KeyError, AttributeError, QmqError):
            log.exception("the record at %s in the coordination store cannot be read", key)
            if item is not None:
                self._read(key, None)

    def _read_subject(self, name: str, config: SubjectConfig | None) -> None:
        known = self.subjects.get(name)
        if known is not None:
            self.subject_counts.subtract(known.groups)
        if config is not None:
            self.subject_counts.update(config.groups)
        _keep(self.subjects, name, config)

    def _read_group(self, key: str, item: KeyValue | None) -> None:
        name, _, what = key[len(GROUPS) :].rpartition("/")
        items = dict(self.groups[name].items) if name in self.groups else {}
        _keep(items, what, item)
        state = BrokerGroupState(name, items)
        # an unreadable value is noticed here, not by a later caller
        _ = (state.master, state.mode, state.claim, state.voters, state.learners)
        _keep(self.groups, name, state if items else None)

    def _read_ordered(self, key: str, item: KeyValue | None) -> None:
        if key.startswith(ROUTES):
            subject = key[len(ROUTES) :].partition("/")[0]
            state = self.ordered.setdefault(subject, OrderedState(subject))
            if item is None:
                state.drop(key)
            else:
                state.put(item)
        elif key.startswith(FENCES):
            group, subject, number = key[len(FENCES) :].split("/")
            _keep(
                self.fences.setdefault(group, {}),
                (subject, int(number)),
                None if item is None else Fence.decode(item.value),
            )
        elif key.startswith(MEMBERS):
            subject, group, consumer = key[len(MEMBERS) :].split("/")
            _keep(
                self.members.setdefault((subject, group), {}),
                consumer,
                None if item is None else MemberRecord.decode(item.value),
            )
        else:
            subject, _, group = key[len(ASSIGNMENTS) :].partition("/")
            _keep(
                self.assignments,
                (subject, group),
                None if item is None else Assignment.decode(item.value),
            )


_ORDERED: Final = (ROUTES, FENCES, MEMBERS, ASSIGNMENTS)
_DELIVERY: Final = (SETTINGS, PAUSES)


def _keep(where: dict[_K, _T], name: _K, value: _T | None) -> None:
    if value is None:
        where.pop(name, None)
    else:
        where[name] = value


def _change(keys: list[str], created: set[str]) -> ViewChange:
    """`created` has the keys, among others, that did not exist before."""
    return ViewChange(
        frozenset(
            [key[len(SUBJECTS) :] for key in keys if key.startswith(SUBJECTS)]
            + [
                key[len(ROUTES) :].partition("/")[0]
                for key in keys
                if key.startswith(ROUTES) and (key.endswith("/latest") or "/stale/" in key)
            ]
        ),
        frozenset(key[len(GROUPS) :].rpartition("/")[0] for key in keys if key.startswith(GROUPS)),
        frozenset(
            key.split("/", 3)[3].partition("/")[0]
            for key in keys
            if key.startswith((REPLICAS, PRESENCE))
        ),
        frozenset(key[len(FENCES) :].partition("/")[0] for key in keys if key.startswith(FENCES)),
        frozenset(
            pair
            for key in keys
            if key.startswith((ROUTES, MEMBERS, ASSIGNMENTS))
            and (pair := _consumption(key)) is not None
        ),
        any(key.startswith(_DELIVERY) for key in keys),
        any(key.startswith(ACCESS) for key in keys),
        frozenset(
            key[len(SUBJECTS) :] for key in keys if key.startswith(SUBJECTS) and key in created
        ),
    )


def _consumption(key: str) -> tuple[str, str] | None:
    """The subject and the consumer group that a key is about."""
    parts = key.split("/")[3:]
    if key.startswith(ROUTES):
        return (parts[0], parts[2]) if parts[1] == "g" else None
    return parts[0], parts[1]


class ClusterView:
    """Keeps a Picture up to date. Call `start` first. Only `start`, `refresh` and `fetch` wait for
    the store.
    """

    def __init__(
        self,
        store: CoordinationStore,
        *,
        relist_s: float = RELIST_S,
        probe_s: float = PROBE_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._relist_s = relist_s
        self._probe_s = probe_s
        self._monotonic_s = monotonic_s
        self._picture = Picture()
        self._callbacks: list[OnChange] = []
        self._heard_s = self._listed_s = monotonic_s()
        self._went_back = ""
        self._tasks: list[asyncio.Task[None]] = []

    # --- reading ----------------------------------------------------------------------------------

    def subject(self, name: str) -> SubjectConfig | None:
        """The subject's settings; None if the view does not have the subject."""
        return self._picture.subjects.get(name)

    def subjects(self, prefix: str = "") -> list[SubjectConfig]:
        """All subjects that begin with `prefix`, in order."""
        return [
            config
            for name, config in sorted(self._picture.subjects.items())
            if name.startswith(prefix)
        ]

    def subject_names(self) -> Collection[str]:
        """The names of all subjects, in no order.
        The set changes with the picture: do not keep it.
        """
        return self._picture.subjects.keys()

    def ordered_subjects(self) -> list[tuple[SubjectConfig, OrderedState]]:
        """All ordered subjects, in order. Unlike `subjects`, this costs nothing where there are
        many unordered ones.
        """
        found = [
            (self._picture.subjects.get(name), state)
            for name, state in sorted(self._picture.ordered.items())
        ]
        return [
            (config, state)
            for config, state in found
            if config is not None and config.order is not Order.NONE
        ]

    def deleting(self) -> dict[str, SubjectConfig]:
        """The names of the subjects that are being deleted."""
        return dict(self._picture.deleting)

    def subject_count(self, group: str) -> int:
        """The number of subjects that the broker group takes messages of."""
        return self._picture.subject_counts[group]

    def group(self, name: str) -> BrokerGroupState:
        """A broker group. An unknown group has no keys."""
        return self._picture.groups.get(name) or BrokerGroupState(name)

    def groups(self) -> list[BrokerGroupState]:
        """All broker groups, in order."""
        return [state for _, state in sorted(self._picture.groups.items())]

    def replicas(self, group: str) -> dict[str, ReplicaRecord]:
        """The last known addresses of the group's replicas by name, dead replicas included."""
        return dict(sorted(self._picture.replicas.get(group, {}).items()))

    def present(self, group: str) -> dict[str, ReplicaRecord]:
        """The registered replicas whose processes are alive, by name."""
        return dict(sorted(self._picture.present.get(group, {}).items()))

    def ordered(self, subject: str) -> OrderedState | None:
        """An ordered subject's routes, changes and consumer groups. It changes with the view: do
        not keep it.
        """
        return self._picture.ordered.get(subject)

    def fences(self, group: str) -> dict[tuple[str, int], Fence]:
        """The fences of a broker group, by subject and partition."""
        return dict(self._picture.fences.get(group, {}))

    def members(self, subject: str, group: str) -> dict[str, MemberRecord]:
        """The live consumers of an ordered subject's group, by name."""
        return dict(sorted(self._picture.members.get((subject, group), {}).items()))

    def assignment(self, subject: str, group: str) -> Assignment:
        """The assignment of an ordered subject's group; empty if there is none."""
        return self._picture.assignments.get((subject, group)) or Assignment()

    @property
    def delivery(self) -> DeliverySettings:
        """Settings of consumer groups, and pauses. It changes with the view: do not keep it."""
        return self._picture.delivery

    @property
    def access(self) -> AccessState:
        """The access rules. They change with the view: do not keep them."""
        return self._picture.access

    @property
    def cluster(self) -> str:
        """The identity of the cluster; empty until a server has written it."""
        item = self._picture.items.get(CLUSTER)
        return "" if item is None else item.value.decode("ascii", "replace")

    @property
    def revision(self) -> int:
        """The revision up to which all changes are known."""
        return self._picture.revision

    @property
    def went_back(self) -> str:
        """Not empty if the store answered with an older revision than it had: its data was put
        back. The view stays as it is.
        """
        return self._went_back

    @property
    def silent_ms(self) -> int:
        """Milliseconds since the store last answered: usually below `probe_s`."""
        return max(0, int((self._monotonic_s() - self._heard_s) * 1000))

    def on_change(self, callback: OnChange) -> Callable[[], None]:
        """Call back after each change, in the event loop. Call the returned function to stop."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    # --- following --------------------------------------------------------------------------------

    async def start(self) -> None:
        """List all keys, then follow the changes. Waits until the store can be reached. Raises
        CoordinationError if the store refuses.
        """
        failures = 0
        while True:
            try:
                await self.refresh()
                break
            except CoordinationUnavailable as failure:
                log.warning("waiting for the coordination store: %s", failure)
                failures = await _pause(failures)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._probe())]

    async def refresh(self) -> None:
        """List all keys again. Raises CoordinationError."""
        known = self._picture.revision
        listing = await self._store.list(ROOT)
        if listing.revision < known and not self._went_back:
            self._went_back = f"its revision was {known}, and is {listing.revision}"
            log.critical(
                (
                    "the data of the coordination store was put back: %s. docs/BACKUP.md says "
                    "what to do"
                ),
                self._went_back,
            )
        self._heard_s = self._listed_s = self._monotonic_s()
        self._notify(self._picture.show(listing))

    async def fetch(self, key: str) -> KeyValue | None:
        """Read one key from the store into the view. Raises CoordinationError."""
        item = await self._store.get(key)
        self._heard_s = self._monotonic_s()
        if item is not None:
            self._notify(self._picture.learn(item))
        return item

    async def read_back(self, *keys: str) -> None:
        """Read keys after a change, so that this process sees its own change at once; without keys,
        all, which shows deletions, too. The change is made already: if the store does not answer
        now, the watch brings the keys, and no error is raised.
        """
        try:
            for key in keys:
                await self.fetch(key)
            if not keys:
                await self.refresh()
        except CoordinationError as failure:
            log.info("reading a change back failed, the watch will deliver it: %s", failure)

    def _notify(self, change: ViewChange) -> None:
        if not change:
            return
        for callback in list(self._callbacks):
            try:
                callback(change)
            except Exception:
                log.exception("a listener failed on %s", change)

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                async for changes in self._store.watch(ROOT, self._picture.revision + 1):
                    failures = 0
                    self._heard_s = self._monotonic_s()
                    self._notify(self._picture.follow(changes))
                return  # the store is closed
            except Compacted:
                log.info(
                    "the watch of the coordination store fell behind: reading all records again"
                )
            except CoordinationError as failure:
                log.warning("the watch of the coordination store broke: %s", failure)
            except Exception:
                log.exception("the watch of the coordination store broke")
            failures = await _pause(failures)
            await self._relist()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._probe_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            known = self._picture.revision
            try:
                revision = (await self._store.list(PROBE)).revision
            except CoordinationError as failure:
                log.warning(
                    "the coordination store has not answered for %d ms, answering from memory: %s",
                    self.silent_ms,
                    failure,
                )
                continue
            except Exception:
                log.exception("reading the coordination store's revision failed")
                continue
            self._heard_s = self._monotonic_s()
            is_old = self._heard_s - self._listed_s >= self._relist_s
            if revision < known or (revision != self._picture.revision and is_old):
                await self._relist()

    async def _relist(self) -> None:
        try:
            await self.refresh()
        except CoordinationError as failure:
            log.warning("reading the coordination store failed: %s", failure)
        except Exception:
            log.exception("reading the coordination store failed")

    async def stop(self) -> None:
        """Stop following; the known keys stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


async def _pause(failures: int) -> int:
    await asyncio.sleep(random.uniform(0, min(PAUSE_S_MAX, 0.05 * 2 ** min(failures, 10))))  # noqa: S311 - jitter
    return failures + 1
