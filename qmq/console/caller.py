"""Who asks the cluster on behalf of a session: a `qmq.Client` with that session's credential, and what it saw last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from qmq.console.cluster_look import ClusterLook, look_at_cluster, look_at_subject
from qmq.console.cluster_watch import ClusterWatch
from qmq.console.replay_jobs import ReplayJob

if TYPE_CHECKING:
    from qmq.client.client import Client

SUBJECTS_MAX: Final = 50
"""Subjects that are watched one by one; of more, the one that was asked for longest ago is forgotten."""


JOBS_MAX: Final = 20
"""Jobs that are over and still shown."""


class ConsoleCaller:
    """One identity. `close` ends its connections."""

    def __init__(self, client: Client, monotonic_s: Callable[[], float], wall_s: Callable[[], float]) -> None:
        self.client = client
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        self.watch = self._watch("")
        self._subjects: dict[str, ClusterWatch] = {}
        self._principal: str | None = None
        self.jobs: list[ReplayJob] = []
        """The newest first."""

    def _watch(self, subject: str) -> ClusterWatch:
        async def look(now_s: float, before: ClusterLook | None) -> ClusterLook:
            return await (look_at_subject(self.client, subject, now_s) if subject else look_at_cluster(self.client, now_s, before))

        return ClusterWatch(look, self._monotonic_s, self._wall_s)

    def subject_watch(self, subject: str) -> ClusterWatch:
        """Of one subject."""
        found = self._subjects.pop(subject, None) or self._watch(subject)
        self._subjects[subject] = found
        while len(self._subjects) > SUBJECTS_MAX:
            del self._subjects[next(iter(self._subjects))]
        return found

    def start_job(self, job: ReplayJob) -> ReplayJob:
        """Keep a job, and forget the oldest that are over."""
        over = [each for each in self.jobs if each.state != "running"][JOBS_MAX:]
        self.jobs = [job, *[each for each in self.jobs if each not in over]]
        return job

    async def principal(self) -> str:
        """Who the cluster takes this for. Raises NotAuthenticated, NotConnected."""
        if self._principal is None:
            self._principal = (await self.client.access.whoami()).principal
        return self._principal

    async def close(self) -> None:
        for each in self.jobs:
            await each.stop()
        await self.client.close()
