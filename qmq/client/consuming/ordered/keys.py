"""Chooses what a consumer hands out next, over all its lanes: a message, or a slice for one that
reads in bulk. Pure: time is a parameter.

Single messages are chosen by the order of keys and the state of each lane (`lane.py`):

* A key is in work from the moment one of its messages is handed out until that message is finished.
  A failed message keeps its key in work through all its pauses: no later message of the key
  overtakes it.
* Messages to be retried go before all others.
* A lane hands out nothing while a failed message blocks it (except that message), and while its
  lease may have ended: a consumer that was paused, or cut off, must not hand out messages that
  another consumer may have by now. Messages that are already handed out are protected by the
  fencing token.

`KeyQueue` has each key's messages worked on in order, and different keys at the same time. A key
has a queue of messages, and at most one message *in work*: the next one waits until that one is
`finished`. Keys take turns: after each message a key goes behind all other ready keys, so that a
key with many messages does not delay others.

One `KeyQueue` serves all lanes of a consumer. A lane may be lost while a handler works on one of
its messages, and be assigned again, or its keys may return in another lane after a route change:
then no second handler may start for the same key.

A lane can be *paused*: its messages keep their places and are not handed out until it is resumed.
`drop` forgets its waiting messages; a message in work stays in work until it is finished.

Worked example: lines a: 1, 3 and b: 2. next gives 1 (of a), then 2 (of b), then nothing.
finished(b), finished(a): next gives 3.

For a consumer that reads in bulk:

* At most one slice of a lane is handed out, and no other slice with the same logical partitions,
  from any lane: a lane may be lost while a slice is handed out, and its keys return in another
  lane. Slices that cannot share a key are handed out at the same time.
* Lanes take turns. A failed slice comes first in its lane, and the lane hands out nothing until the
  slice may be retried, nor while its lease may have ended.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from qmq_ordering.routes import LpRange

from qmq import limits
from qmq.client.consuming.ordered.lane import Cell, LaneState
from qmq.client.consuming.ordered.message import (
    LaneSource,
    MessageRun,
    OrderedMessage,
    OrderedMessages,
)

L = TypeVar("L")
M = TypeVar("M")


class KeyQueue(Generic[L, M]):
    """`L` is the type of a lane (hashable), `M` of a message."""

    def __init__(self) -> None:
        self._ready: OrderedDict[bytes, tuple[L, M]] = OrderedDict()
        """Keys whose next message can be handed out, in their turn, with the first message of each;
        its lane may be paused.
        """
        self._in_work: set[bytes] = set()
        self._lines: dict[bytes, deque[tuple[L, M]]] = {}
        """What waits behind a key's first message, or behind the one in work. Most keys have
        nothing there.
        """
        self.paused: dict[L, OrderedDict[bytes, tuple[L, M]]] = {}
        """Paused lanes, with the keys that are ready except for the pause."""

    def put(self, lane: L, key: bytes, message: M) -> None:
        """Add a message behind all others of its key."""
        self.extend(lane, ((key, message),))

    def extend(self, lane: L, messages: Iterable[tuple[bytes, M]]) -> None:
        """Messages with their keys, each behind all others of its key."""
        ready, in_work, lines, paused = self._ready, self._in_work, self._lines, self.paused
        for key, message in messages:
            if key not in ready and key not in in_work and not (paused and self._is_stopped(key)):
                ready[key] = lane, message
            elif key in lines:
                lines[key].append((lane, message))
            else:
                lines[key] = deque(((lane, message),))

    def _is_stopped(self, key: bytes) -> bool:
        return any(key in stopped for stopped in self.paused.values())

    def next(self) -> tuple[bytes, M] | None:
        """The next message and its key, which is in work from now on; None if there is none."""
        ready, paused = self._ready, self.paused
        while ready:
            key, first = ready.popitem(last=False)
            lane, message = first
            if paused and lane in paused:
                paused[lane][key] = first
                continue
            self._in_work.add(key)
            return key, message
        return None

    def finished(self, key: bytes) -> None:
        """The key's message in work is finished: its next one may be handed out.
        The key must be in work.
        """
        self._in_work.remove(key)
        line = self._lines.get(key)
        if line is not None:
            self._ready[key] = line.popleft()
            if not line:
                del self._lines[key]

    def pause(self, lane: L) -> None:
        """Hand out none of the lane's messages for now."""
        self.paused.setdefault(lane, OrderedDict())

    def resume(self, lane: L) -> None:
        """End the pause."""
        self._ready.update(self.paused.pop(lane, {}))

    def drop(self, lane: L) -> None:
        """Forget the lane's messages and its pause."""
        self.resume(lane)
        firsts = [self._ready, *self.paused.values()]
        keys = dict.fromkeys(
            key for each in firsts for key, first in each.items() if first[0] == lane
        )
        keys |= dict.fromkeys(
            key for key, line in self._lines.items() if any(each == lane for each, _ in line)
        )
        for key in keys:
            waiting = [
                *[each.pop(key) for each in firsts if key in each],
                *self._lines.pop(key, ()),
            ]
            rest = deque(each for each in waiting if each[0] != lane)
            if rest and key not in self._in_work:
                self._ready[key] = rest.popleft()
            if rest:
                self._lines[key] = rest

    @property
    def waiting(self) -> int:
        """The number of messages that are not in work."""
        return sum(map(len, (self._ready, *self.paused.values(), *self._lines.values())))

    def check(self) -> None:
        """The whole invariant, for tests."""
        stopped = [key for keys in self.paused.values() for key in keys]
        can_go_on = {*self._ready, *stopped}
        assert all(self._lines.values())
        assert len(stopped) == len(set(stopped))
        assert not set(stopped) & set(self._ready)
        assert not can_go_on & self._in_work
        assert set(self._lines) <= can_go_on | self._in_work
        assert all(
            first[0] == lane for lane, keys in self.paused.items() for first in keys.values()
        )


class KeyDispatcher:
    def __init__(self) -> None:
        self._keys: KeyQueue[LaneSource, OrderedMessage] = KeyQueue()
        self._tries: dict[Cell, OrderedMessage] = {}
        """Messages to be retried, now or when they are due. No other message of their keys is
        handed out.
        """
        self._again: deque[Cell] = deque()
        """Those of `_tries` that are due."""

    def put(self, messages: Sequence[OrderedMessage]) -> None:
        """Messages of one lane came, in its order."""
        if messages:
            self._keys.extend(messages[0].lane, ((each.cell.key, each) for each in messages))

    def take(self) -> OrderedMessage | None:
        """The next message. No other message of its key is handed out until it is finished."""
        for cell in list(self._again) if self._again else ():
            message = self._tries.get(cell)
            if message is not None and not message.lane.is_sure():
                continue
            self._again.remove(cell)
            if message is None:
                continue
            del self._tries[cell]
            if message.lane.core.begin(cell):
                return message
            self._keys.finished(cell.key)
        following = self._keys.next
        while (found := following()) is not None:
            key, message = found
            lane = message.lane
            if not lane.is_sure():
                self._keep_for_later(message)
            elif lane.core.begin(message.cell):
                return message
            else:
                self._keys.finished(key)
        return None

    def _keep_for_later(self, message: OrderedMessage) -> None:
        """Another consumer may have the message by now, so it waits. It keeps its place, before all
        others of its key.
        """
        self._keys.pause(message.lane)
        self._tries[message.cell] = message
        self._again.append(message.cell)

    def done(self, message: OrderedMessage) -> bool:
        """The message is finished; False if this consumer no longer holds it."""
        cell, keys = message.cell, self._keys
        is_ours = message.lane.core.done(cell)
        keys.finished(cell.key)  # `_over`, without a call: most messages end here
        if keys.paused:
            self.review(message.lane)
        return is_ours

    def failed(self, message: OrderedMessage, now_ms: int, pause_ms: int | None) -> bool:
        """The message waits for another try, or is parked;
        False if this consumer no longer holds it.
        """
        core = message.lane.core
        is_ours = core.failed(message.cell, now_ms, pause_ms)
        if message.cell.state is LaneState.FAILED:
            self._tries[message.cell] = message.again()
            self.review(message.lane)
        else:
            self._over(message)
        return is_ours

    def rejected(self, message: OrderedMessage) -> bool:
        """Park the message's key; False if this consumer no longer holds the message."""
        is_ours = message.lane.core.rejected(message.cell)
        self._over(message)
        return is_ours

    def put_back(self, message: OrderedMessage) -> None:
        """The handler was cancelled: hand the message out again."""
        if message.lane.core.put_back(message.cell):
            self._tries[message.cell] = message.again()
            self._again.append(message.cell)
        else:
            self._over(message)

    def _over(self, message: OrderedMessage) -> None:
        self._keys.finished(message.cell.key)
        # Finishing a message never blocks a lane, and resumes only a lane that is paused; `take`
        # checks the lease.
        if self._keys.paused:
            self.review(message.lane)

    def due(self, cells: Iterable[Cell]) -> None:
        """Note that the pauses of these messages have ended."""
        self._again.extend(cells)

    def review(self, lane: LaneSource) -> None:
        """Pause or resume the lane, after it was blocked or unblocked, or its lease changed. A lane
        that is not attached has nothing to pause.
        """
        if lane.core.position >= 0 and (lane.core.is_blocked or not lane.is_sure()):
            self._keys.pause(lane)
        else:
            self._keys.resume(lane)

    def dropped(self, lane: LaneSource, cells: Iterable[Cell]) -> None:
        """This consumer lost the lane, and these cells are void."""
        self._keys.drop(lane)
        for cell in cells:
            if self._tries.pop(cell, None) is not None:
                self._keys.finished(cell.key)


class BulkDispatcher:
    def __init__(self) -> None:
        self._lanes: dict[LaneSource, deque[MessageRun]] = {}
        """The waiting runs of each lane, in order. The lane whose turn it is comes first."""
        self._handed_out: dict[MessageRun, LpRange] = {}
        """The first run of each slice that is handed out,
        and the logical partitions of the slice.
        """

    def put(self, lane: LaneSource, runs: Sequence[MessageRun]) -> None:
        """Add runs, in the order of their lane."""
        self._lanes.setdefault(lane, deque()).extend(runs)

    def take(self, messages_max: int) -> list[MessageRun]:
        """The next slice, up to `messages_max` messages of one lane, which counts as handed out
        from now on. Empty if there is none.

        A slice ends with the batch that reaches `PULL_BYTES_MAX` of decompressed bodies: what came
        as a few bytes may be large then.
        """
        lane = next(filter(self._may_give, self._lanes), None)
        if lane is None:
            return []
        waiting = self._lanes.pop(lane)
        taken: list[MessageRun] = []
        room, room_bytes = messages_max, limits.PULL_BYTES_MAX
        while room and waiting and waiting[0].cell.state is LaneState.WAITING:
            run = waiting[0]
            if not taken or taken[-1].batch is not run.batch:
                if room_bytes <= 0:
                    break
                room_bytes -= run.batch.view.bodies_bytes
            waiting.popleft()
            if len(run.indices) > room:
                waiting.appendleft(run.split(room))
            lane.core.begin(run.cell)
            taken.append(run)
            room -= len(run.indices)
        if waiting:
            self._lanes[lane] = waiting
        self._handed_out[taken[0]] = lane.lps
        return taken

    def _may_give(self, lane: LaneSource) -> bool:
        first = self._lanes[lane][0]
        return (
            first.cell.state is LaneState.WAITING
            and lane.is_sure()
            and not any(map(lane.lps.overlaps, self._handed_out.values()))
        )

    # --- what became of a slice -------------------------------------------------------------------

    def done(self, messages: OrderedMessages) -> None:
        del self._handed_out[messages.runs[0]]
        for run in messages.runs:
            run.lane.core.done(run.cell)

    def failed(self, messages: OrderedMessages, now_ms: int, pause_ms: int | None) -> None:
        """The slice waits as a whole for another try, before everything else of its lane."""
        core = messages.runs[0].lane.core
        pause = core.policy.pause_ms(messages.attempt) if pause_ms is None else pause_ms
        self._back(messages, [run for run in messages.runs if core.failed(run.cell, now_ms, pause)])

    def put_back(self, messages: OrderedMessages) -> None:
        """The slice was not finished: hand it out again."""
        self._back(messages, [run for run in messages.runs if run.lane.core.put_back(run.cell)])

    def _back(self, messages: OrderedMessages, runs: list[MessageRun]) -> None:
        """Put back the runs that still belong to the lane."""
        del self._handed_out[messages.runs[0]]
        if runs:
            self._lanes.setdefault(runs[0].lane, deque()).extendleft(
                [run.again() for run in reversed(runs)]
            )

    def dropped(self, lane: LaneSource) -> None:
        """Forget the waiting runs of a lane. Slices that were handed out stay with the application
        until they are settled.
        """
        self._lanes.pop(lane, None)
