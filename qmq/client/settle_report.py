"""Reports the outcomes of verdicts to interceptors: one report for each request that took verdicts to a broker. No I/O.

A client without interceptors has no reporter, and makes its requests without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from qmq.client.connection.connection import OnAnswer
from qmq.errors import QmqError
from qmq.wire.frame import Frame
from qmq.wire.frame_payloads import LaneVerdict
from qmq.wire.settle_payloads import Settlement, Verdict

VERDICTS: Final = {Verdict.ACK: "ack", Verdict.NACK: "nack", Verdict.RELEASE: "release", Verdict.DEAD: "reject"}
LANE_VERDICTS: Final = {LaneVerdict.DONE: "ack", LaneVerdict.FAILED: "fail", LaneVerdict.PARKED: "park"}


@dataclass(frozen=True, slots=True)
class SettleReport:
    """One request with verdicts, and its answer. Times are nanoseconds since 1970."""

    subject: str
    group: str
    broker_group: str
    server: str
    """The address of the master that was asked."""
    verdicts: Mapping[str, int]
    """How many messages got each verdict: `ack`, `nack`, `release` and `reject`; of an ordered subject `ack`, `fail` and `park`."""
    began_ns: int
    ended_ns: int
    error: QmqError | None
    """Why the broker refused the request, or has not answered; then the verdicts are sent again while the messages are held."""


class SettleReporter:
    """Watches the requests of one consumer to one broker group. `tell` gets a report when a request is answered or has failed."""

    def __init__(
        self, tell: Callable[[SettleReport], None], subject: str, group: str, broker_group: str, now_ns: Callable[[], int]
    ) -> None:
        self._tell = tell
        self._place = subject, group, broker_group
        self._now_ns = now_ns

    def watch(self, server: str, verdicts: Mapping[str, int], on_answer: OnAnswer) -> OnAnswer:
        """A request begins. Returns what to call with its answer, in place of `on_answer`."""
        began_ns = self._now_ns()

        def answered(answer: Frame | QmqError) -> None:
            error = answer if isinstance(answer, QmqError) else None
            self._tell(SettleReport(*self._place, server, verdicts, began_ns, self._now_ns(), error))
            on_answer(answer)

        return answered


def counted(settlements: Iterable[Settlement]) -> Mapping[str, int]:
    """How many messages get each verdict."""
    found: Counter[str] = Counter()
    for each in settlements:
        found[VERDICTS[Verdict(each.verdict)]] += each.last - each.first + 1
    return found
