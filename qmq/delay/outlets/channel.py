"""A channel: the parcels that go to one destination, an in-flight window (qmq/delivery/window.py) of what is planned first. Pure.

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
* A parcel leaves only when it is planned, and only behind all before it.
* Ordered: a broker takes number n of a producer only behind n - 1, so a parcel that will never be there takes all behind it along: none of
  them is there. They are void when everything before is decided, and what comes next has a new producer id and begins at 0.
  For the same reason all before one that is stored are stored, answered or not.
* Ordered: parcels of another producer id (an earlier master's, or before a new one) wait until all of the former are decided: between two
  producers the broker keeps no order.
* Voids are given in the order of the parcels, to be written from the last to the first: so whatever part of them a crash leaves,
  the open plans of a producer have no gap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qmq.delay.outlets.parcel import Parcel
from qmq.delivery.retries import is_worth_another_try, pause_s
from qmq.delivery.window import ASK_S, InFlightWindow, Rest
from qmq.errors import InvalidArgument, NotConnected, QmqError
from qmq.log.actions import PlanAction
from qmq.wire.frame_payloads import Produced

WINDOW: Final = 8
"""Enough to hide a commit and an answer behind full batches; far below the broker's window of remembered batches (qmq/log/producers.py)."""


class Channel(InFlightWindow[Parcel]):
    """`partition` is 0 for unordered subjects."""

    def __init__(self, group: str, partition: int = 0, *, is_ordered: bool = False, rest: Rest = pause_s, ask_s: float = ASK_S) -> None:
        super().__init__(WINDOW, rest, ask_s)
        self.group, self.partition, self.is_ordered = group, partition, is_ordered
        self._producer_id = 0
        self._next_number = 0
        self._dead: Parcel | None = None  # it and all behind it will never be there
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

    def _may_send(self, parcel: Parcel) -> bool:
        if (
            parcel.plan is None
            or parcel is self._dead
            or (self._sent and self.is_ordered and parcel.producer_id != self.flight[0].producer_id)
        ):
            return False
        return super()._may_send(parcel)

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
        return super().is_settled and self._is_planned

    @property
    def _is_planned(self) -> bool:
        return all([parcel.plan is not None for parcel in self.flight])  # noqa: C419 - faster than a generator

    def settle(self) -> None:
        """Of a settled channel: all that is left is void."""
        self._clear()

    def is_troubled(self, now: float) -> bool:
        """Whether it cannot take a parcel just now, for another reason than that it is busy."""
        return self.is_stalled or not self.is_connected or now < self._rests_until or (self.trouble is not None and bool(self.flight))

    # --- in: answers ---------------------------------------------------------------------------------------------------

    def stored(self, parcel: Parcel, produced: Produced, now: float) -> None:
        """A try was answered: where the parcel is."""
        if self.acknowledged(parcel, now):
            for each in [*self._before(parcel), parcel]:
                self._done.append((each, produced))
        self._bury()

    def refused(self, parcel: Parcel, attempt: int, failure: QmqError, now: float) -> None:
        super().refused(parcel, attempt, failure, now)
        self._bury()

    def _before(self, parcel: Parcel) -> list[Parcel]:
        """What is stored if this one is: all before it of its producer."""
        if not self.is_ordered:
            return []
        number = parcel.draft.batch_sequence
        found = [each for each in self.flight if each.producer_id == parcel.producer_id and each.draft.batch_sequence < number]
        for each in found:
            self._remove(each)
        return found

    def _is_retried(self, parcel: Parcel, failure: QmqError) -> bool:
        return is_worth_another_try(failure) or not (parcel.is_certain or isinstance(failure, InvalidArgument))

    def _forgotten(self, parcel: Parcel) -> None:
        """Nobody will say whether the broker had this one."""
        if self._dead is None:
            self._dead = parcel
            self._set_out(parcel)

    def _reject(self, parcel: Parcel, failure: QmqError) -> None:
        parcel.fault = failure
        self._set_out(parcel)
        if self.is_ordered:
            self._dead = parcel
        else:
            self._remove(parcel)
            self._void.append(parcel)

    @staticmethod
    def _set_out(parcel: Parcel) -> None:
        parcel.is_lost, parcel.is_out = not parcel.is_certain, True

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

    # --- in: connections and time --------------------------------------------------------------------------------------

    def stalled(self) -> None:
        super().stalled()
        self.trouble = self.trouble or NotConnected(f"broker group {self.group} answers nothing")

    def _give_up(self) -> None:
        super()._give_up()
        for parcel in self.flight:
            if parcel.is_certain:
                break
            parcel.is_lost = True
