"""A channel: the parcels that go to one destination, in order. Pure: no socket, no loop, no clock; time comes in as a number.

    admitted ──planned──▶ to be sent ──next──▶ on its way ──stored──▶ done
                              ▲                    │ refused, or nobody knows: sent again, it and all behind it, after a rest
                              └────────────────────┤
                                                   └ certainly not stored, and not to be sent again under its number ──▶ void

The destination is a broker group (unordered subjects) or a partition (ordered ones). What an answer means:

| answer | unordered | ordered |
|---|---|---|
| stored | done | done |
| nobody knows (connection lost, no answer) | uncertain: sent again here, for ever | the same |
| Overloaded, NotMaster, DiskFull ... | sent again after a rest; `release`: void, unless uncertain | sent again after a rest |
| ReadOnly | the same | (does not come) |
| RouteChanged | (does not come) | sent again after a rest, the route is asked for; when the partition is left: void from there on |
| OutOfSequence behind a refused one | (does not come) | part of that refusal |
| OutOfSequence of the first undecided one | (does not come) | the broker has forgotten the producer: void from there on, new id |
| InvalidArgument: what is in it is at fault, for good | void; `is_lost` if uncertain | the same, with all behind it; new id |
| MessageTooLarge, others for good | void; if uncertain: sent again after a long rest | the same, with all behind it; new id |
| none, and the partition is fenced | | void, `is_lost`: sent again elsewhere with the same message ids |

Rules:
* A parcel leaves only when it is planned, and only behind all before it. Up to `WINDOW` are under way; after a refusal one goes ahead as a
  probe.
* Ordered: a broker takes number n of a producer only behind n - 1, so a parcel that will never be there takes all behind it along: none of
  them is there. They are void when everything before is decided, and what comes next has a new producer id and begins at 0.
  For the same reason all before one that is stored are stored, answered or not.
* Ordered: parcels of another producer id (an earlier master's, or before a new one) wait until all of the former are decided: between two
  producers the broker keeps no order.
* Voids are given in the order of the parcels, to be written from the last to the first: so whatever part of them a crash leaves,
  the open plans of a producer have no gap.
* A partition that a newer route does not have is *left*: nothing new is sent there. What is uncertain is asked about by sending it again;
  the channel is settled when its first undecided parcel is certainly not stored, or there is none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

from qmq.client.send_retries import is_worth_another_try, rest_s
from qmq.delay.outlets.parcel import Parcel
from qmq.errors import CorruptBatch, InvalidArgument, NotConnected, Outcome, OutOfSequence, QmqError, RouteChanged, Unavailable
from qmq.log.actions import PlanAction
from qmq.wire.frame_payloads import Produced

WINDOW: Final = 8
"""Enough to hide a commit and an answer behind full batches; far below the broker's window of remembered batches (qmq/log/producers.py)."""
ASK_S: Final = 0.5
"""How long a fenced partition is asked before what it may have is given up."""
PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 30.0

Rest = Callable[[int, QmqError], float]
"""(refusals in a row, the last one) -> seconds to keep still."""


def pause_s(refusals: int, failure: QmqError) -> float:
    """Short where a broker is only busy or gone; rising to 30 s where somebody has to do something."""
    if isinstance(failure, Unavailable | CorruptBatch):
        return rest_s(refusals, failure)
    return min(PAUSE_S * 2.0 ** min(refusals, 10), PAUSE_S_MAX) * random.uniform(0.7, 1.0)  # noqa: S311 - jitter, not a secret


class Channel:
    """`partition` is 0 for unordered subjects."""

    def __init__(self, group: str, partition: int = 0, *, is_ordered: bool = False, rest: Rest = pause_s, ask_s: float = ASK_S) -> None:
        self.group, self.partition, self.is_ordered = group, partition, is_ordered
        self.flight: list[Parcel] = []
        self.is_connected = False
        self.is_stalled = False
        self.is_left = False
        self.is_fenced = False
        self.wants_route = False
        """Whether the partition refused as if it were sealed, and no newer route is known yet."""
        self.trouble: QmqError | None = None
        """Why it cannot be used just now; None if it can, or was not tried."""
        self._rest_s, self._ask_s = rest, ask_s
        self._producer_id = 0
        self._next_number = 0
        self._sent = 0  # flight[:_sent] are on their way over the connection in use
        self._run = 0  # each refusal begins a new run of sending; only answers of the present run say that all is well
        self._window = WINDOW
        self._refusals = 0
        self._rests_until = 0.0
        self._quiet_since = 0.0
        self._dead: Parcel | None = None  # it and all behind it will never be there
        self._is_given_up = False
        self._done: list[tuple[Parcel, Produced]] = []
        self._void: list[Parcel] = []

    # --- out: what is new ----------------------------------------------------------------------------------------------

    def may_admit(self, now: float) -> bool:
        """Whether a new parcel may be planned for it: it would leave soon."""
        flight = self.flight
        return (
            self.is_connected
            and not self.is_stalled
            and not self.is_left
            and self._dead is None
            and now >= self._rests_until
            and len(flight) < self._window
            and (not flight or not self.is_ordered or flight[-1].producer_id == self._producer_id)
        )

    def number(self, new_id: Callable[[], int]) -> tuple[int, int]:
        """(producer id, number) of the parcel that is admitted next to a partition."""
        if not self._producer_id:
            self._producer_id, self._next_number = new_id(), 0
        self._next_number += 1
        return self._producer_id, self._next_number - 1

    def admit(self, parcel: Parcel) -> None:
        """One more, behind all others. An earlier master's come before the first new one."""
        self.flight.append(parcel)

    def planned(self, parcel: Parcel, plan: PlanAction) -> None:
        """The ledger has committed it: it may leave."""
        parcel.plan = plan
        self._bury()

    # --- out: what to send ---------------------------------------------------------------------------------------------

    def next(self, now: float, room: int = 1 << 40) -> Parcel | None:
        """The parcel to send now, over the connection in use, if there is one: it counts as sent. Ask until there is none.

        `room`: bytes that may leave; one parcel may always be on its way.
        """
        flight, sent = self.flight, self._sent
        if sent == len(flight) or not self.is_connected or now < self._rests_until or sent >= self._window or self.is_settled:
            return None
        parcel = flight[sent]
        if parcel.plan is None or parcel is self._dead or (self.is_left and parcel.is_certain):
            return None
        if sent and (parcel.size > room or (self.is_ordered and parcel.producer_id != flight[0].producer_id)):
            return None
        self._sent += 1
        parcel.attempts += 1
        parcel.unanswered += 1
        parcel.run = self._run
        if self.is_left and not parcel.first_question:
            parcel.first_question = parcel.attempts
        return parcel

    def take_done(self) -> list[tuple[Parcel, Produced]]:
        """What was stored since, each parcel once, and where."""
        done, self._done = self._done, []
        return done

    def take_void(self) -> list[Parcel]:
        """What is not to be sent again as it is, each parcel once, in order."""
        void, self._void = self._void, []
        return void

    @property
    def is_settled(self) -> bool:
        """Whether the partition is left and the fate of every parcel that was sent there is known (or given up)."""
        flight = self.flight
        return self.is_left and (not flight or ((flight[0].is_certain or self._is_given_up) and self._is_planned))

    @property
    def _is_planned(self) -> bool:
        return all([parcel.plan is not None for parcel in self.flight])  # noqa: C419 - faster than a generator

    def settle(self) -> None:
        """Of a settled channel: all that is left is void."""
        self._clear()

    def wake_at(self, now: float) -> float:
        """When `tick` and `next` are to be called at the latest; infinity if only events can change anything."""
        at = math.inf
        if self._is_asking_fenced:
            at = self._quiet_since + self._ask_s
        if self._rests_until > now:
            at = min(at, self._rests_until)
        return at

    def is_troubled(self, now: float) -> bool:
        """Whether it cannot take a parcel just now, for another reason than that it is busy."""
        return self.is_stalled or not self.is_connected or now < self._rests_until or (self.trouble is not None and bool(self.flight))

    # --- in: answers ---------------------------------------------------------------------------------------------------

    def answered(self, parcel: Parcel, attempt: int, answer: Produced | QmqError, now: float) -> None:
        """What became of a try; each try is answered once, in any order, also long after another connection is in use."""
        parcel.unanswered -= 1
        if parcel.is_gone:
            return
        if isinstance(answer, QmqError):
            self._refused(parcel, attempt, answer, now)
        else:
            self._stored(parcel, answer, now)
        self._bury()

    def _stored(self, parcel: Parcel, produced: Produced, now: float) -> None:
        for each in self._up_to(parcel):
            self._remove(each)
            self._done.append((each, produced))
        self._quiet_since = now
        if parcel.run == self._run:
            self._window, self._refusals = WINDOW, 0
            self.trouble, self.is_stalled, self.wants_route = None, False, False

    def _up_to(self, parcel: Parcel) -> list[Parcel]:
        """What is stored if this one is."""
        if not self.is_ordered or parcel is self.flight[0]:
            return [parcel]
        before = self.flight[: self.flight.index(parcel)]
        return [*[each for each in before if each.producer_id == parcel.producer_id], parcel]

    def _remove(self, parcel: Parcel) -> None:
        at = self.flight.index(parcel)
        del self.flight[at]
        self._sent -= at < self._sent
        self.is_stalled = self.is_stalled and bool(self.flight)
        parcel.is_gone = True

    def _refused(self, parcel: Parcel, attempt: int, failure: QmqError, now: float) -> None:
        if failure.outcome is not Outcome.NOT_STORED:
            parcel.is_uncertain = True
        elif isinstance(failure, RouteChanged) and 0 < parcel.first_question <= attempt:
            parcel.is_out, self._quiet_since = True, now
        at = self.flight.index(parcel)
        if attempt != parcel.attempts or at >= self._sent:
            return
        self._sent = at
        self._run += 1
        if isinstance(failure, InvalidArgument):
            parcel.is_lost, parcel.is_out = not parcel.is_certain, True
        if is_worth_another_try(failure) or not parcel.is_certain:
            self._rest(parcel, failure, now)
        else:
            self._reject(parcel, failure)

    def _rest(self, parcel: Parcel, failure: QmqError, now: float) -> None:
        if isinstance(failure, RouteChanged):
            self.wants_route = not self.is_left
        elif isinstance(failure, OutOfSequence):
            self._out_of_sequence(parcel)
        else:
            self.trouble = failure
        self._window = 1
        self._refusals += 1
        self._rests_until = now + self._rest_s(self._refusals, failure)

    def _out_of_sequence(self, parcel: Parcel) -> None:
        """With every parcel before it decided nothing is missing: the broker has forgotten the producer, and whether it had this one."""
        if parcel is self.flight[0] and self._dead is None and not self.is_left:
            parcel.is_lost = not parcel.is_certain
            parcel.is_out = True
            self._dead = parcel

    def _reject(self, parcel: Parcel, failure: QmqError) -> None:
        """The parcel itself is at fault."""
        parcel.fault = failure
        if self.is_ordered:
            self._dead = parcel
        else:
            self._remove(parcel)
            self._void.append(parcel)

    # --- in: ends ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Of a channel to a broker group: what is certainly not there is void, so that another group may have it."""
        for parcel in [each for each in self.flight if each.is_certain and each.plan is not None]:
            self._remove(parcel)
            self._void.append(parcel)

    def _bury(self) -> None:
        """What will never be there is void when everything before it is decided, and all of it is planned."""
        if self._dead is not None and self.flight[0] is self._dead and self._is_planned:
            self._clear()

    def _clear(self) -> None:
        for parcel in self.flight:
            parcel.is_gone = True
        self._void += self.flight
        self.flight = []
        self.is_stalled = False
        self._dead, self._sent, self._producer_id = None, 0, 0

    # --- in: connections and routes ------------------------------------------------------------------------------------

    def connected(self) -> None:
        """A connection to the group's master stands: what is undecided is sent again over it, in order."""
        self.is_connected, self.is_stalled = True, False
        self._rests_until = 0.0
        if not self._refusals:
            self.trouble = None
        self._begin_again()

    def disconnected(self, cause: QmqError) -> None:
        """The connection is left or lost, or none could be had; tries that it owes an answer stay unanswered until somebody says more."""
        self.is_connected = False
        self.trouble = cause
        self._begin_again()

    def _begin_again(self) -> None:
        self._sent = 0
        self._run += 1

    def stalled(self) -> None:
        """Nothing was answered for a while, although parcels are on their way."""
        self.is_stalled = True
        self.trouble = self.trouble or NotConnected(f"broker group {self.group} answers nothing")

    def leave(self, now: float, *, is_fenced: bool) -> None:
        """A newer route does not have the partition."""
        if not self.is_left:
            self.is_left, self.wants_route = True, False
            self._window, self._refusals, self._rests_until = WINDOW, 0, 0.0
        if is_fenced and not self.is_fenced:
            self._quiet_since = now
        self.is_fenced = is_fenced

    def keep(self) -> None:
        """A newer route still has the partition: what it refused as changed was not known there yet."""
        self.wants_route = False

    # --- in: time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Give up what a fenced partition was asked for long enough."""
        if self._is_asking_fenced and now >= self._quiet_since + self._ask_s:
            self._is_given_up = True
            for parcel in self.flight:
                if parcel.is_certain:
                    break
                parcel.is_lost = True

    @property
    def _is_asking_fenced(self) -> bool:
        return self.is_left and self.is_fenced and not self._is_given_up and not self.is_settled
