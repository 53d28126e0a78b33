"""The logged-in browsers: a cookie identifies each one, and the session has the credential that the
browser showed.

Rules:
* A cookie is 256 random bits and contains nothing else. Tokens stay in this process's memory; a
  restart logs everybody out.
* A session ends after IDLE_S without a request, after LIFE_S in any case, and when there are too
  many: SESSIONS_EACH_MAX of one principal, or SESSIONS_MAX of all, of which the principal with the
  most loses its oldest. So nobody ends others' sessions by logging in again.
* The CSRF token belongs to the session: a form without it has no effect.
* A caller queries the cluster for a session: it has a `qmq.Client` with the session's credential,
  and the last looks at the cluster.
* Jobs of a session replay or purge dead letters in the background. A job ends with the console or
  with the login. Handled letters stay handled, and the rest waits in the queue: starting the same
  filter again continues there.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from qmq.console.cluster_look import ClusterLook, ClusterWatch, look_at_cluster, look_at_subject
from qmq.errors import QmqError
from qmq.rpc.strangers import payer

if TYPE_CHECKING:
    from qmq.client.client import Client
    from qmq.console.oidc import ShownToken

log = logging.getLogger("qmq.console")


@dataclass(slots=True, eq=False)
class ReplayJob:
    """`state` is running, done, stopped or failed; `count` is how many letters are done."""

    group: str
    verb: str
    command: str
    began_ms: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "running"
    count: int = 0
    failure: str = ""
    _task: asyncio.Task[None] | None = None

    def set_count(self, count: int) -> None:
        """Set the number of finished letters."""
        self.count = count

    def start(self, work: Coroutine[Any, Any, int]) -> None:
        """Run the job as a task."""
        self._task = asyncio.create_task(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, int]) -> None:
        try:
            self.count = await work
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "stopped"
            raise
        except Exception as failure:  # a job that nothing works on must not be shown as running
            self.state, self.failure = (
                "failed",
                str(failure) if isinstance(failure, QmqError) else repr(failure),
            )
            if not isinstance(failure, QmqError):
                log.exception("a job of the console failed: %s", self.command)

    async def stop(self) -> None:
        """Stop the job, if it still runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


IDLE_S: Final = 8 * 3600.0
LIFE_S: Final = 24 * 3600.0
SESSIONS_MAX: Final = 1_000
SESSIONS_EACH_MAX: Final = 50


@dataclass(slots=True, eq=False)
class ProxyToken:
    """The last token that a proxy showed for a session; proxies renew tokens. A call returns it."""

    text: str = field(repr=False)

    def __call__(self) -> str:
        return self.text


@dataclass(slots=True, eq=False)
class BrowserSession:
    """One browser. `token` is None if the session acts with the console's own credentials, or with
    a token that changes.
    """

    id: str
    csrf: str
    token: str | None
    caller: ConsoleCaller
    began_s: float
    seen_s: float
    shown: ShownToken | None = None
    """In the login mode "oidc": the token, which the console renews."""
    proxied: ProxyToken | None = None
    """In the login mode "proxy": the token, which the proxy renews."""
    principal: str = ""
    """Whose session it is; "" for the console's own credentials."""
    notes: list[str] = field(default_factory=list)
    """Notes that the next page shows once."""

    def is_csrf(self, given: str) -> bool:
        """True if the form came from one of this session's pages."""
        return hmac.compare_digest(self.csrf.encode(), given.encode())

    def taken_notes(self) -> list[str]:
        """Return the notes and forget them."""
        found, self.notes = self.notes, []
        return found


class Sessions:
    """All sessions, in the order in which they were last seen, oldest first. `monotonic_s` and
    `make_secret` are handed in.
    """

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        make_secret: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:
        self._monotonic_s, self._make_secret = monotonic_s, make_secret
        self._by_id: dict[str, BrowserSession] = {}

    def open(
        self,
        token: str | None,
        caller: ConsoleCaller,
        shown: ShownToken | None = None,
        principal: str = "",
        proxied: ProxyToken | None = None,
    ) -> BrowserSession:
        """Open a session."""
        now_s = self._monotonic_s()
        made = BrowserSession(
            self._make_secret(),
            self._make_secret(),
            token,
            caller,
            now_s,
            now_s,
            shown,
            proxied,
            principal,
        )
        self._by_id[made.id] = made
        return made

    def find(self, session_id: str) -> BrowserSession | None:
        """The session of a cookie; None if it ended or never existed."""
        found = self._by_id.get(session_id)
        now_s = self._monotonic_s()
        if found is None or _is_over(found, now_s):
            return None
        found.seen_s = now_s
        self._by_id[session_id] = self._by_id.pop(session_id)
        return found

    def close(self, session: BrowserSession) -> None:
        self._by_id.pop(session.id, None)

    def ended(self) -> list[BrowserSession]:
        """Remove and return the sessions that have expired, and those of too many."""
        now_s = self._monotonic_s()
        found = [each for each in self._by_id.values() if _is_over(each, now_s)]
        for each in found:
            del self._by_id[each.id]
        while (paying := self._one_too_many()) is not None:
            found.append(self._by_id.pop(paying.id))
        return found

    def _one_too_many(self) -> BrowserSession | None:
        held = [(each, each.principal or each.token, 1) for each in self._by_id.values()]
        if len(held) > SESSIONS_MAX:
            return payer(held)
        named = [each for each in held if each[1]]
        most = max(Counter(owner for _, owner, _ in named).values(), default=0)
        return payer(named) if most > SESSIONS_EACH_MAX else None

    def callers(self) -> set[ConsoleCaller]:
        """The callers that at least one session uses."""
        return {each.caller for each in self._by_id.values()}


def _is_over(session: BrowserSession, now_s: float) -> bool:
    return now_s - session.seen_s > IDLE_S or now_s - session.began_s > LIFE_S


SUBJECTS_MAX: Final = 50
"""A caller watches at most this many subjects; for one more, it forgets the subject that was
requested longest ago.
"""


JOBS_MAX: Final = 20
"""A caller keeps at most this many finished jobs."""


class ConsoleCaller:
    """One identity towards the cluster. `close` ends its connections."""

    def __init__(
        self, client: Client, monotonic_s: Callable[[], float], wall_s: Callable[[], float]
    ) -> None:
        self.client = client
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        self.watch = self._watch("")
        self._subjects: dict[str, ClusterWatch] = {}
        self._principal: str | None = None
        self.jobs: list[ReplayJob] = []
        """The jobs, the newest first."""

    def _watch(self, subject: str) -> ClusterWatch:
        async def look(now_s: float, before: ClusterLook | None) -> ClusterLook:
            return await (
                look_at_subject(self.client, subject, now_s)
                if subject
                else look_at_cluster(self.client, now_s, before)
            )

        return ClusterWatch(look, self._monotonic_s, self._wall_s)

    def subject_watch(self, subject: str) -> ClusterWatch:
        """The watch of one subject; the first request makes it."""
        found = self._subjects.pop(subject, None) or self._watch(subject)
        self._subjects[subject] = found
        while len(self._subjects) > SUBJECTS_MAX:
            del self._subjects[next(iter(self._subjects))]
        return found

    def start_job(self, job: ReplayJob) -> ReplayJob:
        """Keep a job, and forget the oldest finished jobs."""
        over = [each for each in self.jobs if each.state != "running"][JOBS_MAX:]
        self.jobs = [job, *[each for each in self.jobs if each not in over]]
        return job

    async def principal(self) -> str:
        """The principal that the cluster sees for this caller.
        Raises NotAuthenticated, NotConnected.
        """
        if self._principal is None:
            self._principal = (await self.client.access.whoami()).principal
        return self._principal

    async def close(self) -> None:
        for each in self.jobs:
            await each.stop()
        await self.client.close()
