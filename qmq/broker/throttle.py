"""Why a broker does not read from a connection for a while: its principal is beyond a quota, or others share this round of the event loop.

*Quotas.* `Throttle` counts the usage of each principal over all its connections to this broker. The limits are in the coordination store
(`qmq/security/quotas.py`). A principal without a quota costs one dict lookup for each frame.

*Rounds.* Everything that arrives in one round is written together, and all answers wait for that write. Ten producers of 1 MiB batches
bring 10 MiB a round; on a disk that takes 100 MB/s a heartbeat then waits for 100 ms. So a round takes about `ROUND_BYTES_MAX`
(`RoundBudget`): a connection that exceeds it is not read from until its turn comes again, in the order in which connections exceeded it.
Frames of at most `SMALL_BYTES` never wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from qmq import limits
from qmq.errors import Overloaded, QuotaExceeded
from qmq.log.store import Intake
from qmq.model import base_group
from qmq.security.access_control import OpenAccess
from qmq.security.principal import Principal
from qmq.security.quotas import Quota, RateMeter

PAUSE_S_MAX: Final = 5.0
"""The longest single pause: a heartbeat must pass, and a quota may have been raised meanwhile."""
ROUND_BYTES_MAX: Final = 4 * limits.MIB
"""Few enough bytes for a slow disk to write in 40 ms, and enough for an efficient write."""
SMALL_BYTES: Final = 64 * limits.KIB


class UnreadConnection(Protocol):
    """A connection that can stop reading for a while."""

    def read_on(self) -> None:
        """The principal is below its quota again."""
        ...


class Throttle:
    """The usage at one broker. `now_s` is a monotonic clock."""

    def __init__(self, access: OpenAccess, now_s: Callable[[], float]) -> None:
        self._access, self._now_s = access, now_s
        self._meters: dict[tuple[Principal | str, str], RateMeter] = {}
        self.connections: Counter[Principal] = Counter()
        self._inflight: Counter[Principal] = Counter()
        self._held: dict[Principal, dict[UnreadConnection, None]] = {}
        self.paused_s = 0.0
        """How long connections were not read from, added up."""

    def admit(self, principal: Principal) -> None:
        """A connection of this principal said HELLO. Raises Overloaded; then it does not count."""
        quota = self._access.quota(principal)
        if quota is not None and 0 < quota.connections <= self.connections[principal]:
            raise Overloaded(f"{principal} has {quota.connections} connections here, the limit of its quota {quota.id!r}")
        self.connections[principal] += 1

    def ended(self, principal: Principal) -> None:
        """A connection that was admitted has ended."""
        self.connections[principal] -= 1
        if not self.connections[principal]:
            del self.connections[principal]
            for name in ("bytes in", "messages in", "bytes out"):
                self._meters.pop((principal, name), None)

    def admit_group(self, subject: str, group: str, known: Iterable[str]) -> None:
        """A group begins to consume a subject that has the groups `known`. Raises QuotaExceeded."""
        quota = self._access.subject_quota(subject)
        if quota is not None and quota.groups:
            names = {base_group(each) for each in known}
            if base_group(group) not in names and len(names) >= quota.groups:
                raise QuotaExceeded(f"subject {subject!r} has {len(names)} groups, the limit of its quota {quota.id!r}")

    # --- bytes in flight -----------------------------------------------------------------------------------------------

    def took(self, principal: Principal, size: int, reader: UnreadConnection) -> bool:
        """Count an unanswered batch. Returns whether its connection must stop reading until others are answered."""
        self._inflight[principal] += size
        quota = self._access.quota(principal)
        if quota is None or not 0 < quota.inflight_bytes < self._inflight[principal]:
            return False
        self._held.setdefault(principal, {})[reader] = None
        return True

    def answered(self, principal: Principal, size: int) -> None:
        """A batch was answered, or its connection has ended."""
        self._inflight[principal] -= size
        if self._inflight[principal] <= 0:
            del self._inflight[principal]
        quota = self._access.quota(principal)
        if principal in self._held and (quota is None or self._inflight[principal] <= quota.inflight_bytes // 2):
            for reader in self._held.pop(principal):
                reader.read_on()

    # --- rates ---------------------------------------------------------------------------------------------------------

    def produced(self, principal: Principal, batches: Sequence[Intake]) -> float:
        """Count a PRODUCE. Returns for how many seconds its connection must not be read from."""
        size, messages = sum([len(each.region) for each in batches]), sum([each.header.count for each in batches])
        owed_s = self._taken(principal, self._access.quota(principal), size, messages)
        for each in batches:
            subject = each.queue.id.subject
            owed_s = max(owed_s, self._taken(subject, self._access.subject_quota(subject), len(each.region), each.header.count))
            together = self._access.namespace_quota(subject)
            if together is not None:
                owed_s = max(owed_s, self._taken(together.principal, together, len(each.region), each.header.count))
        return self._pause(owed_s)

    def _taken(self, who: Principal | str, quota: Quota | None, size: int, messages: int) -> float:
        if quota is None:
            return 0.0
        by_bytes = self._take(who, "bytes in", quota.produce_bytes_per_s, size)
        return max(by_bytes, self._take(who, "messages in", quota.produce_messages_per_s, messages))

    def fetched(self, principal: Principal, size: int) -> float:
        """Count bytes that were sent to a consumer."""
        quota = self._access.quota(principal)
        return 0.0 if quota is None else self._pause(self._take(principal, "bytes out", quota.fetch_bytes_per_s, size))

    def _pause(self, pause_s: float) -> float:
        found = min(pause_s, PAUSE_S_MAX)
        self.paused_s += found
        return found

    def _take(self, who: Principal | str, name: str, rate: int, amount: int) -> float:
        if not rate:
            return 0.0
        meter = self._meters.get((who, name))
        if meter is None or meter.rate != rate:
            meter = self._meters[who, name] = RateMeter(rate, self._now_s())
        return meter.take(amount, self._now_s())


class TurnTaker(Protocol):
    """A connection that can stop reading for a while."""

    def wait_for_turn(self) -> None:
        """Stop reading."""
        ...

    def take_turn(self) -> None:
        """Read again."""
        ...


class RoundBudget:
    """Shares each round among the connections. `call_soon` calls in the next round of the event loop."""

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], bytes_max: int = ROUND_BYTES_MAX, small_bytes: int = SMALL_BYTES
    ) -> None:
        self._call_soon, self._bytes_max, self._small_bytes = call_soon, bytes_max, small_bytes
        self._bytes = 0
        self._is_planned = False
        self._waiting: deque[tuple[TurnTaker, int]] = deque()
        """The waiting connections, with the bytes they brought last."""

    def took(self, connection: TurnTaker, count: int) -> None:
        """A connection has brought so many bytes in this round."""
        self._bytes += count
        if self._bytes > self._bytes_max and count > self._small_bytes:
            connection.wait_for_turn()
            self._waiting.append((connection, count))
        if not self._is_planned:
            self._is_planned = True
            self._call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_planned = False
        self._bytes = expected = 0
        while self._waiting and expected < self._bytes_max:
            connection, count = self._waiting.popleft()
            expected += count
            connection.take_turn()
        if self._waiting:
            self._is_planned = True
            self._call_soon(self._next_round)
