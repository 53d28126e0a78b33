"""Mirrors the subjects of one cluster in another, with the progress of groups (docs/BACKUP.md).

A pass: list the source's subjects, create the missing ones in the target, and for each subject with
new messages copy one round, then move its groups. A subject that fails is retried in the next pass
and does not delay the others.

*A subject* is copied round after round. A round is a load (qmq/cli/transfer/loading.py): it
continues where the last note says, and stores no message twice over any number of attempts. Each
copy names the clusters that the message came through, in the header `qmq-path`; a message that came
through the target is not copied there again, so mirrors may run both ways, and in rings.

*Groups.* Their progress is translated from the source to the target (mirror_notes.py). A group of
the target is moved forward only, and only while it has no consumer there: after a fail-over its own
progress counts. A group that the target does not know is created there.

A place in an ordered subject of the target is a time, since routes differ: the time at which the
target's brokers stored the first message behind the note's ends, so that no message behind the ends
was stored earlier. The mirror's own clock plays no part. `CLOCKS_MS` is subtracted for messages
that arrive while the group is moved: the clocks of the target's brokers may differ by so much. What
came within that time is delivered again. A time moves a group on all partitions, so the group is
moved only if it goes back on none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import qmq
from qmq.cli.mirroring.mirror_notes import (
    MirrorNote,
    MirrorRecord,
    Places,
    newest_done,
    places_of,
    with_note,
)
from qmq.cli.transfer.loading import LoadJournal, RecordLoader
from qmq.cli.transfer.message_source import MessageRange, MessageSource, TransferRecord, record_of
from qmq.client.consuming.ordered.membership import Member
from qmq.client.metadata.cache import Partial
from qmq.errors import (
    InvalidArgument,
    InvariantBroken,
    NotConnected,
    QmqError,
    SubjectExists,
    UnknownGroup,
)
from qmq.limits import MIB
from qmq.log.disk import Disk
from qmq.model import is_dead_letters
from qmq.node.metrics.copies import MirrorState
from qmq.wire.subject_settings import config_of

if TYPE_CHECKING:
    from qmq.proto.v1 import control_pb2 as control
    from qmq.proto.v1 import meta_pb2 as pb

PATH: Final = "qmq-path"
"""The header with the names of the clusters that a message came through, comma-separated, the first
one first.
"""
JOURNAL_BYTES_MAX: Final = MIB
JOURNAL: Final = ".journal"
RECORD: Final = ".record"


def path_of(record: TransferRecord) -> tuple[str, ...]:
    """The clusters that a message came through before this one."""
    text = record.headers.get(PATH, b"").decode(errors="replace")
    return tuple(text.split(",")) if text else ()


class MirrorSource:
    """The messages that are to be copied from cluster `here` to cluster `there`."""

    def __init__(self, mq: qmq.Client, subject: str, here: str, there: str, mark: Any) -> None:
        self._messages = MessageSource(mq, subject, MessageRange(), mark)
        self._here, self._there = here, there
        self.left_out = 0
        """Messages that came through the target."""

    async def records(self) -> AsyncIterator[TransferRecord]:
        async for message in self._messages.messages():
            record = record_of(message)
            path = path_of(record)
            if self._there in path:
                self.left_out += 1
                continue
            yield replace(
                record, headers={**record.headers, PATH: ",".join((*path, self._here)).encode()}
            )

    def mark(self) -> list[list[Any]]:
        return self._messages.mark()


class MirrorSubject:
    """One subject. `folder` has the state files of the mirror; one process uses them at a time.
    Raises InvalidArgument.
    """

    def __init__(
        self,
        source: qmq.Client,
        target: qmq.Client,
        subject: str,
        here: str,
        there: str,
        folder: Path,
    ) -> None:
        self._source, self._target = source, target
        self.subject = subject
        self._here, self._there = here, there
        self._path = folder / f"{subject}{JOURNAL}"
        self._record_path = record_path(folder, subject)
        self._load = {"mirror": [here, there], "subject": subject}
        self._journal = LoadJournal(self._path, self._load)
        self.record = read_record(folder, subject)
        self._copied = self._left_out = 0
        self._running: tuple[RecordLoader, MirrorSource] | None = None

    @property
    def copied(self) -> int:
        """The number of copied messages, including those of a running round."""
        return self._copied + (self._running[0].sent if self._running else 0)

    @property
    def left_out(self) -> int:
        return self._left_out + (self._running[1].left_out if self._running else 0)

    async def round(self, ends: Places) -> None:
        """Copy the present messages. `ends` are the source's ends, read before this call. Raises
        what `RecordLoader.load` raises; another round then continues.
        """
        self._shorten()
        state = self._journal.state
        source = MirrorSource(
            self._source,
            self.subject,
            self._here,
            self._there,
            None if state is None else state.mark,
        )
        loader = RecordLoader(self._target, self.subject, self._journal)
        self._running = loader, source
        try:
            await loader.load(source)
        finally:
            self._copied, self._left_out, self._running = self.copied, self.left_out, None
        state = self._journal.state
        if state is None:
            raise InvariantBroken("a load ended and noted nothing")
        mark = places_of(state.mark or [])
        note = MirrorNote(mark, dict(state.ends), time.time_ns() // 1_000_000)
        read_to = {queue: max(place, mark.get(queue, 0)) for queue, place in ends.items()}
        self.keep(replace(self.record, notes=with_note(self.record.notes, note), read_to=read_to))

    def keep(self, record: MirrorRecord) -> None:
        """Write the record atomically. Raises DiskFull."""
        Disk().replace(self._record_path, record.encode())
        self.record = record

    def _shorten(self) -> None:
        """Rewrite the journal's file with only its last line, when it has grown."""
        state = self._journal.state
        if state is None or self._path.stat().st_size < JOURNAL_BYTES_MAX:
            return
        shorter = self._path.with_name(self._path.name + ".new")
        shorter.unlink(missing_ok=True)
        fresh = LoadJournal(shorter, self._load)
        fresh.save(state)
        shorter.rename(self._path)
        self._journal.close()
        self._journal = fresh

    def close(self) -> None:
        self._journal.close()


def record_path(folder: Path, subject: str) -> Path:
    return folder / f"{subject}{RECORD}"


def read_record(folder: Path, subject: str) -> MirrorRecord:
    """The record of a mirror, which may be running."""
    try:
        return MirrorRecord.decode(record_path(folder, subject).read_bytes())
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return MirrorRecord()


Done = dict[tuple[str, int], float]
"""By (broker group, partition), the sequence before which everything is done."""

CLOCKS_MS: Final = 60_000
VERSIONS_MS: Final = 10_000
"""A reset to a time may begin earlier by so much: it reads partitions that came with a later
version from their beginning, and older metaservers choose the version by their own clocks.
"""
JOIN_S: Final = 30.0
LEASE_MS: Final = 10_000
_LAST_MS: Final = (1 << 62) - 1
MAKER: Final = "mirror"
"""The consumer that joins a group for a moment, so that the target knows the group."""

_T = TypeVar("_T")


async def plain_progress(source: qmq.Client, subject: str) -> dict[str, Done]:
    """The progress of each group of an unordered subject. Raises NotConnected if a broker group
    does not answer.
    """
    found: dict[str, Done] = defaultdict(dict)
    for each in _require_complete(await source.metadata.describe_groups(subject)):
        found[each.group][each.broker_group, each.partition] = each.settled_before
    return found


def ordered_progress(
    described: pb.DescribeRouteResponse, mark_queues: list[tuple[str, int]]
) -> dict[str, Done]:
    """The progress of each group of an ordered subject, on the queues of the mirror's mark. A
    partition of an older route version that the group has left is done. Pure.
    """
    found: dict[str, Done] = {}
    for group in described.groups:
        listed = {each.partition: each for each in group.partitions}
        found[group.group] = {
            (name, partition): _done_on(listed[partition]) if partition in listed else math.inf
            for name, partition in mark_queues
        }
    return found


def _done_on(status: control.PartitionStatus) -> float:
    if not status.progress:
        return float(status.start_sequence)
    return min(
        math.inf if each.is_finished else float(each.done_before) for each in status.progress
    )


def hold_at_parked(done: Done, group: pb.OrderedGroup, keys: Iterable[control.ParkedKey]) -> None:
    """Parked messages count as done, and the target does not know that they are parked: the group
    stays before the first of them. The list of keys has the first ones, partition by partition:
    where messages are parked of which it has none, the group stays at the beginning.
    """
    first = {
        each.partition: each.start_sequence for each in group.partitions if each.parked_messages
    }
    for partition, found in groupby((key for key in keys if key.messages), attrgetter("partition")):
        first[partition] = min(key.first_sequence for key in found)
    for queue in done:
        done[queue] = min(done[queue], first.get(queue[1], math.inf))


def goes_back(group: pb.OrderedGroup, places: Done, ends: Done) -> bool:
    """Whether a move to `places` would deliver something again that an ordered group has done.
    `ends` are the partitions' ends. A partition that the group does not list is one of an older
    version, and done. Pure.
    """
    listed = {(each.broker_group, each.partition): each for each in group.partitions}
    done = {
        queue: max(
            [
                0.0,
                *(
                    end if each.is_finished else float(each.done_before)
                    for each in listed[queue].progress
                ),
            ]
        )
        if queue in listed
        else end
        for queue, end in ends.items()
    }
    return any(done.get(queue, math.inf) > place for queue, place in places.items())


def _require_complete(found: Partial[_T]) -> Partial[_T]:
    if found.silent:
        raise NotConnected(
            f"{', '.join(sorted(found.silent))} did not answer: groups are moved later"
        )
    return found


class MirroredGroups:
    """The groups of one subject."""

    def __init__(
        self, source: qmq.Client, target: qmq.Client, subject: str, *, is_ordered: bool
    ) -> None:
        self._source, self._target, self._subject, self._is_ordered = (
            source,
            target,
            subject,
            is_ordered,
        )
        self.moves = 0

    async def move(self, record: MirrorRecord) -> MirrorRecord:
        """Move the groups that are further in the source than in the target. Call it between two
        rounds. Returns the record with the moves. Raises QmqError.
        """
        if not record.notes:
            return record
        moved = dict(record.moved)
        for group, done in (await self._progress(record.notes[-1])).items():
            note = newest_done(record.notes, done)
            if note is None or moved.get(group) == note.time_ms:
                continue
            if await (
                self._move_ordered(group, note)
                if self._is_ordered
                else self._move_plain(group, note)
            ):
                self.moves += 1
                moved[group] = note.time_ms
        return replace(record, moved=moved)

    async def _progress(self, newest: MirrorNote) -> dict[str, Done]:
        if not self._is_ordered:
            return await plain_progress(self._source, self._subject)
        described = await self._source.metadata.describe_route(self._subject)
        if described.silent_groups:
            raise NotConnected(
                f"{', '.join(described.silent_groups)} did not answer: groups are moved later"
            )
        found = ordered_progress(described, list(newest.mark))
        for group in described.groups:
            if group.parked_keys:
                keys = _require_complete(
                    await self._source.metadata.parked(self._subject, group.group)
                )
                hold_at_parked(found[group.group], group, keys)
        return found

    # --- unordered --------------------------------------------------------------------------------

    async def _move_plain(self, group: str, note: MirrorNote) -> bool:
        """False: it has consumers."""
        known = await self._known_plain(group)
        if any(name not in known for name, _ in note.ends):
            await self._make_plain(group)
            known = await self._known_plain(group)
        if any(each.consumers for each in known.values()):
            return False
        for (name, _), end in note.ends.items():
            if name in known and known[name].settled_before < end:
                await self._target.metadata.reset_group(
                    self._subject, group, sequence=end, broker_group=name, directly=False
                )
        return True

    async def _known_plain(self, group: str) -> dict[str, control.Group]:
        try:
            return {
                each.broker_group: each
                for each in _require_complete(
                    await self._target.metadata.describe_groups(self._subject, group)
                )
            }
        except UnknownGroup:
            return {}

    async def _make_plain(self, group: str) -> None:
        consumer = self._target.consumer(
            self._subject, group, name=MAKER, ack="explicit", prefetch=1
        )
        try:
            await asyncio.wait_for(consumer.join(), JOIN_S)
        finally:
            await consumer.close()

    # --- ordered ----------------------------------------------------------------------------------

    async def _move_ordered(self, group: str, note: MirrorNote) -> bool:
        """False: it has consumers, or is further on some partition."""
        time_ms = max(await self._stored_ms(note) - CLOCKS_MS, 1)
        places, ends = await self._places(time_ms - VERSIONS_MS), await self._places(_LAST_MS)
        described = await self._target.metadata.describe_route(self._subject)
        if described.silent_groups:
            raise NotConnected(
                f"{', '.join(described.silent_groups)} did not answer: groups are moved later"
            )
        known = next((each for each in described.groups if each.group == group), None)
        if known is None:
            await self._make_ordered(group)
        elif known.consumers or goes_back(known, places, ends):
            return False
        await self._target.metadata.reset_group(self._subject, group, time_ms=time_ms)
        return True

    async def _stored_ms(self, note: MirrorNote) -> int:
        """When the target stored its first message behind the note's ends; if it has none there,
        its last message.
        """
        behind = await anext(self._target.browse(self._subject, positions=note.ends), None)
        if behind is not None:
            return behind.append_time_ms
        return max(
            [each.append_time_ms async for each in self._target.browse(self._subject, last=1)],
            default=0,
        )

    async def _places(self, time_ms: int) -> Done:
        found = await self._target.metadata.find_time(self._subject, max(time_ms, 1))
        return {(each.broker_group, each.partition): float(each.to_sequence) for each in found}

    async def _make_ordered(self, group: str) -> None:
        """Create the group by a member that joins and leaves."""
        member = Member(self._subject, group, MAKER, secrets.token_hex(8), LEASE_MS, "earliest", "")
        await self._target.metadata.sync_member(member, 0, 0, ())
        await self._target.metadata.sync_member(member, 0, 0, (), leaves=True)


log = logging.getLogger("qmq.mirror")

ROUNDS_AT_ONCE: Final = 8


class _Mirrored:
    """A subject, and the state of its mirror."""

    def __init__(self, subject: MirrorSubject, groups: MirroredGroups) -> None:
        self.subject, self.groups = subject, groups
        self.lag = self.failures = 0
        self.well_s = time.monotonic()
        """When a pass ended well."""


class ClusterMirror:
    """`here` and `there` are the names of source and target: the same in every mirror between
    clusters. `folder` keeps its state.
    """

    def __init__(
        self,
        source: qmq.Client,
        target: qmq.Client,
        here: str,
        there: str,
        patterns: Iterable[str],
        folder: Path,
        *,
        moves_groups: bool,
    ) -> None:
        """Raises InvalidArgument."""
        for name in (here, there):
            if not re.fullmatch(r"[\w.-]{1,64}", name):
                raise InvalidArgument(
                    f"a cluster's name has up to 64 letters, digits, dots and dashes, not {name!r}"
                )
        if here == there:
            raise InvalidArgument(
                f"source and target are both named {here!r}: give each cluster its own name"
            )
        try:
            self._patterns = [re.compile(each) for each in patterns]
        except re.error as cause:
            raise InvalidArgument(f"--subject is a regular expression: {cause}") from cause
        self._source, self._target = source, target
        self._here, self._there = here, there
        self._folder = folder
        self._moves_groups = moves_groups
        self._mirrored: dict[str, _Mirrored] = {}
        self.failed: dict[str, QmqError | TimeoutError] = {}
        """The subjects whose last pass failed."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def pass_once(self) -> int:
        """One pass. Returns the messages that are left. Raises NotConnected or AccessDenied if the
        source cannot be listed.
        """
        listed = await self._source.metadata.list_subjects()
        if listed.silent:
            raise NotConnected(f"{', '.join(sorted(listed.silent))} of the source did not answer")
        chosen = [each for each in listed if self._is_chosen(each.settings.name)]
        gate = asyncio.Semaphore(ROUNDS_AT_ONCE)
        await asyncio.gather(*[self._pass_subject(each, gate) for each in chosen])
        for gone in self._mirrored.keys() - {each.settings.name for each in chosen}:
            self._mirrored.pop(gone).subject.close()
        return sum(each.lag for each in self._mirrored.values())

    def _is_chosen(self, subject: str) -> bool:
        return not is_dead_letters(subject) and any(
            each.fullmatch(subject) for each in self._patterns
        )

    async def _pass_subject(
        self, described: pb.SubjectDescription, gate: asyncio.Semaphore
    ) -> None:
        name = described.settings.name
        async with gate:
            mirrored = self._mirrored.get(name)
            try:
                if mirrored is None:
                    mirrored = self._mirrored[name] = await self._begin(described.settings)
                ends, starts = places_in(described)
                mirrored.lag = mirrored.subject.record.lag(
                    ends, starts
                )  # shown while the round runs, which may take hours
                if mirrored.lag or not mirrored.subject.record.notes:
                    await mirrored.subject.round(ends)
                mirrored.lag = mirrored.subject.record.lag(ends, starts)
                if self._moves_groups:
                    mirrored.subject.keep(await mirrored.groups.move(mirrored.subject.record))
                mirrored.well_s = time.monotonic()
                self.failed.pop(name, None)
            except (QmqError, TimeoutError) as failure:
                self.failed[name] = failure
                log.warning("mirroring %s failed, it is tried again: %s", name, failure)
                if mirrored is not None:
                    mirrored.failures += 1

    async def _begin(self, settings: pb.SubjectSettings) -> _Mirrored:
        await self._make(settings)
        subject = MirrorSubject(
            self._source, self._target, settings.name, self._here, self._there, self._folder
        )
        return _Mirrored(
            subject,
            MirroredGroups(
                self._source, self._target, settings.name, is_ordered=bool(settings.order)
            ),
        )

    async def _make(self, settings: pb.SubjectSettings) -> None:
        """Create the subject in the target, if it does not exist. Raises InvalidArgument if the
        target has it as another kind.
        """
        found = await self._target.metadata.find_subject(settings.name)
        if found is None:
            try:
                # The target chooses its own broker groups.
                await self._target.metadata.create_subject(replace(config_of(settings), groups=()))
            except SubjectExists:
                return await self._make(settings)
        elif found.settings.order != settings.order:
            kinds = (
                f"{settings.order or 'unordered'} in {self._here} and "
                f"{found.settings.order or 'unordered'} in {self._there}"
            )
            raise InvalidArgument(
                f"subject {settings.name!r} is {kinds}: delete it in the target, or leave it "
                "out by --subject"
            )
        return None

    def states(self) -> list[MirrorState]:
        """The state of each subject's mirror, for the metrics."""
        now_s = time.monotonic()
        return [
            MirrorState(
                name,
                each.lag,
                each.subject.copied,
                each.subject.left_out,
                each.groups.moves,
                each.failures,
                now_s - each.well_s,
            )
            for name, each in sorted(self._mirrored.items())
        ]

    def close(self) -> None:
        for each in self._mirrored.values():
            each.subject.close()


def places_in(described: pb.SubjectDescription) -> tuple[Places, Places]:
    """(ends, starts) of a subject's queues."""
    queues = {(each.broker_group, each.partition): each for each in described.queues}
    return {key: each.next_sequence for key, each in queues.items()}, {
        key: each.start_sequence for key, each in queues.items()
    }
