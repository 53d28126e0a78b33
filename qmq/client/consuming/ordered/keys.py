"""Chooses what a consumer hands out next, over all its lanes: a message, or a slice for one that
reads in bulk. Pure: time is a parameter.

Single messages are read in sequence where nothing speaks against it: one task works through a run
of one lane, and asks for the next message when it has finished the one before. No key can be
overtaken then, and no message needs a queue. As soon as something else is asked for (another
message meanwhile, another try) or the lane goes, the sequence ends: what it has left is divided.

Divided messages are chosen by the order of keys and the state of each lane (`lane.py`):

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
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from qmq_ordering.routes import LpRange

from qmq import limits
from qmq.client.consuming.ordered.lane import Cell, LaneState
from qmq.client.consuming.ordered.message import (
    LaneRun,
    LaneSource,
    MessageRun,
    OrderedMessage,
    OrderedMessages,
)
from qmq.errors import InvalidArgument

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

    def begin(self, key: bytes) -> None:
        """A message of the key, of which nothing waits here, is in work."""
        self._in_work.add(key)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, is paused or in work."""
        return not (self._ready or self._in_work or self._lines or self.paused)

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
    """`stop` tells the one that hands out a run in sequence to hand out no more, and to note in the
    run how far it came.
    """

    def __init__(self, stop: Callable[[], object] = lambda: None) -> None:
        self._stop = stop
        self.in_sequence: LaneRun | None = None
        """The run that is read in sequence."""
        self._runs: dict[LaneSource, deque[LaneRun]] = {}
        """The runs of each lane that are not divided, in order.
        The lane whose turn it is comes first.
        """
        self._keys: KeyQueue[LaneSource, tuple[LaneRun, Cell]] = KeyQueue()
        self._tries: dict[Cell, LaneRun] = {}
        """Messages to be retried, now or when they are due. No other message of their keys is
        handed out.
        """
        self._again: deque[Cell] = deque()
        """Those of `_tries` that are due."""

    def put(self, lane: LaneSource, runs: Sequence[LaneRun]) -> None:
        """Add runs, in the order of their lane."""
        self._runs.setdefault(lane, deque()).extend(runs)

    def take(self, *, in_sequence: bool = False) -> OrderedMessage | None:
        """The next message. No other message of its key is handed out until it is finished.

        With `in_sequence` the caller works on one message at a time. Then a run may begin, which
        has the messages behind this one; no more than one of its messages may be without a verdict.
        """
        self.end_sequence()
        for cell in list(self._again) if self._again else ():
            run = self._tries.get(cell)
            if run is not None and not run.lane.is_sure():
                continue
            self._again.remove(cell)
            if run is None:
                continue
            del self._tries[cell]
            if run.lane.core.begin(cell):
                return run.message(cell)
            self._keys.finished(_key(cell))
        while True:
            following = self._keys.next()
            if following is not None:
                key, (run, cell) = following
                if not run.lane.is_sure():
                    self._keep_for_later(run, cell)
                elif run.lane.core.begin(cell):
                    return run.message(cell)
                else:
                    self._keys.finished(key)
            elif (begun := self._next_run()) is None:
                return None
            elif in_sequence and self._may_begin(begun):
                self.in_sequence = begun
                return begun.begin()
            else:
                self._divide(begun)

    def _next_run(self) -> LaneRun | None:
        """The next run of a lane that may hand out. Lanes take turns."""
        for lane, runs in self._runs.items():
            if lane.is_sure() and not lane.core.is_blocked:
                del self._runs[lane]
                run = runs.popleft()
                if runs:
                    self._runs[lane] = runs
                return run
        return None

    def _may_begin(self, run: LaneRun) -> bool:
        if not run.is_gapless or self._tries or not self._keys.is_empty:
            return False
        try:
            return run.batch.readable_bodies is not None
        except InvalidArgument:  # a library is not installed: the run keeps its place
            self._return(run)
            raise

    def _return(self, run: LaneRun) -> None:
        """What is left of a run comes first in its lane."""
        self._runs.setdefault(run.lane, deque()).appendleft(run)

    def _divide(self, run: LaneRun) -> None:
        """Give each of the run's messages its place behind others of its key."""
        if run.cell.state is not LaneState.WAITING:  # the lane was lost
            return
        base, indices, lane = run.batch.view.base_sequence, run.rest(), run.lane
        keys = run.keys(indices)
        cells = lane.core.divide(run.cell, [base + index for index in indices], keys)
        self._keys.extend(lane, [(key, (run, cell)) for key, cell in zip(keys, cells, strict=True)])

    def end_sequence(self) -> None:
        """What is left of the run in sequence goes back to its lane. A message without a verdict
        stays handed out, by its key.
        """
        run, self.in_sequence = self.in_sequence, None
        if run is None:
            return
        self._stop()
        run.settle_acks()
        run.is_in_sequence = False
        assert run.pull - run.unsettled <= 1, "two messages in sequence without a verdict"
        cell, core = run.cell, run.lane.core
        if run.unsettled < run.pull:
            if run.count:
                run.cell = core.split(cell, run.unsettled, run.pull, 1)
            (cell.key,) = run.keys([run.unsettled - run.batch.view.base_sequence])
            core.begin(cell)
            run.working[run.unsettled] = cell
            self._keys.begin(_key(cell))
        if run.count:
            self._return(run)

    def _keep_for_later(self, run: LaneRun, cell: Cell) -> None:
        """Another consumer may have the message by now, so it waits. It keeps its place, before all
        others of its key.
        """
        self._keys.pause(run.lane)
        self._tries[cell] = run
        self._again.append(cell)

    # --- verdicts ---------------------------------------------------------------------------------

    def done_through(self, run: LaneRun, last: int) -> None:
        """The messages of the run in sequence, up to `last`, are finished."""
        cell, core = run.cell, run.lane.core
        count = last + 1 - run.unsettled
        run.unsettled = last + 1
        if count < cell.count:
            run.cell = core.split(cell, last, last + 1, count)
        core.begin(cell)
        core.done(cell)
        run.decided(cell)

    def done(self, run: LaneRun, sequence: int) -> bool:
        """The message is finished; False if it has a verdict."""
        cell = run.working.pop(sequence, None)
        if cell is None:
            return False
        run.lane.core.done(cell)
        run.decided(cell)
        self._over(run, cell)
        return True

    def failed(self, run: LaneRun, sequence: int, now_ms: int, pause_ms: int | None) -> bool:
        """The message waits for another try, or is parked; False if it has a verdict."""
        cell = self._taken_back(run, sequence)
        if cell is None:
            return False
        if not run.lane.core.policy.blocks:
            self._divide_all(run.lane)
        run.lane.core.failed(cell, now_ms, pause_ms)
        if cell.state is LaneState.FAILED:
            self._tries[cell] = run
            self.review(run.lane)
        else:
            run.decided(cell)
            self._over(run, cell)
        return True

    def rejected(self, run: LaneRun, sequence: int) -> bool:
        """Park the message's key; False if the message has a verdict."""
        cell = self._taken_back(run, sequence)
        if cell is None:
            return False
        self._divide_all(run.lane)
        run.lane.core.rejected(cell)
        run.decided(cell)
        self._over(run, cell)
        return True

    def put_back(self, run: LaneRun, sequence: int) -> bool:
        """The handler was cancelled: hand the message out again; False if it has a verdict."""
        cell = self._taken_back(run, sequence)
        if cell is None:
            return False
        if run.lane.core.put_back(cell):
            self._tries[cell] = run
            self._again.append(cell)
        else:
            self._over(run, cell)
        return True

    def _taken_back(self, run: LaneRun, sequence: int) -> Cell | None:
        if run.is_in_sequence:
            self.end_sequence()
        return run.working.pop(sequence, None)

    def _divide_all(self, lane: LaneSource) -> None:
        """A key may be parked: all of its messages need their cells."""
        for run in self._runs.pop(lane, ()):
            self._divide(run)

    def _over(self, run: LaneRun, cell: Cell) -> None:
        self._keys.finished(_key(cell))
        # Finishing a message never blocks a lane, and resumes only a lane that is paused; `take`
        # checks the lease.
        if self._keys.paused:
            self.review(run.lane)

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
        self._runs.pop(lane, None)
        self._keys.drop(lane)
        for cell in cells:
            if self._tries.pop(cell, None) is not None:
                self._keys.finished(_key(cell))


def _key(cell: Cell) -> bytes:
    assert cell.key is not None
    return cell.key


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
