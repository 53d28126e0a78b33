"""Asking the metaserver where things are: as often as needed, and not more often.

Rules:
* One question at a time for each broker group and each subject, shared by all who wait; what it answers about a group's master holds for
  every subject on the group.
* Questions about the same thing keep a pause of 50 to 100 ms (with jitter, so that many clients do not ask in step); when a group is
  without a master for long, the pause grows to a second. It is short again once somebody is served.
* A subject here is a *target* (route_book.py): where its messages are, or where its delayed ones go, which are two questions. A group that
  nothing is known to live on may be a new delay group, which takes delayed messages of all subjects: those in use are asked about again.
* Whatever a metaserver pushes (`Watch`) is a hint to ask again, after a moment of jitter. A cluster that pushes nothing is only slower:
  a broker that is not master says so, and placements are asked for again when they are half a minute old.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from qmq.client.client_timing import TIMING, ClientTiming
from qmq.client.route_book import Master, Ordering, Placement, RouteBook, delayed_target, is_delayed
from qmq.errors import NotConnected, QmqError, Unavailable, UnknownSubject

log = logging.getLogger("qmq.client")

PAUSE_S: Final = (0.05, 0.1)
STEADY_ASKS: Final = 50
"""So many questions keep the short pause: some 4 s, in which a failover should be over."""
PAUSE_S_MAX: Final = 1.0
FIRST_JITTER_S: Final = 0.01
"""A master that dies is missed by all its clients at the same moment."""
PUSH_JITTER_S: Final = 0.03
REFRESHES_MAX: Final = 4
"""Questions in the background at once."""


class Pushed(NamedTuple):
    """What a metaserver says has changed. `is_gap`: something may have been missed before."""

    subjects: Sequence[str] = ()
    groups: Sequence[str] = ()
    is_gap: bool = False


Locate = Callable[[str], Awaitable[Placement]]
"""Subject -> where it is. Raises Unavailable, UnknownSubject."""
Watch = Callable[[], AsyncIterator[Pushed]]
"""What metaservers push; ends if they do not know how to."""


class Locator:
    """Keeps a `RouteBook` true. `outdated` is called when a metaserver lags: the next one shall be asked.

    `locate` may create a subject; in the background `look` is asked, which never does: a subject that was deleted stays so.
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

    async def groups(self, subject: str, *, anew: bool = False) -> Mapping[str, bool]:
        """The subject's broker groups, and whether each is writable. Raises UnknownSubject, Unavailable."""
        self._start_watching()
        if anew or self.book.groups(subject) is None:
            await self._ask(("subject", subject), subject)
        return self.book.groups(subject) or {}

    async def ordering(self, subject: str, *, anew: bool = False) -> Ordering | None:
        """What is promised about the subject's order, and its latest route; None if it is unordered. Raises UnknownSubject, Unavailable."""
        await self.groups(subject, anew=anew)
        return self.book.ordering(subject)

    async def master(self, subject: str, group: str) -> Master:
        """The group's master. Asks once if it is not known; raises NotConnected if it is not known then. The subject lives on the group."""
        found = self.book.master(group)
        if found is None:
            await self._ask(("group", group), subject)
            found = self.book.master(group)
        if found is None:
            raise NotConnected(f"broker group {group} has no master just now")
        return found

    async def _ask(self, what: tuple[str, str], subject: str) -> None:
        """Share the question that is under way, or ask it."""
        task = self._asking.get(what)
        # One that is done gives what it found without letting anybody else run: who asks on and on would hold the event loop up for ever.
        is_mine = task is None or task.done()
        if task is None or task.done():
            task = self._asking[what] = asyncio.create_task(self._ask_paced(what, subject))
            task.add_done_callback(lambda done: self._asked(what, done))
        try:
            await asyncio.shield(task)
        except QmqError as failure:
            # Somebody else's subject may be gone while ours is there: that is their error, and we ask again.
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
        if learned.is_placed_anew:
            self._tries.pop(("subject", subject), None)
            self._tell(subject)
        if learned.moved:
            for each in list(self._listeners):
                if not learned.moved.isdisjoint(self.book.groups(each) or ()):
                    self._tell(each)

    # --- what others find out ------------------------------------------------------------------------------------------

    def doubt(self, group: str, master: Master) -> None:
        """This master sent us away, or cannot be reached."""
        self.book.doubt(group, master)

    def confirm(self, group: str) -> None:
        """The group serves us: the next trouble is a new one."""
        self._tries.pop(("group", group), None)

    def listen(self, subject: str, callback: Callable[[], None]) -> None:
        """Call when the subject's groups or their masters change."""
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
        """The subject is in use: ask again if the last answer is old."""
        if asyncio.get_running_loop().time() > self._placed_s.get(subject, 0.0) + self._refresh_s:
            self.refresh(subject)

    def refresh(self, subject: str, *, jitter_s: float = 0.0) -> None:
        """Ask again, in the background; failures do not matter."""
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
            log.debug("where %s is could not be asked: %s", subject, failure)
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
            log.debug("metaservers push nothing: %s", failure)

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
        """Whether the group is writable may have changed for all its subjects; those in use ask when they next look."""
        for subject in list(self._placed_s):
            if group in (self.book.groups(subject) or ()):
                self._placed_s.pop(subject)

    def _age_delayed(self) -> None:
        for target in list(self._placed_s):
            if is_delayed(target):
                self._placed_s.pop(target)

    # --- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End what runs in the background."""
        self._is_closed = True
        tasks = [*self._tasks, *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pause_s(tries: int) -> float:
    grown = 1.5 ** min(max(tries - STEADY_ASKS, 0), 20)
    return min(random.uniform(*PAUSE_S) * grown, PAUSE_S_MAX)  # noqa: S311 - jitter, not a secret
