"""A caller queries the cluster for a session: it has a `qmq.Client` with the session's credential, and the last looks at the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from qmq.console.cluster_look import ClusterLook, look_at_cluster, look_at_subject
from qmq.console.cluster_watch import ClusterWatch
from qmq.console.replay_jobs import ReplayJob

if TYPE_CHECKING:
    from qmq.client.client import Client

SUBJECTS_MAX: Final = 50
"""A caller watches at most this many subjects; for one more, it forgets the subject that was requested longest ago."""


JOBS_MAX: Final = 20
"""A caller keeps at most this many finished jobs."""


class ConsoleCaller:
    """One identity towards the cluster. `close` ends its connections."""

    def __init__(self, client: Client, monotonic_s: Callable[[], float], wall_s: Callable[[], float]) -> None:
        self.client = client
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        self.watch = self._watch("")
        self._subjects: dict[str, ClusterWatch] = {}
        self._principal: str | None = None
        self.jobs: list[ReplayJob] = []
        """The jobs, the newest first."""

    def _watch(self, subject: str) -> ClusterWatch:
        async def look(now_s: float, before: ClusterLook | None) -> ClusterLook:
            return await (look_at_subject(self.client, subject, now_s) if subject else look_at_cluster(self.client, now_s, before))

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
        """The principal that the cluster sees for this caller. Raises NotAuthenticated, NotConnected."""
        if self._principal is None:
            self._principal = (await self.client.access.whoami()).principal
        return self._principal

    async def close(self) -> None:
        for each in self.jobs:
            await each.stop()
        await self.client.close()
