"""Subjects in the coordination store: their settings, their schemas, and the delivery settings of
groups. A compare-and-swap creates each subject once.

    /qmq/subjects/NAME
        SubjectConfig, JSON: a subject's settings
        removed by the deletion of the subject
    /qmq/schemas/SUBJECT/NUMBER
        DeclaredSchema, JSON: a version of a subject's schema
        removed by the operator, all versions together; the deletion of the subject

Creating an existing subject with the same settings succeeds, with any placement: if two metaservers
create and place it at the same moment, the first placement wins, and both answer with it.

After a lost answer, the catalog reads the key again and repeats the change: each change is a
compare-and-swap to the wanted state.

Versions of schemas are never changed, and are deleted together (qmq/meta/catalog.py writes them).

Delivery settings are retries of groups, and pauses (docs/DELIVERY.md); qmq/meta/delivery.py writes
them.

    /qmq/delivery/SUBJECT/GROUP
        SettingsRecord, JSON: a group's retry settings; the subject may be `*`: the group on all
        subjects
        removed by the operator; the deletion of the subject
    /qmq/pauses/group/SUBJECT/GROUP
        PauseRecord, JSON: a paused group: since when, why; the subject may be `*`
        removed by the operator; the deletion of the subject
    /qmq/pauses/consumer/SUBJECT/GROUP/NAME
        a paused consumer of the group
        removed by the operator; the deletion of the subject
    /qmq/pauses/client/NAME
        a paused client: brokers hand nothing to its consumers
        removed by the operator

A record may contain only some of the settings. Each setting is taken from the record for the
subject, else from the one for all subjects, else from the broker.

For the broker, a consumer of a broadcast group is a separate group, `GROUP%NAME`. Operators use
GROUP and NAME; settings of GROUP hold for all its consumers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from qmq.errors import CoordinationUnknown, InvalidArgument, SubjectExists, UnknownSubject
from qmq.model import (
    BROADCAST,
    Fencing,
    GroupSettings,
    Order,
    SubjectConfig,
    SubjectFlush,
    base_group,
    check_name,
)
from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, absent, unchanged

PREFIX: Final = "/qmq/subjects/"
PAUSE_S: Final = 0.1
"""Pause before reading back a change with unknown outcome, to spare a slow store."""
_KNOWN: Final = frozenset(each.name for each in fields(SubjectConfig))
_DELETING: Final = "is_deleting"
_TUPLES: Final = ("groups", "former_groups")


def subject_key(name: str) -> str:
    """The key of a subject. Raises InvalidName."""
    return PREFIX + check_name("subject", name)


def encode_subject(config: SubjectConfig) -> bytes:
    found = {
        name: value.value if isinstance(value, Enum) else value
        for name, value in asdict(config).items()
    }
    return json.dumps(found, sort_keys=True).encode()


def decode_subject(item: KeyValue) -> SubjectConfig:
    """Decode a subject. Older releases wrote fewer fields, newer ones may write more."""
    found = {name: value for name, value in json.loads(item.value).items() if name in _KNOWN}
    enums = {
        "order": Order(found.get("order", "")),
        "fencing": Fencing(found.get("fencing", "lease")),
        "flush": SubjectFlush(found.get("flush", "default")),
    }
    return SubjectConfig(
        **{**found, **{name: tuple(found.get(name, ())) for name in _TUPLES}, **enums}
    )


def is_deleting(item: KeyValue) -> bool:
    """True if the subject is being deleted (docs/DELETION.md). All other operations then treat it
    as unknown.
    """
    return bool(json.loads(item.value).get(_DELETING))


def _going(name: str) -> UnknownSubject:
    return UnknownSubject(
        f"subject {name!r} is being deleted: wait until that is done, then create it again"
    )


class SubjectCatalog:
    """Subjects in the coordination store."""

    def __init__(
        self, store: CoordinationStore, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._store = store
        self._sleep = sleep

    async def create(
        self, config: SubjectConfig, *, is_placed: bool = False, also: Sequence[Put] = ()
    ) -> SubjectConfig:
        """Create a subject, or return the existing one if it has the same settings.

        `is_placed`: the caller chose the broker groups, so they count as settings. `also` is put in
        the same transaction (for example, an ordered subject's first route). Raises SubjectExists,
        UnknownSubject (a subject of that name is being deleted), CoordinationUnavailable.
        """
        key = subject_key(config.name)
        while True:
            try:
                if (
                    await self._store.txn([absent(key)], [Put(key, encode_subject(config)), *also])
                ).succeeded:
                    return config
            except CoordinationUnknown:
                await self._sleep(
                    PAUSE_S
                )  # if the change was made, the comparison fails and the record is ours
                continue
            item = await self._store.get(key)
            if item is None:
                continue
            if is_deleting(item):
                raise _going(config.name)
            found = decode_subject(item)
            if _settings(found, is_placed) != _settings(config, is_placed):
                raise SubjectExists(
                    f"subject {config.name!r} exists with other settings, "
                    f"which `qmq subject show {config.name}` shows: choose another name; "
                    "`qmq subject alter` changes retention and the largest body"
                )
            return found

    async def get(self, name: str) -> SubjectConfig | None:
        """The subject's settings; None if it does not exist. Raises InvalidName."""
        found = await self._store.get(subject_key(name))
        return None if found is None or is_deleting(found) else decode_subject(found)

    async def _existing(self, name: str) -> KeyValue:
        """Read the subject's record, also during its deletion. Raises UnknownSubject."""
        found = await self._store.get(subject_key(name))
        if found is None:
            raise UnknownSubject(f"there is no subject {name!r}: see `qmq subject list`")
        return found

    async def list(self, prefix: str = "") -> list[SubjectConfig]:
        """All subjects that begin with `prefix`, in order."""
        return [
            decode_subject(item)
            for item in (await self._store.list(PREFIX + prefix)).items
            if not is_deleting(item)
        ]

    async def alter(self, config: SubjectConfig) -> SubjectConfig:
        """Replace a subject's settings. Raises UnknownSubject."""
        return await self.update(config.name, lambda _: config)

    async def update(
        self, name: str, change: Callable[[SubjectConfig], SubjectConfig]
    ) -> SubjectConfig:
        """Replace a subject by the result of `change`, which may be called again. Raises
        UnknownSubject, and the errors of `change`.
        """
        key = subject_key(name)
        while True:
            found = await self._existing(name)
            if is_deleting(found):
                raise _going(name)
            before = decode_subject(found)
            after = change(before)
            if after == before:
                return after
            try:
                if (
                    await self._store.txn([unchanged(found)], [Put(key, encode_subject(after))])
                ).succeeded:
                    return after
            except CoordinationUnknown:
                await self._sleep(
                    PAUSE_S
                )  # if the change was made, `change` has nothing left to do

    async def begin_deleting(self, name: str) -> KeyValue:
        """Mark the subject as being deleted, and return its record. Raises UnknownSubject."""
        key = subject_key(name)
        while True:
            found = await self._existing(name)
            if is_deleting(found):
                return found
            marked = json.dumps(
                {**json.loads(found.value), _DELETING: True}, sort_keys=True
            ).encode()
            try:
                await self._store.txn([unchanged(found)], [Put(key, marked)])
            except CoordinationUnknown:
                await self._sleep(PAUSE_S)


def _settings(config: SubjectConfig, is_placed: bool) -> SubjectConfig:
    return replace(
        config,
        groups=tuple(sorted(config.groups)) if is_placed else (),
        former_groups=(),
        created_by="",
    )


SCHEMAS: Final = "/qmq/schemas/"


def schemas_prefix(subject: str) -> str:
    """The prefix of all versions. Raises InvalidName."""
    return f"{SCHEMAS}{check_name('subject', subject)}/"


def schema_key(subject: str, version: int) -> str:
    """The key of a version. Keys are in the order of versions. Raises InvalidName."""
    return f"{schemas_prefix(subject)}{version:010}"


SETTINGS: Final = "/qmq/delivery/"
PAUSES: Final = "/qmq/pauses/"
EVERY: Final = "*"
"""The subject of records that apply to all subjects."""
REASON_CHARS_MAX: Final = 1_000


class PauseKind(Enum):
    """The kind of a pause: group, consumer or client."""

    GROUP = "group"
    CONSUMER = "consumer"
    CLIENT = "client"


class Whom(NamedTuple):
    """The target of a pause: a group on a subject, one consumer of it, or a client with all its
    consumers. Other fields are empty.
    """

    kind: PauseKind
    subject: str = ""
    group: str = ""
    name: str = ""

    def check(self) -> Whom:
        """Return this value if it is valid. Raises InvalidName, InvalidArgument."""
        if self.kind is not PauseKind.CLIENT:
            check_subject(self.subject)
            check_name("group", self.group)
        elif self.subject or self.group:
            raise InvalidArgument(
                "a pause of a client covers everything that it consumes: name no subject and "
                "no group"
            )
        if self.kind is not PauseKind.GROUP:
            check_name(self.kind.value, self.name)
        elif self.name:
            raise InvalidArgument(
                "a pause of a group names no consumer: for one consumer, the kind of the "
                "pause is 'consumer'"
            )
        return self

    def __str__(self) -> str:
        where = f" on {'all subjects' if self.subject == EVERY else self.subject}"
        if self.kind is PauseKind.GROUP:
            return f"group {self.group}{where}"
        return (
            f"client {self.name}"
            if self.kind is PauseKind.CLIENT
            else f"consumer {self.name} of group {self.group}{where}"
        )


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """A pause: its begin in milliseconds since 1970, and the reason."""

    since_ms: int
    reason: str = ""

    def encode(self) -> bytes:
        return json.dumps(
            {"since_ms": self.since_ms, "reason": self.reason}, sort_keys=True
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> PauseRecord:
        """Decode a pause. Raises ValueError, InvalidArgument."""
        found = json.loads(data)
        since_ms, reason = found["since_ms"], found.get("reason", "")
        if not _is_int(since_ms) or not isinstance(reason, str):
            raise InvalidArgument(
                f"a pause has since_ms, an int, and a reason, a string, not {found}"
            )
        return cls(since_ms, reason)


@dataclass(frozen=True, slots=True)
class SettingsRecord:
    """The settings of one record. A setting that is None comes from the next
    less specific record.
    """

    attempts_max: int | None = None
    retry_delays_ms: tuple[int, ...] | None = None

    def check(self) -> SettingsRecord:
        """Return this record if it is valid. Raises InvalidArgument."""
        self.over(GroupSettings()).check()
        return self

    def over(self, further: GroupSettings) -> GroupSettings:
        """Combine the settings of this record with those of `further`, a less specific record: this
        record wins.
        """
        return GroupSettings(
            further.attempts_max if self.attempts_max is None else self.attempts_max,
            further.retry_delays_ms if self.retry_delays_ms is None else self.retry_delays_ms,
        )

    def changed(self, change: SettingsRecord) -> SettingsRecord:
        """Return this record with the settings of `change`."""
        return SettingsRecord(
            self.attempts_max if change.attempts_max is None else change.attempts_max,
            self.retry_delays_ms if change.retry_delays_ms is None else change.retry_delays_ms,
        )

    def encode(self) -> bytes:
        found = {"attempts_max": self.attempts_max, "retry_delays_ms": self.retry_delays_ms}
        return json.dumps(
            {name: value for name, value in found.items() if value is not None}, sort_keys=True
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> SettingsRecord:
        """Decode settings. Unknown fields, of a newer release, are ignored.
        Raises ValueError, InvalidArgument.
        """
        found: dict[str, Any] = json.loads(data)
        attempts, delays = found.get("attempts_max"), found.get("retry_delays_ms")
        if not (attempts is None or _is_int(attempts)) or not (
            delays is None or (isinstance(delays, list) and all(map(_is_int, delays)))
        ):
            raise InvalidArgument(
                "settings of a group are attempts_max, an int, and retry_delays_ms, a list "
                f"of ints, not {found}"
            )
        return cls(attempts, None if delays is None else tuple(delays)).check()


@dataclass(slots=True)
class DeliverySettings:
    """All settings and pauses. Pure."""

    records: dict[tuple[str, str], SettingsRecord] = field(default_factory=dict)
    """The records by subject (or `*`) and group."""
    pauses: dict[Whom, PauseRecord] = field(default_factory=dict)

    def read(self, key: str, item: KeyValue | None) -> None:
        """Apply a change of a key; `item` is None if the key was deleted. Raises ValueError for
        keys and values that cannot be read.
        """
        if key.startswith(SETTINGS):
            where = pair_of(key)
            record = None if item is None else SettingsRecord.decode(item.value)
            if record is None:
                self.records.pop(where, None)
            else:
                self.records[where] = record
            return
        whom = whom_of(key)
        pause = None if item is None else PauseRecord.decode(item.value)
        if pause is None:
            self.pauses.pop(whom, None)
        else:
            self.pauses[whom] = pause

    def settings(self, subject: str, group: str, default: GroupSettings) -> GroupSettings:
        """The settings of a group on a subject, each from its most specific record."""
        for _, record in reversed(list(self.near(subject, group))):
            default = record.over(default)
        return default

    def near(self, subject: str, group: str) -> Iterator[tuple[str, SettingsRecord]]:
        """The records that apply to a group on a subject, the most specific first, each with its
        subject or `*`.
        """
        base = base_group(group)
        for where in dict.fromkeys((subject, EVERY)):
            if (record := self.records.get((where, base))) is not None:
                yield where, record

    def is_paused(self, subject: str, group: str, consumer: str, client: str) -> bool:
        """True if the consumer is paused. With empty `consumer` and `client`:
        True if the group is paused.
        """
        if not self.pauses:
            return False
        return any(whom in self.pauses for whom in _names_of(subject, group, consumer, client))


def _names_of(subject: str, group: str, consumer: str, client: str) -> Iterable[Whom]:
    """The keys of all pauses that would apply to the consumer."""
    base, _, of_broadcast = group.partition(BROADCAST)
    for where in (subject, EVERY):
        yield Whom(PauseKind.GROUP, where, base)
        for name in {consumer, of_broadcast} - {""}:
            yield Whom(PauseKind.CONSUMER, where, base, name)
    if client:
        yield Whom(PauseKind.CLIENT, name=client)


def settings_key(subject: str, group: str) -> str:
    """The key of a group's settings. Raises InvalidName, InvalidArgument."""
    return f"{SETTINGS}{check_subject(subject)}/{check_name('group', group)}"


def pair_of(key: str) -> tuple[str, str]:
    """The subject and the group of a settings key. Raises ValueError, InvalidName."""
    subject, group = key[len(SETTINGS) :].split("/")
    return check_subject(subject), check_name("group", group)


def pause_key(whom: Whom) -> str:
    """The key of a pause. Raises InvalidName, InvalidArgument."""
    parts = (whom.kind.value, whom.subject, whom.group, whom.name)
    whom.check()
    return PAUSES + "/".join([part for part in parts if part])


def whom_of(key: str) -> Whom:
    """The target of a pause key. Raises ValueError, TypeError, InvalidName, InvalidArgument."""
    kind, *names = key[len(PAUSES) :].split("/")
    found = (
        Whom(PauseKind.CLIENT, "", "", *names)
        if kind == PauseKind.CLIENT.value
        else Whom(PauseKind(kind), *names)
    )
    if pause_key(found) != key:
        raise InvalidArgument(f"{key} names no group, consumer or client")
    return found


def check_subject(subject: str) -> str:
    """Return `subject` if it is the name of a subject or a dead-letter queue, or `*`.
    Raises InvalidName.
    """
    return subject if subject == EVERY else check_name("subject", subject)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
