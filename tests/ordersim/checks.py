"""Compares the results that producers and handlers got with the ledger.

* A producer gets "stored" only for a committed message, with its position.
* A handler gets only committed messages, and none of a parked key. In a range of logical partitions it gets messages of a version only
  when everything of the earlier versions is done there, as committed.
* No message overtakes an earlier one of its key in its partition: that is done, parked, or finished by a handler since its last replay.
* Of each key, a group gets first deliveries in the order of sending; a redelivery returns to an earlier message and comes forward again
  without leaving one out. Messages whose producer got an unknown outcome, and messages set aside, are exempt.
* A message that failed as "not stored" is in no log. At the end no acknowledged message is missing, and every one was finished by a handler
  of each group, or skipped by an operator.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ordersim.violation import Violation

if TYPE_CHECKING:
    from ordersim.run import Simulation
    from qmq.client.consuming.ordered.message import OrderedMessage

Where = tuple[str, int, int]
"""Group, partition, sequence."""


@dataclass(slots=True)
class Line:
    """One group's view of one key. `seen` are message numbers, ascending; `at` is the last delivered one."""

    seen: list[int] = field(default_factory=list)
    at: int = 0
    aside: set[int] = field(default_factory=set)
    """Set aside with their key, and perhaps given back: they may come behind newer ones from partitions of later versions."""


class Checks:
    """See the module."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.sent: dict[bytes, int] = {}
        """How many messages of each key were sent."""
        self.stored: dict[tuple[bytes, int], tuple[int, int]] = {}
        """Acknowledged: where they are."""
        self.refused: dict[tuple[bytes, int], None] = {}
        """Failed, certainly not stored."""
        self.unknown: dict[tuple[bytes, int], None] = {}
        self.finished: set[Where] = set()
        self.failed: set[Where] = set()
        self.skipped: set[Where] = set()
        """Parked, and not given back: an operator skipped the key."""
        self._lines: dict[tuple[str, bytes], Line] = {}
        self._done: set[tuple[str, int, int]] = set()
        self.handed_count = self.again_count = 0

    # --- producers -------------------------------------------------------------------------------------------------------

    def acknowledged(self, key: bytes, number: int, partition: int, sequence: int) -> None:
        """A producer got the answer that a message is stored."""
        found = self._simulation.ledger.find(partition, sequence)
        if found is None or (found.key, found.number) != (key, number):
            raise Violation(
                f"acknowledged: message {number} of {key!r} is reported in partition {partition} at {sequence}; there is {found}"
            )
        self.stored[key, number] = partition, sequence

    # --- handlers --------------------------------------------------------------------------------------------------------

    def handed(self, group: str, consumer: str, message: OrderedMessage) -> None:
        """A handler is given a message."""
        ledger = self._simulation.ledger
        self.handed_count += 1
        found = ledger.find(message.partition, message.sequence)
        if found is None or message.body != b"%s/%d" % (found.key, found.number):
            raise Violation(f"handed out: {consumer} is given {message!r}, {message.body!r}; committed there is {found}")
        name = f"message {found.number} of {found.key!r} (partition {message.partition}, {found.sequence})"
        progress = ledger.parts[message.partition].groups.get(group)
        if progress is None or found.sequence < progress.begins_at:
            raise Violation(f"handed out: {consumer} of group {group} is given {name}, where the group does not begin")
        if found.key in progress.parked:
            raise Violation(f"parked: {consumer} of group {group} is given {name}, while the key is parked")
        for number, part in ledger.parts.items():
            if number < message.partition and group in part.groups and part.groups[group].parked.get(found.key):
                raise Violation(f"parked: {consumer} of group {group} is given {name}, while the key is parked in partition {number}")
        for sequence in ledger.parts[message.partition].by_key[found.key]:
            if sequence >= found.sequence:
                break
            if not (sequence < progress.begins_at or sequence in progress.done or (group, message.partition, sequence) in self.finished):
                raise Violation(f"overtaken: {consumer} of group {group} is given {name}, and nobody has finished the one at {sequence}")
        self._require_before(group, consumer, message.partition, found.lp, name)
        self.require_order(group, consumer, found.key, found.number, name)

    def _require_before(self, group: str, consumer: str, number: int, lp: int, name: str) -> None:
        """Everything of the versions before is done in the logical partition."""
        ledger, routes = self._simulation.ledger, self._simulation.routes
        if (group, number, lp) in self._done:
            return
        since = ledger.parts[number].since
        for version in range(routes.groups[group].since, since):
            before = routes.routes[version].holder(lp).number
            if before != number and not ledger.parts[before].is_finished(group, lp):
                raise Violation(
                    f"versions: {consumer} of group {group} is given {name} of version {since}, and partition {before} of {version} "
                    f"is not finished in logical partition {lp}, as committed"
                )
        self._done.add((group, number, lp))

    def require_order(self, group: str, consumer: str, key: bytes, number: int, name: str) -> None:
        line = self._lines.setdefault((group, key), Line())
        seen = line.seen
        told = f"order: {consumer} of group {group} is given {name} behind {line.at}; seen are {seen[-8:]}"
        to_replay = [each for each in seen[bisect_right(seen, line.at) :] if each not in line.aside]
        if number in line.aside or (key, number) in self.unknown:
            if number not in seen:
                seen.insert(bisect_right(seen, number), number)
            line.at = max(line.at, number)
            return
        if not seen or number > seen[-1]:
            if to_replay:
                raise Violation(f"{told}: it is new, and the replay has not come so far")
            is_whole = self._simulation.routes.groups[group].record.start != "latest"
            missing = [each for each in range(seen[-1] + 1 if seen else 1, number) if (key, each) in self.stored and each not in line.aside]
            if missing and (seen or is_whole):
                raise Violation(f"{told}: {missing} were acknowledged and are left out")
            seen.append(number)
        else:
            self.again_count += 1
            if number not in seen:
                raise Violation(f"{told}: it is seen for the first time behind newer ones")
            if number > line.at and to_replay[0] != number:
                raise Violation(f"{told}: the replay leaves something out")
        line.at = number

    def set_aside(self, group: str, key: bytes, number: int) -> None:
        """A message was parked with its key."""
        self._lines.setdefault((group, key), Line()).aside.add(number)

    def replays(self, group: str, key: bytes, numbers: list[int]) -> None:
        """An operator gives parked messages back."""
        self._done = {each for each in self._done if each[0] != group}
        part = self._simulation.ledger
        for number in numbers:
            for partition, message in part.by_key[key][number]:
                self.finished.discard((group, partition, message.sequence))

    # --- the end ---------------------------------------------------------------------------------------------------------

    def survived(self) -> None:
        """At the end."""
        ledger = self._simulation.ledger
        for (key, number), (partition, sequence) in self.stored.items():
            found = ledger.find(partition, sequence)
            if found is None or (found.key, found.number) != (key, number):
                raise Violation(f"durability: message {number} of {key!r} was acknowledged at {sequence} of {partition}, there is {found}")
            places = [(partition, message.sequence) for partition, message in ledger.by_key[key][number]]
            for group in self._simulation.plan.groups if self._simulation.plan.give_back_every_ms else ():
                if not any((group, *place) in self.finished or (group, *place) in self.skipped for place in places):
                    raise Violation(f"lost: no handler of group {group} has finished message {number} of {key!r} in {places}")
        for key, number in self.refused:
            if ledger.by_key.get(key, {}).get(number):
                raise Violation(f"refused: message {number} of {key!r} was reported as not stored, and is in {ledger.by_key[key][number]}")

    def undrained(self) -> list[str]:
        """For each group a short description of what is not done yet."""
        ledger, routes = self._simulation.ledger, self._simulation.routes
        found: list[str] = []
        for name, group in routes.groups.items():
            for number, part in ledger.parts.items():
                if not any(route.partition(number) for version, route in routes.routes.items() if version >= group.since):
                    continue
                progress = part.groups.get(name)
                begin = progress.begins_at if progress is not None else 0
                left = [m.sequence for m in part.messages[begin:] if progress is None or m.sequence not in progress.done]
                if left:
                    found.append(f"group {name} has {len(left)} messages left in partition {number}, from {left[0]} on")
        return found
