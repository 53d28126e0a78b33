"""The time of one replica: the kept time for its entries, and the time by which its retention
counts.

    clock               SteadyClock (qmq/broker/timekeeper.py), which does not follow every jump of
                        the machine's clock; it stamps entries
    TimeWitnesses       asks the machines of the group's other replicas, or of other groups', for
                        their time
    RetentionTime       does not leap on the word of one machine's clock (qmq/log/retention_time.py)

The machines *agree* if, of those that answered and this one, most have clocks within a minute of
the kept time, and these are a majority of the group's voters and at least two. In a group with
several voters the kept time begins with that of the log, and follows the machine's clock only when
other machines confirm it. So messages are accepted before machines agree, with times that continue
the log's. In a group alone the kept time follows the machine's clock, because nobody can deny it,
and only an operator can let retention follow.

A clock that a test hands in is trusted: it is the time for everything.

`TimeWitnesses` asks brokers and replicas over their control ports (`DescribeReplica`, which slaves
answer, too): once at the start, then every thirty seconds, and every second while the kept time has
a step to decide (qmq/broker/timekeeper.py). Witnesses answer with their machine's wall clock, even
delay servers, because their kept time would not be independent. An answer that takes more than a
second is ignored; no single answer is required.

It also reads the clock once a second, so that it notices a step at once, without waiting for the
next caller. It logs each step twice: when the step lasts, and when it is accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import msgspec

from qmq.broker.timekeeper import SteadyClock
from qmq.errors import DiskFull, InvalidArgument
from qmq.log.disk import Disk
from qmq.log.retention_time import FILE, RetentionTime, SavedTime
from qmq.process.event_loop import Clock
from qmq.proto.v1 import control_pb2, control_pb2_grpc
from qmq.rpc.network import NETWORK, Network
from qmq.rpc.server_name import any_server

WITNESSES_MAX: Final = 15
"""More witnesses do not improve the median."""
ASK_S: Final = 1.0
"""How long an answer may take."""
CHECK_S: Final = 1.0
"""How often this machine's clock is read."""
ASK_EVERY_MS: Final = 30_000
"""How often witnesses are asked while clocks agree."""


class ControlPorts:
    """The control connections to witnesses."""

    def __init__(self, network: Network = NETWORK) -> None:
        self._network = network
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, address: str) -> int:
        """The time at a control address, in milliseconds; 0 if it is not known. An error other than
        a cancellation, such as grpc.RpcError, means no answer.
        """
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._network.channel(
                address, any_server
            )  # any machine may be a witness
        answer = await control_pb2_grpc.BrokerControlStub(channel).DescribeReplica(
            control_pb2.DescribeReplicaRequest(), timeout=ASK_S
        )
        return int(answer.time_ms)

    async def keep_only(self, addresses: Iterable[str]) -> None:
        """Close the connections to all others."""
        for address in set(self._channels).difference(addresses):
            await self._channels.pop(address).close()


class TimeWitnesses:
    """The task that asks. `addresses` returns the control addresses of other machines' brokers and
    replicas, the best witnesses first.
    """

    def __init__(
        self,
        clock: SteadyClock,
        addresses: Callable[[], Iterable[str]],
        *,
        ports: ControlPorts | None = None,
        check_s: float = CHECK_S,
        after_check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`after_check` is called after each reading of the clock."""
        self._after_check = after_check
        self._check_s = check_s
        self._clock = clock
        self._addresses = addresses
        self._ports = ports or ControlPorts()
        self._asked_boot_ms: int | None = None
        self._logged = (0, 0)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End, and close the connections."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._ports.keep_only(())

    async def _run(self) -> None:
        while True:
            try:
                await self.check()
            except Exception:
                log.exception("asking the other machines for the time failed")
            await asyncio.sleep(self._check_s)

    async def check(self) -> None:
        """Read the clock, and ask witnesses if it is time."""
        self._clock.time_ms()
        now_ms = self._clock.boot_ms()
        if (
            self._clock.timekeeper.wants_witnesses
            or self._asked_boot_ms is None
            or now_ms - self._asked_boot_ms >= ASK_EVERY_MS
        ):
            self._asked_boot_ms = now_ms
            await self._ask_all()
            self._clock.time_ms()
        self._log_steps()
        if self._after_check is not None:
            await self._after_check()

    async def _ask_all(self) -> None:
        addresses = list(self._addresses())[:WITNESSES_MAX]
        await asyncio.gather(*[self._ask_one(address) for address in addresses])
        await self._ports.keep_only(addresses)

    async def _ask_one(self, address: str) -> None:
        sent_ms = self._clock.boot_ms()
        try:
            async with asyncio.timeout(ASK_S):
                their_ms = await self._ports.ask(address)
        except Exception as failure:
            log.debug("%s did not answer with its time: %s", address, failure)
            return
        if their_ms > 0:
            self._clock.witness(address, their_ms, sent_ms, self._clock.boot_ms())

    def _log_steps(self) -> None:
        """Log each step once when it is noticed, and once when it is accepted."""
        timekeeper = self._clock.timekeeper
        step, (noticed, accepted) = timekeeper.step, self._logged
        if timekeeper.steps_accepted > accepted:
            log.warning(
                "the wall clock's step was accepted: this server's time is now %d ms since 1970",
                self._clock.time_ms(),
            )
        if step is not None and step.noticed_boot_ms != noticed:
            why = (
                "other machines say that the wall clock is wrong"
                if step.is_denied
                else "not accepted yet"
            )
            log.warning(
                "the wall clock differs by %+d ms from this server's time: %s", step.size_ms, why
            )
        self._logged = (step.noticed_boot_ms if step is not None else 0, timekeeper.steps_accepted)


log = logging.getLogger("qmq.broker")

AGREE_MS: Final = 60_000
CONFIRM_MS: Final = 60_000
"""How much the time that an operator confirms may differ from the machine's clock."""
SAVE_MS: Final = 60_000
BEHIND_MS: Final = 3_600_000
"""Retention that is farther behind the kept time is logged:
an operator should look at the clock.
"""


@dataclass(frozen=True, slots=True)
class TimeStatus:
    """The state of a replica's time, for operators."""

    step_ms: int = 0
    """How far the machine's clock is ahead of the kept time, if that is not accepted; else 0."""
    retention_behind_ms: int = 0
    """How far retention's time is behind the kept time."""

    @property
    def behind_clock_ms(self) -> int:
        """How far retention's time is behind the machine's clock."""
        return self.retention_behind_ms + self.step_ms


class ReplicaTime:
    """Call `begin` when the store is open, then `start` and `stop`."""

    def __init__(
        self,
        clock: Clock,
        folder: Path,
        disk: Disk,
        boot: str,
        *,
        addresses: Callable[[], Iterable[str]] = lambda: (),
        voters: Callable[[], int] = lambda: 1,
        is_delay: bool = False,
        ports: ControlPorts | None = None,
    ) -> None:
        """`boot` is the machine's boot id. `addresses` are the other machines' control addresses,
        `voters` the number of the group's. A delay group's kept time follows its clock after a
        minute, if no other machine denies it.
        """
        self.clock = clock
        self._folder, self._disk, self._boot = folder, disk, boot
        self._voters, self._is_delay = voters, is_delay
        self._retention: RetentionTime | None = None
        self._sure_ms = 0
        """The kept time when other machines or an operator last confirmed it,
        or the process began.
        """
        self._seen = (0, 0)
        """The kept time and CLOCK_BOOTTIME, as last read."""
        self._stamped_ms = 0
        """The highest stamp that an entry may have had then:
        stamps do not go back with the kept time.
        """
        self._saved_boot_ms = 0
        self._is_logged = False
        self._steady = clock if isinstance(clock, SteadyClock) else None
        self._witnesses = None
        if self._steady is not None:
            self._witnesses = TimeWitnesses(
                self._steady, addresses, ports=ports, after_check=self._checked
            )

    # --- reading ----------------------------------------------------------------------------------

    def retention_ms(self) -> int:
        """The time by which retention counts."""
        kept_ms = self.clock.time_ms()
        if self._steady is None or self._retention is None:
            return kept_ms
        return self._retention.time_ms(kept_ms, self._steady.boot_ms())

    def before_ms(self, age_ms: int) -> int:
        """The stamp before which every entry is older than `age_ms`."""
        if self._steady is None or self._retention is None:
            return self.clock.time_ms() - age_ms
        return self._retention.before_ms(age_ms, self.clock.time_ms(), self._steady.boot_ms())

    def status(self) -> TimeStatus:
        if self._steady is None:
            return TimeStatus()
        behind_ms = self.clock.time_ms() - self.retention_ms()
        return TimeStatus(self._steady.step_ms, max(behind_ms, 0))

    # --- changing ---------------------------------------------------------------------------------

    def begin(self, log_ms: int) -> None:
        """Continue from the saved time. `log_ms` is the time of the log's last
        entry, 0 if it has none.
        """
        if self._steady is None:
            return
        saved, boot_ms = self._read(), self._steady.boot_ms()
        was_ms = log_ms
        if saved is not None and log_ms:
            was_ms = max(log_ms, saved.kept_ms + saved.ran_ms(self._boot, boot_ms))
        self._steady.begin(0 if self._follows_alone else was_ms, accepts_alone=self._follows_alone)
        kept_ms = self._steady.time_ms()
        self._retention = RetentionTime.restored(saved, self._boot, boot_ms, kept_ms, log_ms)
        self._sure_ms = saved.sure_ms if saved is not None else kept_ms
        self._stamped_ms, self._seen = was_ms or kept_ms, (was_ms or kept_ms, boot_ms)
        self._note_leap(self._steady, self._retention)

    @property
    def _follows_alone(self) -> bool:
        return self._is_delay or self._voters() <= 1

    def start(self) -> None:
        """Ask the other machines; needs a running loop."""
        if self._witnesses is not None:
            self._witnesses.start()

    async def stop(self) -> None:
        if self._witnesses is not None:
            await self._witnesses.stop()
            if self._retention is not None:
                self._save(self._current())

    async def check(self) -> None:
        """Read the clock, and ask other machines if it is time."""
        if self._witnesses is not None:
            await self._witnesses.check()

    def confirm(self, time_ms: int) -> TimeStatus:
        """An operator says that the machine's clock, which shows `time_ms`, is right. Raises
        InvalidArgument, DiskFull.
        """
        if self._steady is None or self._retention is None:
            return TimeStatus()
        wall_ms = self._steady.time_ms() + self._steady.step_ms
        if abs(wall_ms - time_ms) > CONFIRM_MS:
            raise InvalidArgument(
                f"the machine's clock shows {wall_ms} ms since 1970, not {time_ms}: look at "
                "it again, then confirm it"
            )
        before = self.status()
        self._steady.confirm()
        self._note_leap(self._steady, self._retention)
        self._sure_ms = self._steady.time_ms()
        self._retention.confirm(self._steady.time_ms(), self._steady.boot_ms())
        log.warning(
            "an operator confirmed this machine's clock: retention continues %d ms later",
            before.behind_clock_ms,
        )
        self._write(self._current())
        return before

    async def _checked(self) -> None:
        steady, retention = self._steady, self._retention
        if steady is None or retention is None:
            return
        steady.timekeeper.accepts_alone = self._follows_alone  # members may have come or gone
        self._note_leap(steady, retention)
        is_agreed = self._is_agreed(steady)
        if is_agreed:
            retention.agree(steady.time_ms(), steady.boot_ms())
            self._sure_ms = steady.time_ms()
        self._log_lag()
        if steady.boot_ms() - self._saved_boot_ms >= SAVE_MS:
            self._saved_boot_ms = steady.boot_ms()
            await asyncio.to_thread(self._save, self._current())

    def _note_leap(self, steady: SteadyClock, retention: RetentionTime) -> None:
        kept_ms, boot_ms = steady.time_ms(), steady.boot_ms()
        stamp_ms = max(self._seen[0] + boot_ms - self._seen[1], self._stamped_ms)
        if kept_ms - stamp_ms > AGREE_MS:
            retention.leapt(min(self._sure_ms, stamp_ms), stamp_ms, kept_ms - stamp_ms)
        self._stamped_ms, self._seen = max(kept_ms, self._stamped_ms), (kept_ms, boot_ms)

    def _is_agreed(self, steady: SteadyClock) -> bool:
        agreeing, answering = steady.agreeing(AGREE_MS)
        return agreeing >= max(2, self._voters() // 2 + 1) and 2 * agreeing > answering

    def _log_lag(self) -> None:
        behind_ms = self.status().retention_behind_ms
        is_behind = behind_ms > BEHIND_MS
        if is_behind and not self._is_logged:
            text = (
                "retention counts ages by a time %d ms behind this machine's clock, and keeps "
                "messages longer, until other machines agree"
            )
            log.warning(
                f"{text} with it or an operator confirms it (`qmq broker confirm-clock`)", behind_ms
            )
        self._is_logged = is_behind

    # --- the file ---------------------------------------------------------------------------------

    def _read(self) -> SavedTime | None:
        path = self._folder / FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=SavedTime)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as failure:
            log.warning(
                "%s cannot be read, retention begins at the time of the log's last entry: %s",
                path,
                failure,
            )
            return None

    def _current(self) -> SavedTime:
        time_ms = self.retention_ms()
        doubts = self._retention.doubts if self._retention is not None else ()
        return SavedTime(
            self._boot,
            self._steady.boot_ms() if self._steady is not None else 0,
            time_ms,
            self.clock.time_ms(),
            self._sure_ms,
            doubts,
        )

    def _write(self, time: SavedTime) -> None:
        self._disk.replace(self._folder / FILE, msgspec.json.encode(time))

    def _save(self, time: SavedTime) -> None:
        """A time that cannot be saved lags after a restart, which is safe."""
        try:
            self._write(time)
        except (DiskFull, OSError) as failure:
            log.warning("saving retention's time failed, it will be tried again: %s", failure)
