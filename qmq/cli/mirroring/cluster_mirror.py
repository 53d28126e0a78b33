"""Mirrors the subjects of one cluster in another, with the progress of groups (docs/BACKUP.md).

A pass: list the source's subjects, create the missing ones in the target, and for each subject with new messages copy one round, then move
its groups. A subject that fails is retried in the next pass and does not delay the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import qmq
from qmq.cli.mirroring.mirror_groups import MirroredGroups
from qmq.cli.mirroring.mirror_notes import Places
from qmq.cli.mirroring.mirror_subject import MirrorSubject
from qmq.errors import InvalidArgument, NotConnected, QmqError, SubjectExists
from qmq.model import is_dead_letters
from qmq.node.metrics.copies import MirrorState
from qmq.wire.subject_settings import config_of

if TYPE_CHECKING:
    from qmq.proto.v1 import meta_pb2 as pb

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
    """`here` and `there` are the names of source and target: the same in every mirror between clusters. `folder` keeps its state."""

    def __init__(
        self, source: qmq.Client, target: qmq.Client, here: str, there: str, patterns: Iterable[str], folder: Path, *, moves_groups: bool
    ) -> None:
        """Raises InvalidArgument."""
        for name in (here, there):
            if not re.fullmatch(r"[\w.-]{1,64}", name):
                raise InvalidArgument(f"a cluster's name has up to 64 letters, digits, dots and dashes, not {name!r}")
        if here == there:
            raise InvalidArgument(f"source and target are both named {here!r}: give each cluster its own name")
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
        """One pass. Returns the messages that are left. Raises NotConnected or AccessDenied if the source cannot be listed."""
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
        return not is_dead_letters(subject) and any(each.fullmatch(subject) for each in self._patterns)

    async def _pass_subject(self, described: pb.SubjectDescription, gate: asyncio.Semaphore) -> None:
        name = described.settings.name
        async with gate:
            mirrored = self._mirrored.get(name)
            try:
                if mirrored is None:
                    mirrored = self._mirrored[name] = await self._begin(described.settings)
                ends, starts = places_in(described)
                mirrored.lag = mirrored.subject.record.lag(ends, starts)  # shown while the round runs, which may take hours
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
        subject = MirrorSubject(self._source, self._target, settings.name, self._here, self._there, self._folder)
        return _Mirrored(subject, MirroredGroups(self._source, self._target, settings.name, is_ordered=bool(settings.order)))

    async def _make(self, settings: pb.SubjectSettings) -> None:
        """Create the subject in the target, if it does not exist. Raises InvalidArgument if the target has it as another kind."""
        found = await self._target.metadata.find_subject(settings.name)
        if found is None:
            try:
                # The target chooses its own broker groups.
                await self._target.metadata.create_subject(replace(config_of(settings), groups=()))
            except SubjectExists:
                return await self._make(settings)
        elif found.settings.order != settings.order:
            kinds = f"{settings.order or 'unordered'} in {self._here} and {found.settings.order or 'unordered'} in {self._there}"
            raise InvalidArgument(f"subject {settings.name!r} is {kinds}: delete it in the target, or leave it out by --subject")
        return None

    def states(self) -> list[MirrorState]:
        """The state of each subject's mirror, for the metrics."""
        now_s = time.monotonic()
        return [
            MirrorState(name, each.lag, each.subject.copied, each.subject.left_out, each.groups.moves, each.failures, now_s - each.well_s)
            for name, each in sorted(self._mirrored.items())
        ]

    def close(self) -> None:
        for each in self._mirrored.values():
            each.subject.close()


def places_in(described: pb.SubjectDescription) -> tuple[Places, Places]:
    """(ends, starts) of a subject's queues."""
    queues = {(each.broker_group, each.partition): each for each in described.queues}
    return {key: each.next_sequence for key, each in queues.items()}, {key: each.start_sequence for key, each in queues.items()}
