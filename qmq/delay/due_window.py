"""Due messages on their way: batches that wait to be planned (`DueBatcher`), and batches of one
destination (`DueWindow`). Pure.

`DueWindow` is an in-flight window (qmq/delivery/window.py) whose batches are planned in the log
before they are sent.

    admitted ──planned──▶ to be sent ──next──▶ on its way ──stored──▶ done
                              ▲                    │ refused, or outcome unknown: this batch and all
                              └────────────────────┤ after it are sent again, after a rest
                                                   │
                                                   └ certainly not stored, and not to be sent again
                                                     under its number ──▶ void

The destination is a broker group (unordered subjects) or a partition (ordered ones). The meaning of
each answer:

    answer                           unordered                      ordered
    stored                           done                           done
    unknown outcome (connection      uncertain: sent again here,    the same
    lost, no answer)                 without a limit
    Overloaded, NotMaster,           sent again after a rest;       sent again after a rest
    DiskFull ...                     `release`: void, unless
                                     uncertain
    ReadOnly                         the same                       (does not occur)
    RouteChanged                     (does not occur)               sent again after a rest, the
                                                                    route is requested; when the
                                                                    partition is left: void from
                                                                    there on
    OutOfSequence after a refused    (does not occur)               part of that refusal
    one
    OutOfSequence of the first       (does not occur)               the broker has forgotten the
    undecided one                                                   producer: void from there on,
                                                                    new id
    InvalidArgument: the content     void; `is_lost` if uncertain   the same, with all after it; new
    is refused for good                                             id
    MessageTooLarge, others for      void; if uncertain: sent       the same, with all after it; new
    good                             again after a long rest        id
    none, and the partition is                                      void, `is_lost`: sent again
    fenced                                                          elsewhere with the same message
                                                                    ids

Rules:
* A batch leaves only when it is planned, and only after all batches before it.
* Ordered: a broker takes number n of a producer only after n - 1. If a batch will never be stored,
  no batch after it is stored either. These batches are void when everything before them is decided,
  and the next batch has a new producer id and begins at 0. For the same reason, if a batch is
  stored, all batches before it are stored, answered or not.
* Ordered: batches of another producer id (an earlier master's, or the next id) wait until all
  batches of the current one are decided, because the broker keeps no order between two producers.
* Voids are returned in the order of the batches, and must be written from the last to the first:
  whichever part of them a crash leaves, the open plans of a producer then have no gap.

`DueBatcher` has the unplanned due messages of one subject (or partition), in order, and makes
batches of them:
* Only messages of one *sort* share a batch: a batch has one set of flags, and directed messages of
  one batch have one consumer group; create times are within 2^32 ms of each other, the range of a
  batch's column.
* A batch takes the first message, and then later ones of the same sort, skipping others. Later
  messages of a skipped key are skipped, too: each key keeps its order, and mixed sorts still make
  large batches.
* A batch has a limit of messages and bytes; a larger message goes alone. A *suspect* (it was in a
  batch that was refused as too large) is only taken into batches of at most as many messages as its
  entry says.

Worked example: k:1, l:2 (directed), l:3, k:4. The first batch is 1 and 4: 2 is of another sort, and
3 comes after 2. The second one is 2, the third 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from qmq import model
from qmq.delay.batches import DueMessage, SchedulePlace
from qmq.delay.plan_log import Draft
from qmq.delivery.retries import DELAY_SERVER, RetryRules
from qmq.delivery.window import ASK_S, InFlightBatch, InFlightWindow
from qmq.errors import NotConnected, QmqError
from qmq.log.actions import PlanAction
from qmq.wire.batch import columns_of_copies, encode
from qmq.wire.batch_columns import BatchFlag
from qmq.wire.frame_payloads import Produced

WINDOW: Final = 8
"""Enough to hide a commit and an answer behind full batches; far below the broker's window of
remembered batches (qmq/log/queue.py).
"""


@dataclass(slots=True, eq=False)
class DueBatch(InFlightBatch):
    """One batch of due messages, from planning until its outcome is known.

    A batch that an earlier master planned may have been sent by it, so it is uncertain from the
    beginning.
    """

    draft: Draft
    plan: PlanAction | None = None
    """None until the plan is committed: the batch must not be sent before."""
    is_lost: bool = False
    """Whether its outcome can never be known: its messages are sent again, with their ids."""
    fault: QmqError | None = None
    """The reason why it can never be stored."""
    says_again: bool = False
    """Whether `encoded` has the flag `BatchFlag.AGAIN`."""

    @property
    def producer_id(self) -> int:
        """The producer id of its number."""
        return self.draft.producer_id


class DueWindow(InFlightWindow[DueBatch]):
    """The window of one destination. `partition` is 0 for unordered subjects.

    A batch is admitted by adding it at the end of `flight`; batches of an earlier master come
    before the first new one.
    """

    def __init__(
        self,
        group: str,
        partition: int = 0,
        *,
        is_ordered: bool = False,
        rules: RetryRules = DELAY_SERVER,
        ask_s: float = ASK_S,
    ) -> None:
        super().__init__(WINDOW, rules, ask_s)
        self.group, self.partition, self.is_ordered = group, partition, is_ordered
        self._producer_id = 0
        self._next_number = 0
        self._dead: DueBatch | None = None  # this batch and all after it will never be stored there
        self._done: list[tuple[DueBatch, Produced]] = []
        self._void: list[DueBatch] = []

    # --- out: what is new -------------------------------------------------------------------------

    def may_admit(self, now: float) -> bool:
        """Whether a new batch may be planned for this destination: it would be sent soon."""
        flight = self.flight
        return (
            self.is_connected
            and not self.is_stalled
            and not self.is_left
            and self._dead is None
            and now >= self._backoff_until
            and len(flight) < self._window
            and (not flight or not self.is_ordered or flight[-1].producer_id == self._producer_id)
        )

    def number(self, new_id: Callable[[], int]) -> tuple[int, int]:
        """The (producer id, number) of the next batch that is admitted for a partition."""
        if not self._producer_id:
            self._producer_id, self._next_number = new_id(), 0
        self._next_number += 1
        return self._producer_id, self._next_number - 1

    def planned(self, batch: DueBatch, plan: PlanAction) -> None:
        """The plan is committed: the batch may be sent."""
        batch.plan = plan
        self._void_dead()

    # --- out: what to send ------------------------------------------------------------------------

    def _may_send(self, batch: DueBatch) -> bool:
        if (
            batch.plan is None
            or batch is self._dead
            or (self._sent and self.is_ordered and batch.producer_id != self.flight[0].producer_id)
        ):
            return False
        return super()._may_send(batch)

    def take_done(self) -> list[tuple[DueBatch, Produced]]:
        """The batches stored since the last call, each once, with their positions."""
        done, self._done = self._done, []
        return done

    def take_void(self) -> list[DueBatch]:
        """The batches that must not be sent again unchanged, each once, in order."""
        void, self._void = self._void, []
        return void

    @property
    def is_settled(self) -> bool:
        return super().is_settled and self._is_planned

    @property
    def _is_planned(self) -> bool:
        return all([batch.plan is not None for batch in self.flight])  # noqa: C419 - faster than a generator

    def is_troubled(self, now: float) -> bool:
        """Whether the destination cannot take a batch now, for another reason than load."""
        return (
            self.is_stalled
            or not self.is_connected
            or now < self._backoff_until
            or (self.trouble is not None and bool(self.flight))
        )

    # --- in: answers ------------------------------------------------------------------------------

    def stored(self, batch: DueBatch, produced: Produced, now: float) -> None:
        """A try was answered: the batch is stored at this place."""
        if self.acknowledged(batch, now):
            for each in [*self._before(batch), batch]:
                self._done.append((each, produced))
        self._void_dead()

    def refused(self, batch: DueBatch, attempt: int, failure: QmqError, now: float) -> None:
        super().refused(batch, attempt, failure, now)
        self._void_dead()

    def _before(self, batch: DueBatch) -> list[DueBatch]:
        """The batches that must be stored if this one is: all earlier ones of its producer."""
        if not self.is_ordered:
            return []
        number = batch.draft.batch_sequence
        found = [
            each
            for each in self.flight
            if each.producer_id == batch.producer_id and each.draft.batch_sequence < number
        ]
        for each in found:
            self._remove(each)
        return found

    def _forgotten(self, batch: DueBatch) -> None:
        """The broker forgot the producer, so the outcome of this batch stays unknown."""
        if self._dead is None:
            self._dead = batch
            self._mark_out(batch)

    def _reject(self, batch: DueBatch, failure: QmqError) -> None:
        batch.fault = failure
        self._mark_out(batch)
        if self.is_ordered:
            self._dead = batch
        else:
            self._remove(batch)
            self._void.append(batch)

    @staticmethod
    def _mark_out(batch: DueBatch) -> None:
        batch.is_lost, batch.is_out = not batch.is_certain, True

    # --- in: ends ---------------------------------------------------------------------------------

    def release(self) -> None:
        """For a window to a broker group: make batches void that are certainly not stored there, so
        that another group may take their messages.
        """
        for batch in [each for each in self.flight if each.is_certain and each.plan is not None]:
            self._remove(batch)
            self._void.append(batch)

    def _void_dead(self) -> None:
        """Make batches void that can never be stored. Done when all earlier batches are decided and
        all their messages are planned.
        """
        if self._dead is not None and self.flight[0] is self._dead and self._is_planned:
            self.settle()

    def settle(self) -> None:
        """Make all remaining batches void: they will never be stored here."""
        for batch in self.flight:
            batch.is_gone = True
        self._void += self.flight
        self.flight = []
        self.is_stalled = False
        self._dead, self._sent, self._producer_id = None, 0, 0

    # --- in: connections and time -----------------------------------------------------------------

    def stalled(self) -> None:
        super().stalled()
        self.trouble = self.trouble or NotConnected(f"broker group {self.group} does not answer")

    def _give_up(self) -> None:
        super()._give_up()
        for batch in self.flight:
            if batch.is_certain:
                break
            batch.is_lost = True


AHEAD: Final = 4
"""A batch is selected from at most this multiple of its number of messages."""
MESSAGE_BYTES: Final = 40
"""The approximate bytes of a message besides its body, key, tags and headers."""
_ERA_BITS: Final = 32
_DIRECTED: Final = int(BatchFlag.DIRECTED)
_AGAIN: Final = int(BatchFlag.AGAIN)

Sort = tuple[int, bytes | None]
"""The properties that messages of one batch must share: the era of the create time, and the
consumer group that the message is directed to (None: all groups).
"""


class Limits(NamedTuple):
    """The limits of one batch."""

    messages: int
    bytes: int


def sort_of(message: DueMessage) -> Sort:
    """The properties that messages of one batch must share."""
    group = message.headers.get(model.GROUP, b"") if message.flags & _DIRECTED else None
    return message.create_time_ms >> _ERA_BITS, group


def size_of(message: DueMessage) -> int:
    """The approximate bytes of a message in a batch."""
    size = len(message.body) + len(message.key) + MESSAGE_BYTES
    if message.tags:
        size += sum(map(len, message.tags)) + 16 * len(message.tags)
    if message.headers:
        size += (
            sum(map(len, message.headers))
            + sum(map(len, message.headers.values()))
            + 8 * len(message.headers)
        )
    return size


class DueBatcher:
    """`suspects` is shared by the batchers of a subject."""

    def __init__(self, limits: Limits, suspects: dict[SchedulePlace, int] | None = None) -> None:
        self.messages: deque[DueMessage] = deque()
        self._limits = limits
        self._suspects = suspects if suspects is not None else {}

    def __len__(self) -> int:
        return len(self.messages)

    def __bool__(self) -> bool:
        return bool(self.messages)

    def put_back(self, messages: Sequence[DueMessage]) -> None:
        """Add messages before all others, in order."""
        self.messages.extendleft(reversed(messages))

    def withdraw(self, place: SchedulePlace) -> bool:
        """Remove a message; False if it is not here."""
        for at, message in enumerate(self.messages):
            if message.place == place:
                del self.messages[at]
                return True
        return False

    def take(self) -> tuple[list[DueMessage], int]:
        """The next batch and its approximate bytes. There must be a message."""
        messages, (most, bytes_max), suspects = self.messages, self._limits, self._suspects
        sort = sort_of(messages[0])
        era, is_directed = sort[0], sort[1] is not None
        taken, passed, keys = list[DueMessage](), list[DueMessage](), set[bytes]()
        size = 0
        while messages and len(taken) < most and len(passed) < AHEAD * most:
            message = messages[0]
            is_other = (
                message.create_time_ms >> _ERA_BITS != era
                or (message.flags & _DIRECTED != 0) != is_directed
            )
            if (
                is_other
                or (is_directed and sort_of(message) != sort)
                or (keys and message.key in keys)
            ):
                passed.append(messages.popleft())
                if message.key:
                    keys.add(message.key)
                continue
            grown = size + size_of(message)
            if suspects:
                most = min(most, suspects.get(message.place, most))
            if taken and (grown > bytes_max or len(taken) >= most):
                break
            taken.append(messages.popleft())
            size = grown
        self.put_back(passed)
        return taken, size


def encoded(
    draft: Draft, logical_partitions: Sequence[int] | None = None, *, is_again: bool = False
) -> tuple[bytes, bytes]:
    """The encoded batch: messages of one sort as they were sent, without the column DUE; with
    `is_again` if it may have been sent before.

    Raises MessageTooLarge, InvalidArgument.
    """
    messages = draft.messages
    keys = [message.key for message in messages]
    columns, created = columns_of_copies(
        [message.body for message in messages],
        keys,
        [message.tags for message in messages],
        [message.headers for message in messages],
        [message.create_time_ms for message in messages],
        [message.message_id for message in messages],
    )
    if logical_partitions is not None:
        columns.keys, columns.logical_partitions = keys, logical_partitions
    return encode(
        draft.subject.encode(),
        columns,
        producer_id=draft.producer_id,
        batch_sequence=draft.batch_sequence,
        create_time_ms=created,
        flags=messages[0].flags & _DIRECTED | (_AGAIN if is_again else 0),
        partition=draft.partition,
    )
