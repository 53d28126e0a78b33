"""The values of `start` in a group's record: where the group starts or is moved to, and which partitions' brokers get it. Pure.

    value            the group reads                                           sent to
    earliest         a new group: from version 1, from the beginning           none
    latest           a new group: from the latest version, from its end        the partitions of that version
    reset:earliest   from version 1, from the beginning                        all partitions of all versions
    reset:latest     from the latest version, from its end                     all partitions of all versions
    reset:TIME_MS    from the first version with a partition that has later    all partitions of all versions
                     messages, from that time
    unpark:ID        unchanged, except for the logical partition of one key    none
    delete           nothing: the group is being deleted (placement.py)   all brokers, to delete the group's progress

A partition that only later versions have is always read from its beginning, because its messages follow those of its source partitions.
A partition that only earlier versions have is left at its end: the group does not read it, and no key stays parked there. A move forgets
every parked key; if it left the older messages of a key parked, a later replay would put them behind newer ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from qmq_ordering.routes import Route

from qmq.errors import InvalidArgument
from qmq.proto.v1 import control_pb2 as control

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
UNPARK: Final = "unpark:"
DELETE: Final = "delete"
_RESET: Final = "reset:"


class Start(NamedTuple):
    text: str

    @classmethod
    def parse(cls, text: str) -> Start:
        """Raises InvalidArgument."""
        where = text.removeprefix(_RESET)
        if text == DELETE or where in (EARLIEST, LATEST) or (text.startswith(_RESET) and where.isdecimal()) or text.startswith(UNPARK):
            return cls(text)
        raise InvalidArgument(f"a group starts at {EARLIEST} or {LATEST}, not {text!r}")

    @classmethod
    def of_new(cls, text: str) -> Start:
        """The start that a consumer requests; empty: earliest. Raises InvalidArgument."""
        if text not in ("", EARLIEST, LATEST):
            raise InvalidArgument(f"a group starts at {EARLIEST} or {LATEST}, not {text!r}")
        return cls(text or EARLIEST)

    @classmethod
    def of_reset(cls, request: control.ResetGroupRequest) -> Start:
        """The start of a reset. Raises InvalidArgument for a sequence, which is only valid within one partition."""
        which = request.WhichOneof("target")
        if which == "sequence" or which is None:
            raise InvalidArgument("a group of an ordered subject is moved to the earliest, the latest, or a time")
        return cls(_RESET + (str(max(0, request.time_ms)) if which == "time_ms" else which))

    @property
    def _where(self) -> str:
        return self.text.removeprefix(_RESET)

    @property
    def is_latest(self) -> bool:
        """True if the start is the end of the latest version."""
        return self._where == LATEST

    @property
    def needs_placing(self) -> bool:
        """True if brokers must know the start before the group is ready."""
        return self.text not in (EARLIEST, DELETE)

    @property
    def moves(self) -> bool:
        """True if the group may have begun before, so that it is moved."""
        return self.text.startswith(_RESET)

    @property
    def is_delicate(self) -> bool:
        """True if only the metaserver that began the move should continue it, unless that metaserver has stopped."""
        return self.moves or self.text.startswith(UNPARK)

    def version(self, routes: Mapping[int, Route], last_append_ms: Mapping[int, int]) -> int:
        """The version at which a reset begins. `routes`: all versions. `last_append_ms`: by partition, when its broker stored its last
        message. The dates of the versions are those of a metaserver's clock, which may be wrong: a version chosen by them could lie
        behind messages that were stored since.
        """
        if self._where in (EARLIEST, LATEST):
            return 1 if self._where == EARLIEST else max(routes)
        newest = {part.number: version for version, route in sorted(routes.items()) for part in route.partitions}
        return min((newest[number] for number, at_ms in last_append_ms.items() if at_ms >= int(self._where)), default=max(routes))

    def places(self, routes: Mapping[int, Route], first: int) -> dict[int, control.LanePlace]:
        """The starts for brokers by partition. `routes`: all versions; the group reads those from `first` on."""
        if self.text == EARLIEST or self.text.startswith(UNPARK):
            return {}
        here = {part.number for part in routes[first].partitions}
        later = {part.number for version, route in routes.items() if version > first for part in route.partitions} - here
        left = {part.number for route in routes.values() for part in route.partitions} - here - later
        found = {number: self._place(number) for number in here}
        if self.moves:
            found.update({number: control.LanePlace(partition=number, earliest=True) for number in later})
            found.update({number: control.LanePlace(partition=number, latest=True) for number in left})
        return found

    def _place(self, number: int) -> control.LanePlace:
        if self._where == EARLIEST:
            return control.LanePlace(partition=number, earliest=True)
        if self._where == LATEST:
            return control.LanePlace(partition=number, latest=True)
        return control.LanePlace(partition=number, time_ms=int(self._where))
