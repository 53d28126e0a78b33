"""Administration of delivery, as a client asks metaservers for it: settings of consumer groups, and who is paused (docs/DELIVERY.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qmq.client.partial import Partial
from qmq.model import GroupSettings, check_name, dead_letter_subject
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


class DeliveryClient:
    """Part of `MetadataClient`. All of it may be repeated after a lost answer: doing it twice is doing it once."""

    async def _call(self, method: str, request: Any) -> Any:
        """Ask a metaserver; see `MetadataClient`."""
        raise NotImplementedError

    # --- settings of groups --------------------------------------------------------------------------------------------

    async def set_group_settings(
        self, subject: str, group: str, *, attempts_max: int | None = None, retry_delays_ms: Sequence[int] | None = None
    ) -> pb.DescribeGroupSettingsResponse:
        """How a group's messages are tried again, on a subject or on all ("*"); what is None stays as it is. Returns what holds then.

        Raises UnknownSubject, OrderMismatch (an ordered subject: that is its consumers' matter), InvalidName, InvalidArgument.
        """
        default = GroupSettings()
        GroupSettings(
            default.attempts_max if attempts_max is None else attempts_max,
            default.retry_delays_ms if retry_delays_ms is None else tuple(retry_delays_ms),
        ).check()
        request = pb.SetGroupSettingsRequest(subject=subject, group=group, attempts_max=attempts_max, retry_delays_ms=retry_delays_ms)
        found: pb.DescribeGroupSettingsResponse = await self._call("SetGroupSettings", request)
        return found

    async def clear_group_settings(self, subject: str, group: str) -> pb.DescribeGroupSettingsResponse:
        """Take them away: those of the group on all subjects hold again, or the brokers' own. Raises InvalidName."""
        request = pb.SetGroupSettingsRequest(subject=subject, group=group, clears=True)
        found: pb.DescribeGroupSettingsResponse = await self._call("SetGroupSettings", request)
        return found

    async def group_settings(self, subject: str, group: str) -> pb.DescribeGroupSettingsResponse:
        """What holds, and where each is from: the subject's name, "*", or "" for the brokers' own. Raises as `set_group_settings`."""
        request = pb.DescribeGroupSettingsRequest(subject=subject, group=group)
        found: pb.DescribeGroupSettingsResponse = await self._call("DescribeGroupSettings", request)
        return found

    async def delete_group(self, subject: str, group: str) -> int:
        """Forget what a group consumed; on how many queues or partitions it was. A group of that name that comes later is new.

        Parked keys of an ordered subject's group go with it: their messages are not handed out to it again.

        Raises InvalidArgument while it has consumers, UnknownSubject, UnknownGroup (so does a repeated call), NotConnected.
        """
        request = control.DeleteGroupRequest(subject=subject, group=group)
        found: control.DeleteGroupResponse = await self._call("DeleteGroup", request)
        return found.queues

    async def delete_subject(self, name: str) -> int:
        """Delete a subject with all that is kept of it; on how many queues something was. Raises UnknownSubject, InvalidArgument.

        NotConnected: a broker group is silent; the subject is gone for clients, and the rest is done when the group is back.
        """
        request = control.DropSubjectRequest(subject=name)
        found: control.DropSubjectResponse = await self._call("DeleteSubject", request)
        return found.queues

    # --- dead letters --------------------------------------------------------------------------------------------------

    async def delete_dead_letters(self, group: str) -> int:
        """Delete all dead letters of a group that there are now; on how many broker groups any were. Raises InvalidName, NotConnected."""
        request = control.DropSubjectRequest(subject=dead_letter_subject(check_name("group", group)))
        found: control.DropSubjectResponse = await self._call("DeleteDeadLetters", request)
        return found.queues

    async def dead_letter_queues(self, group: str = "") -> Partial[pb.DeadLetterQueue]:
        """How much died of a group, or of all, on each broker group that answers. Raises InvalidName, NotConnected."""
        found: pb.DescribeDeadLettersResponse = await self._call("DescribeDeadLetters", pb.DescribeDeadLettersRequest(group=group))
        return Partial(found.queues, found.silent)

    # --- pauses --------------------------------------------------------------------------------------------------------

    async def pause_group(self, subject: str, group: str, *, reason: str = "") -> bool:
        """Brokers hand a group nothing until it is resumed, on a subject or on all ("*"); whether that is new.

        Raises UnknownSubject, InvalidName, InvalidArgument; so do the others.
        """
        return not await self._set_pause(pb.Pause(kind="group", subject=subject, group=group, reason=reason), is_paused=True)

    async def resume_group(self, subject: str, group: str) -> bool:
        """Whether it was paused, with just that subject, or "*"."""
        return await self._set_pause(pb.Pause(kind="group", subject=subject, group=group), is_paused=False)

    async def pause_consumer(self, subject: str, group: str, name: str, *, reason: str = "") -> bool:
        """The same for one consumer of a group."""
        whom = pb.Pause(kind="consumer", subject=subject, group=group, name=name, reason=reason)
        return not await self._set_pause(whom, is_paused=True)

    async def resume_consumer(self, subject: str, group: str, name: str) -> bool:
        """Whether it was paused by its name."""
        return await self._set_pause(pb.Pause(kind="consumer", subject=subject, group=group, name=name), is_paused=False)

    async def pause_client(self, name: str, *, reason: str = "") -> bool:
        """The same for all consumers of the clients of a name (`qmq.connect(..., name=...)`)."""
        return not await self._set_pause(pb.Pause(kind="client", name=name, reason=reason), is_paused=True)

    async def resume_client(self, name: str) -> bool:
        """Whether it was paused."""
        return await self._set_pause(pb.Pause(kind="client", name=name), is_paused=False)

    async def _set_pause(self, pause: pb.Pause, *, is_paused: bool) -> bool:
        """Whether it was paused before."""
        found: pb.SetPauseResponse = await self._call("SetPause", pb.SetPauseRequest(pause=pause, is_paused=is_paused))
        return found.was_paused

    async def pauses(self) -> list[pb.Pause]:
        """Who is paused in the cluster: groups, consumers, clients."""
        found: pb.ListPausesResponse = await self._call("ListPauses", pb.ListPausesRequest())
        return list(found.pauses)
