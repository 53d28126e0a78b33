"""Asks metaservers where subjects and masters are, no more often than needed.

Rules:
* One request at a time for each broker group and each subject, shared by all waiters. What the answer says about a group's master holds for
  every subject on the group.
* Requests about the same thing are 50 to 100 ms apart (with jitter, so that many clients do not ask at the same time). If a group has no
  master for long, the pause grows to a second, until the group serves a request again.
* A subject here is a *target* (route_book.py): its messages and its delayed messages are two targets. An unknown group may be a new delay
  group, which takes delayed messages of all subjects: the targets in use are located again.
* What a metaserver pushes (`Watch`) is a hint to ask again, after a moment of jitter. Without pushes clients only learn later: a broker
  that is not master says so, and placements are refreshed when they are half a minute old.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from qmq.client.connection import TIMING, ClientTiming
from qmq.client.route_book import Master, Ordering, Placement, RouteBook, delayed_target, is_delayed
from qmq.client.shared_work import shared
from qmq.errors import NotConnected, QmqError, Unavailable, UnknownSubject

log = logging.getLogger("qmq.client")

PAUSE_S: Final = (0.05, 0.1)
STEADY_ASKS: Final = 50
"""Requests that keep the short pause: about 4 s, longer than a failover."""
PAUSE_S_MAX: Final = 1.0
FIRST_JITTER_S: Final = 0.01
"""All clients of a master that dies notice at the same moment."""
PUSH_JITTER_S: Final = 0.03
REFRESHES_MAX: Final = 4
"""Concurrent background requests."""


class Pushed(NamedTuple):
    """A change that a metaserver pushed. `is_gap`: earlier changes may have been missed."""

    subjects: Sequence[str] = ()
    groups: Sequence[str] = ()
    is_gap: bool = False


Locate = Callable[[str], Awaitable[Placement]]
"""Subject -> its placement. Raises Unavailable, UnknownSubject."""
Watch = Callable[[], AsyncIterator[Pushed]]
"""Changes that metaservers push; ends if they do not support it."""


class Locator:
    """Keeps a `RouteBook` up to date. `outdated` is called when a metaserver lags, to ask the next one.

    `locate` may create a subject; background requests use `look`, which never does, so that a deleted subject stays deleted.
    """

    def __init__(
        self,
        locate: Locate,
        watch: Watch,
        outdated: Callable[[], None] = lambda: None,
        *,
        look: Locate | None = None,
        timing: ClientTiming = TIMING,
    ) -> None:
        self.book = RouteBook()
        self._look = look or locate
        self._refresh_s = timing.refresh_s
        self._locate, self._watch, self._outdated = locate, watch, outdated
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._asked_s: dict[tuple[str, str], float] = {}
        self._tries: dict[tuple[str, str], int] = {}
        self._placed_s: dict[str, float] = {}
        self._listeners: dict[str, dict[Callable[[], None], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refreshes = asyncio.Semaphore(REFRESHES_MAX)
        self._refreshing: set[str] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- asking --------------------------------------------------------------------------------------------------------

    async def groups(self, subject: str, *, refresh: bool = False) -> Mapping[str, bool]:
        """The subject's broker groups, and whether each is writable. `refresh` asks a metaserver even if they are known.

        Raises UnknownSubject, Unavailable.
        """
        self._start_watching()
        if refresh or self.book.groups(subject) is None:
            await self._ask(("subject", subject), subject)
        return self.book.groups(subject) or {}

    async def ordering(self, subject: str, *, refresh: bool = False) -> Ordering | None:
        """The subject's order and its latest route; None if it is unordered. `refresh` as in `groups`.

        Raises UnknownSubject, Unavailable.
        """
        await self.groups(subject, refresh=refresh)
        return self.book.ordering(subject)

    async def master(self, subject: str, group: str) -> Master:
        """The master of a group that has the subject. Asks once if the master is not known; raises NotConnected if it is not known then."""
        found = self.book.master(group)
        if found is None:
            await self._ask(("group", group), subject)
            found = self.book.master(group)
        if found is None:
            raise NotConnected(f"broker group {group} has no master at the moment")
        return found

    async def _ask(self, what: tuple[str, str], subject: str) -> None:
        """Join the request that is under way, or start one."""
        task = self._asking.get(what)
        # Awaiting a finished task does not let other tasks run: a caller that asks again and again would block the event loop.
        is_mine = task is None or task.done()
        if task is None or task.done():
            task = self._asking[what] = asyncio.create_task(self._ask_paced(what, subject))
            task.add_done_callback(lambda done: self._asked(what, done))
        try:
            await shared(task)
        except QmqError as failure:
            # The other caller's subject may be deleted while ours exists: then the error is theirs, and we ask again.
            if is_mine or what[0] == "subject" or isinstance(failure, Unavailable):
                raise

    def _asked(self, what: tuple[str, str], done: asyncio.Task[None]) -> None:
        if self._asking.get(what) is done:
            del self._asking[what]
        if not done.cancelled():
            done.exception()

    async def _ask_paced(self, what: tuple[str, str], subject: str) -> None:
        tries = self._tries.get(what, 0)
        self._tries[what] = tries + 1
        if tries:
            wait_s = self._asked_s.get(what, 0.0) + _pause_s(tries) - asyncio.get_running_loop().time()
        else:
            wait_s = random.uniform(0, FIRST_JITTER_S) if what[0] == "group" else 0.0  # noqa: S311 - jitter, not a secret
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        try:
            await self._locate_now(subject, self._locate)
        finally:
            self._asked_s[what] = asyncio.get_running_loop().time()

    async def _locate_now(self, subject: str, locate: Locate) -> None:
        ask = self.book.ask()
        learned = self.book.learn(ask, subject, *await locate(subject))
        self._placed_s[subject] = asyncio.get_running_loop().time()
        if learned.outdated or learned.is_route_outdated:
            self._outdated()
        for group in learned.moved:
            self._tries.pop(("group", group), None)
        if learned.is_placed_again:
            self._tries.pop(("subject", subject), None)
            self._tell(subject)
        if learned.moved:
            for each in list(self._listeners):
                if not learned.moved.isdisjoint(self.book.groups(each) or ()):
                    self._tell(each)

    # --- what others find out ------------------------------------------------------------------------------------------

    def doubt(self, group: str, master: Master) -> None:
        """This master answered NotMaster, or cannot be reached."""
        self.book.doubt(group, master)

    def confirm(self, group: str) -> None:
        """The group served a request: the next failure is a new one."""
        self._tries.pop(("group", group), None)

    def listen(self, subject: str, callback: Callable[[], None]) -> None:
        """Call `callback` when the subject's groups or their masters change."""
        self._listeners.setdefault(subject, {})[callback] = None

    def unlisten(self, subject: str, callback: Callable[[], None]) -> None:
        callbacks = self._listeners.get(subject, {})
        callbacks.pop(callback, None)
        if not callbacks:
            self._listeners.pop(subject, None)

    def _tell(self, subject: str) -> None:
        for callback in list(self._listeners.get(subject, ())):
            callback()

    # --- in the background ---------------------------------------------------------------------------------------------

    def touch(self, subject: str) -> None:
        """The subject is in use: refresh it if the last answer is old."""
        if asyncio.get_running_loop().time() > self._placed_s.get(subject, 0.0) + self._refresh_s:
            self.refresh(subject)

    def refresh(self, subject: str, *, jitter_s: float = 0.0) -> None:
        """Ask again in the background; failures are ignored."""
        if subject not in self._refreshing and not self._is_closed:
            self._refreshing.add(subject)
            self._start(self._refresh(subject, random.uniform(0, jitter_s)))  # noqa: S311 - jitter, not a secret

    async def _refresh(self, subject: str, wait_s: float) -> None:
        try:
            await asyncio.sleep(wait_s)
            async with self._refreshes:
                self._refreshing.discard(subject)
                self._placed_s[subject] = asyncio.get_running_loop().time()
                await self._locate_now(subject, self._look)
        except UnknownSubject:
            log.info("subject %s was deleted", subject)
            self.book.forget(subject)
            self._tell(subject)
        except QmqError as failure:
            log.debug("the metaservers could not be asked where %s is: %s", subject, failure)
        finally:
            self._refreshing.discard(subject)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what is pushed ------------------------------------------------------------------------------------------------

    def _start_watching(self) -> None:
        if self._watcher is None and not self._is_closed:
            self._watcher = self._start(self._follow())

    async def _follow(self) -> None:
        try:
            async for pushed in self._watch():
                self._pushed(pushed)
        except QmqError as failure:
            log.debug("metaservers push no changes: %s", failure)

    def _pushed(self, pushed: Pushed) -> None:
        named = {target for each in pushed.subjects for target in (each, delayed_target(each))}
        subjects = {each for each in named if self.book.groups(each) is not None}
        for group in pushed.groups:
            found = self.book.subject_on(group)
            if found is not None:
                subjects.add(found)
                self._age_places_on(group)
            else:
                self._age_delayed()
        if pushed.is_gap:
            self._placed_s.clear()
            subjects.update(self.book.cover())
        for subject in subjects:
            self.refresh(subject, jitter_s=PUSH_JITTER_S)

    def _age_places_on(self, group: str) -> None:
        """Whether the group is writable may have changed for all its subjects; subjects in use are refreshed at their next use."""
        for subject in list(self._placed_s):
            if group in (self.book.groups(subject) or ()):
                self._placed_s.pop(subject)

    def _age_delayed(self) -> None:
        for target in list(self._placed_s):
            if is_delayed(target):
                self._placed_s.pop(target)

    # --- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the background tasks."""
        self._is_closed = True
        tasks = [*self._tasks, *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pause_s(tries: int) -> float:
    grown = 1.5 ** min(max(tries - STEADY_ASKS, 0), 20)
    return min(random.uniform(*PAUSE_S) * grown, PAUSE_S_MAX)  # noqa: S311 - jitter, not a secret
