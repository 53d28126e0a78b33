"""Administration of delivery through a metaserver: settings of consumer groups, dead letters, pauses (docs/DELIVERY.md)."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.client.metaserver_calls import MetaserverCalls
from qmq.client.partial import Partial
from qmq.model import GroupSettings, check_name, dead_letter_subject
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb


class DeliveryClient(MetaserverCalls):
    """Part of `MetadataClient`. Every call may be repeated after a lost answer."""

    # --- settings of groups --------------------------------------------------------------------------------------------

    async def set_group_settings(
        self, subject: str, group: str, *, attempts_max: int | None = None, retry_delays_ms: Sequence[int] | None = None
    ) -> pb.DescribeGroupSettingsResponse:
        """Set how a group's messages are retried, on a subject or on all ("*"). None leaves a setting as it is. Returns the resulting
        settings.

        Raises UnknownSubject, OrderMismatch (on an ordered subject, consumers set this), InvalidName, InvalidArgument.
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
        """Delete a group's settings: then those of the group on all subjects apply, or else the brokers' defaults. Raises InvalidName."""
        request = pb.SetGroupSettingsRequest(subject=subject, group=group, clears=True)
        found: pb.DescribeGroupSettingsResponse = await self._call("SetGroupSettings", request)
        return found

    async def group_settings(self, subject: str, group: str) -> pb.DescribeGroupSettingsResponse:
        """The settings that apply, and the source of each: the subject's name, "*", or "" for the brokers' defaults. Raises as
        `set_group_settings`.
        """
        request = pb.DescribeGroupSettingsRequest(subject=subject, group=group)
        found: pb.DescribeGroupSettingsResponse = await self._call("DescribeGroupSettings", request)
        return found

    async def delete_group(self, subject: str, group: str) -> int:
        """Delete a group's progress. Returns the number of queues or partitions on which the group had progress. A later group of the same
        name starts as a new one.

        The parked keys of a group of an ordered subject are deleted with it.

        Raises InvalidArgument while the group has consumers, UnknownSubject, UnknownGroup (so does a repeated call), NotConnected.
        """
        request = control.DeleteGroupRequest(subject=subject, group=group)
        found: control.DeleteGroupResponse = await self._call("DeleteGroup", request)
        return found.queues

    async def delete_subject(self, name: str) -> int:
        """Delete a subject with its messages and groups. Returns the number of queues from which data was deleted. Raises UnknownSubject,
        InvalidArgument.

        Raises NotConnected if a broker group does not answer: clients no longer see the subject, and the group deletes its data when it is
        back.
        """
        request = control.DropSubjectRequest(subject=name)
        found: control.DropSubjectResponse = await self._call("DeleteSubject", request)
        return found.queues

    async def purge_subject(self, name: str) -> int:
        """Delete all messages that a subject has now, for good. Returns their number. The subject stays, and its groups continue after
        these messages.

        Raises UnknownSubject, InvalidArgument; NotConnected if a broker group does not answer; the other broker groups have then deleted
        theirs.
        """
        found: control.DropSubjectResponse = await self._call("PurgeSubject", control.DropSubjectRequest(subject=name))
        return found.messages

    # --- dead letters --------------------------------------------------------------------------------------------------

    async def delete_dead_letters(self, group: str) -> int:
        """Delete all current dead letters of a group. Returns the number of broker groups that had any. Raises
        InvalidName, NotConnected.
        """
        request = control.DropSubjectRequest(subject=dead_letter_subject(check_name("group", group)))
        found: control.DropSubjectResponse = await self._call("DeleteDeadLetters", request)
        return found.queues

    async def dead_letter_queues(self, group: str = "") -> Partial[pb.DeadLetterQueue]:
        """The number of dead letters of a group, or of all, on each broker group that answers. Raises InvalidName, NotConnected."""
        found: pb.DescribeDeadLettersResponse = await self._call("DescribeDeadLetters", pb.DescribeDeadLettersRequest(group=group))
        return Partial(found.queues, found.silent)

    # --- pauses --------------------------------------------------------------------------------------------------------

    async def pause_group(self, subject: str, group: str, *, reason: str = "") -> bool:
        """Pause a group on a subject or on all ("*"): brokers hand it nothing until it is resumed. Returns whether it was not paused
        before.

        Raises UnknownSubject, InvalidName, InvalidArgument. The other methods for pauses raise the same.
        """
        return not await self._set_pause(pb.Pause(kind="group", subject=subject, group=group, reason=reason), is_paused=True)

    async def resume_group(self, subject: str, group: str) -> bool:
        """Resume a group. Returns whether it was paused on just that subject, or on "*"."""
        return await self._set_pause(pb.Pause(kind="group", subject=subject, group=group), is_paused=False)

    async def pause_consumer(self, subject: str, group: str, name: str, *, reason: str = "") -> bool:
        """Pause one consumer of a group. Returns as `pause_group`."""
        whom = pb.Pause(kind="consumer", subject=subject, group=group, name=name, reason=reason)
        return not await self._set_pause(whom, is_paused=True)

    async def resume_consumer(self, subject: str, group: str, name: str) -> bool:
        """Resume a consumer. Returns whether it was paused."""
        return await self._set_pause(pb.Pause(kind="consumer", subject=subject, group=group, name=name), is_paused=False)

    async def pause_client(self, name: str, *, reason: str = "") -> bool:
        """Pause all consumers of the clients with a name (`qmq.connect(..., name=...)`). Returns as `pause_group`."""
        return not await self._set_pause(pb.Pause(kind="client", name=name, reason=reason), is_paused=True)

    async def resume_client(self, name: str) -> bool:
        """Resume the clients with a name. Returns whether they were paused."""
        return await self._set_pause(pb.Pause(kind="client", name=name), is_paused=False)

    async def _set_pause(self, pause: pb.Pause, *, is_paused: bool) -> bool:
        """Set or delete a pause. Returns whether it existed before."""
        found: pb.SetPauseResponse = await self._call("SetPause", pb.SetPauseRequest(pause=pause, is_paused=is_paused))
        return found.was_paused

    async def pauses(self) -> list[pb.Pause]:
        """All pauses of the cluster: groups, consumers, clients."""
        found: pb.ListPausesResponse = await self._call("ListPauses", pb.ListPausesRequest())
        return list(found.pauses)
