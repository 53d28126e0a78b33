"""The parts of the blocking client: delayed messages that wait,
administration, and access rules.
"""

# Made by tools/generate_blocking.py: change the asyncio client, and run that again.
from __future__ import annotations

from typing import TYPE_CHECKING

from qmq.blocking.loop_thread import BlockingPart, LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from typing import Literal

    from qmq.client.metadata.access import AccessClient
    from qmq.client.metadata.cache import DescribedGroups, FoundSubject, Partial
    from qmq.client.metadata.service import MetadataClient
    from qmq.client.producing.delayed import Delayed, DelayedMessage, DelayStats, When
    from qmq.errors import QmqError
    from qmq.model import (
        Compatibility,
        DeclaredSchema,
        DelayedId,
        SchemaFormat,
        SubjectConfig,
        SubjectFlush,
    )
    from qmq.proto.v1 import access_pb2, control_pb2, delay_pb2, meta_pb2


class BlockingDelayed(BlockingPart):
    """Delayed messages that wait: `BlockingClient.delayed`."""

    def __init__(self, thread: LoopThread, part: Delayed) -> None:
        super().__init__(thread)
        self._part = part

    def cancel(self, id: str | DelayedId) -> DelayedMessage:
        """Cancel a delayed message, or all further runs of a recurring one. Cancelling it again has
        the same result.

        Raises TooLate if the message is on its way or delivered, MessageNotFound, InvalidArgument;
        Unavailable (see its `outcome`), ClientClosed.
        """
        return self._thread.run(self._part.cancel(id))

    def move(self, id: str | DelayedId, when: When) -> DelayedMessage:
        """Change the due time, by a timedelta from now or a datetime; a time in the past means now.
        For a recurring message this moves the next run only: the runs between its time by the
        schedule and the new one come after it, late, and none comes twice.

        Raises as `cancel`, and DelayTooLong.
        """
        return self._thread.run(self._part.move(id, when))

    def show(self, id: str | DelayedId) -> DelayedMessage:
        """The message and its state. Raises MessageNotFound, InvalidArgument,
        Unavailable, ClientClosed.
        """
        return self._thread.run(self._part.show(id))

    def list(
        self,
        subject: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int | None = None,
        *,
        is_half: bool = False,
        silent: dict[str, str] | None = None,
    ) -> Iterator[DelayedMessage]:
        """Pending messages of a subject (default: all subjects) that are due from `start` on and
        before `end`, ordered by due time, without bodies; at most `limit`. With `is_half`, only
        half messages, which wait for a decision: see `Client.delayed_producer`.

        Raises InvalidName, InvalidArgument; NotConnected if a delay group does not answer, because
        the list would be incomplete. With a dict as `silent` an incomplete list is returned if at
        least one group answers; the dict then says which groups are missing, and why.
        """
        return self._thread.iterate(
            self._part.list(subject, start, end, limit, is_half=is_half, silent=silent)
        )

    def stats(self) -> DelayStats:
        """Pending messages, lateness of deliveries, and which delay groups did not answer. Raises
        NotConnected, ClientClosed.
        """
        return self._thread.run(self._part.stats())


class BlockingMetadata(BlockingPart):
    """Administration: subjects, groups, routes and broker groups, as a metaserver sees
    them: `BlockingClient.metadata`.
    """

    def __init__(self, thread: LoopThread, part: MetadataClient) -> None:
        super().__init__(thread)
        self._part = part

    def create_subject(
        self, config: SubjectConfig, *, partitions: int = 0, at_first_message: bool = False
    ) -> meta_pb2.SubjectSettings:
        """Create a subject. An ordered subject gets `partitions` partitions; 0 means one for each
        of its broker groups.

        `at_first_message`: only if the servers create subjects at their first message, otherwise
        UnknownSubject. Raises SubjectExists, InvalidName, InvalidArgument.
        """
        return self._thread.run(
            self._part.create_subject(
                config, partitions=partitions, at_first_message=at_first_message
            )
        )

    def list_subjects(self, prefix: str = "") -> Partial[meta_pb2.SubjectDescription]:
        """Subjects with their queues, except those on broker groups that do not answer."""
        return self._thread.run(self._part.list_subjects(prefix))

    def find_subject(self, name: str) -> FoundSubject | None:
        """The subject, without its queues on broker groups that do not answer: `silent` has those.
        None if it does not exist.
        """
        return self._thread.run(self._part.find_subject(name))

    def describe_groups(self, subject: str = "", group: str = "") -> DescribedGroups:
        """The progress of groups of unordered subjects, on the broker groups that answer.
        `describe_route` has those of an ordered one. Unless a group is named, `readers` has the
        readers without a group, also those of ordered subjects.

        Raises UnknownSubject, UnknownGroup; OrderMismatch for a group of an ordered subject;
        NotConnected if none answers.
        """
        return self._thread.run(self._part.describe_groups(subject, group))

    def reset_group(
        self,
        subject: str,
        group: str,
        *,
        to: str | None = None,
        time_ms: int | None = None,
        sequence: int | None = None,
        broker_group: str | None = None,
        directly: bool = True,
    ) -> list[control_pb2.Moved]:
        """Move a group to "earliest" or "latest" (`to`), to a time, or to a sequence. Not repeated
        after a lost answer.

        Applies to every broker group of the subject, or to `broker_group` only. `directly` calls
        that group's master without the metaserver.
        """
        return self._thread.run(
            self._part.reset_group(
                subject,
                group,
                to=to,
                time_ms=time_ms,
                sequence=sequence,
                broker_group=broker_group,
                directly=directly,
            )
        )

    def find_message(self, subject: str, message_id: str) -> control_pb2.StoredMessage:
        """Find a stored message by its id. Raises MessageNotFound, UnknownSubject."""
        return self._thread.run(self._part.find_message(subject, message_id))

    def find_every(
        self, message_id: str, subject: str = "", *, since_ms: int = 0
    ) -> control_pb2.FindMessageResponse:
        """Every place where a message is stored, in one subject or in all; delay groups included.

        Batches that delay groups delivered are searched from `since_ms` on. Raises MessageNotFound,
        UnknownSubject.
        """
        return self._thread.run(self._part.find_every(message_id, subject, since_ms=since_ms))

    def trace_message(
        self, place: control_pb2.StoredMessage, group: str = "", cursor: bytes = b""
    ) -> control_pb2.TraceMessageResponse:
        """The deliveries of a stored message to groups, and their verdicts, page by page: pass the
        answer's cursor for the next page. Raises MessageNotFound."""
        return self._thread.run(self._part.trace_message(place, group, cursor))

    def find_time(self, subject: str, time_ms: int) -> list[control_pb2.Moved]:
        """In each queue, the first message stored at or after a time. Raises UnknownSubject."""
        return self._thread.run(self._part.find_time(subject, time_ms))

    def change_route(
        self,
        subject: str,
        *,
        split: meta_pb2.SplitOperation | None = None,
        merge: meta_pb2.MergeOperation | None = None,
        move: meta_pb2.MoveOperation | None = None,
        from_version: int = 0,
        reason: str = "",
        dry_run: bool = False,
    ) -> meta_pb2.ChangeRouteResponse:
        """Split, merge or move partitions. Returns when the next route is published, or with
        `dry_run` when it is planned.

        After a lost answer the call is repeated only if `from_version` is given, because then the
        change is made at most once. Otherwise the error is raised, and `route_history` shows
        whether the change was made.

        Raises RouteConflict, UnknownSubject, OrderMismatch, UnknownPartition, InvalidArgument;
        DeadlineExceeded with the outcome STORED if the change has begun but is not published in
        time: it continues. Other errors have the outcome UNKNOWN if the change may be made.
        """
        return self._thread.run(
            self._part.change_route(
                subject,
                split=split,
                merge=merge,
                move=move,
                from_version=from_version,
                reason=reason,
                dry_run=dry_run,
            )
        )

    def describe_route(self, subject: str, version: int = 0) -> meta_pb2.DescribeRouteResponse:
        """A subject's route (0: the latest), its partitions, and the progress of groups. Raises
        UnknownSubject, OrderMismatch, InvalidArgument.
        """
        return self._thread.run(self._part.describe_route(subject, version))

    def route_history(self, subject: str) -> list[meta_pb2.RouteChangeInfo]:
        """The changes of the subject's route, oldest first.
        Raises UnknownSubject, OrderMismatch.
        """
        return self._thread.run(self._part.route_history(subject))

    def parked(
        self, subject: str, group: str, *, keys_max: int = 10000, key: bytes | None = None
    ) -> Partial[control_pb2.ParkedKey]:
        """The first parked keys, partition by partition, or only `key`, on the broker groups that
        answer. Raises UnknownSubject, UnknownGroup, OrderMismatch.
        """
        return self._thread.run(self._part.parked(subject, group, keys_max=keys_max, key=key))

    def unpark(self, subject: str, group: str, partition: int, key: bytes, *, replay: bool) -> int:
        """Replay a parked key's messages in order, or drop them (count them as done). Returns their
        number. Not repeated after a lost answer.
        """
        return self._thread.run(self._part.unpark(subject, group, partition, key, replay=replay))

    def set_reshard_policy(self, policy: meta_pb2.ReshardPolicy) -> meta_pb2.ReshardPolicy:
        """Set the policy by which a subject is resharded automatically. Raises UnknownSubject,
        OrderMismatch, InvalidArgument.
        """
        return self._thread.run(self._part.set_reshard_policy(policy))

    def explain_reshard(self, subject: str) -> meta_pb2.ExplainReshardResponse:
        """The policy, what it would do now and why, and what it did last.
        Raises UnknownSubject, OrderMismatch.
        """
        return self._thread.run(self._part.explain_reshard(subject))

    def list_delayed(self, request: delay_pb2.ListDelayedRequest) -> delay_pb2.ListDelayedResponse:
        """A page of pending messages. Raises InvalidArgument, NotConnected."""
        return self._thread.run(self._part.list_delayed(request))

    def describe_delays(self) -> meta_pb2.DescribeDelaysResponse:
        """The delay groups, and which of them did not answer. Raises NotConnected."""
        return self._thread.run(self._part.describe_delays())

    def cluster(self) -> meta_pb2.DescribeClusterResponse:
        """The broker groups with their replicas, and for how long the metaserver has not reached
        the coordination store.
        """
        return self._thread.run(self._part.cluster())

    def metaservers(self) -> dict[str, meta_pb2.DescribeClusterResponse | QmqError]:
        """The status of each metaserver, by its address, or the error of asking it; all are asked
        at the same time.
        """
        return self._thread.run(self._part.metaservers())

    def set_subject_flush(self, subject: str, flush: SubjectFlush) -> meta_pb2.SubjectSettings:
        """Set when the subject's producers get their acknowledgement. Raises UnknownSubject."""
        return self._thread.run(self._part.set_subject_flush(subject, flush))

    def alter_subject(
        self,
        subject: str,
        *,
        retention_ms: int | Literal["default"] | None = None,
        retention_bytes: int | Literal["default"] | None = None,
        body_bytes_max: int | None = None,
    ) -> meta_pb2.SubjectSettings:
        """Change settings of a subject that is in use; None leaves one as it is, and "default" is
        the brokers' own. Brokers follow within a second or two. A shorter retention deletes
        messages then; stored bodies that are longer than the new largest one stay.

        Raises UnknownSubject; InvalidArgument, also if nothing is to change.
        """
        return self._thread.run(
            self._part.alter_subject(
                subject,
                retention_ms=retention_ms,
                retention_bytes=retention_bytes,
                body_bytes_max=body_bytes_max,
            )
        )

    def set_subject_schema(
        self,
        subject: str,
        format: SchemaFormat,
        text: str,
        compatibility: Compatibility | None = None,
        *,
        dry_run: bool = False,
    ) -> DeclaredSchema:
        """Declare the next version of a subject's schema; the newest one again changes nothing.
        `compatibility`: default as before.
        """
        return self._thread.run(
            self._part.set_subject_schema(subject, format, text, compatibility, dry_run=dry_run)
        )

    def subject_schemas(self, subject: str) -> list[DeclaredSchema]:
        """All versions of a subject's schema, the newest one last. Raises UnknownSubject;
        InvalidArgument if it has none.
        """
        return self._thread.run(self._part.subject_schemas(subject))

    def delete_subject_schemas(self, subject: str) -> int:
        """Delete all versions of a subject's schema. Returns their number.
        Raises UnknownSubject.
        """
        return self._thread.run(self._part.delete_subject_schemas(subject))

    def place_subject(self, subject: str, broker_groups: Sequence[str]) -> meta_pb2.SubjectSettings:
        """Set the broker groups of a subject. Messages on former groups can still be consumed.
        Raises UnknownSubject, InvalidArgument.
        """
        return self._thread.run(self._part.place_subject(subject, broker_groups))

    def set_group_mode(self, broker_group: str, mode: str) -> str:
        """ "read-only" drains a broker group, "read-write" resumes it. Raises InvalidArgument."""
        return self._thread.run(self._part.set_group_mode(broker_group, mode))

    def transfer(self, broker_group: str, to: str = "") -> control_pb2.TransferResponse:
        """Hand a group's mastership over to a replica; the default is the most advanced one. Not
        repeated after a lost answer.
        """
        return self._thread.run(self._part.transfer(broker_group, to))

    def add_replica(self, broker_group: str, replica: str) -> control_pb2.ChangeReplicasResponse:
        """Add a replica to a group: first as a learner, then as a voter.
        Not repeated after a lost answer.
        """
        return self._thread.run(self._part.add_replica(broker_group, replica))

    def remove_replica(self, broker_group: str, replica: str) -> control_pb2.ChangeReplicasResponse:
        """Remove a replica from a group. Not repeated after a lost answer."""
        return self._thread.run(self._part.remove_replica(broker_group, replica))


class BlockingAccess(BlockingPart):
    """Who may do what in the cluster: `BlockingClient.access`."""

    def __init__(self, thread: LoopThread, part: AccessClient) -> None:
        super().__init__(thread)
        self._part = part

    def whoami(self) -> access_pb2.WhoAmIResponse:
        """The principal of this client, as the cluster authenticated it."""
        return self._thread.run(self._part.whoami())

    def rules(self, namespace: str = "") -> access_pb2.ListRulesResponse:
        """All rules and roles, or those of a namespace, and the mode."""
        return self._thread.run(self._part.rules(namespace))

    def put_rule(
        self,
        principal: str,
        operations: Iterable[str],
        kind: str,
        pattern: str = "*",
        *,
        is_deny: bool = False,
        rule_id: str = "",
    ) -> access_pb2.AccessRule:
        """Add a rule that allows or denies `operations`, or all operations if it is empty. Adding
        the same rule again changes nothing.

        Raises InvalidArgument, InvalidName.
        """
        return self._thread.run(
            self._part.put_rule(
                principal, operations, kind, pattern, is_deny=is_deny, rule_id=rule_id
            )
        )

    def delete_rule(self, rule_id: str) -> None:
        """Delete a rule. Raises InvalidArgument if there is no such rule, or if the caller would
        lose `administer`.
        """
        self._thread.run(self._part.delete_rule(rule_id))

    def set_mode(self, mode: str) -> str:
        """Set the mode, "off", "watch" or "enforce", and return the previous one.
        Raises InvalidArgument.
        """
        return self._thread.run(self._part.set_mode(mode))

    def test(
        self, principal: str, operation: str, kind: str, name: str = ""
    ) -> access_pb2.TestAccessResponse:
        """The decision of the rules about a principal, in any mode."""
        return self._thread.run(self._part.test(principal, operation, kind, name))

    def change_role(
        self, name: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> access_pb2.Role:
        """Add principals to a role, and remove others. A role without members does not exist."""
        return self._thread.run(self._part.change_role(name, add=add, remove=remove))

    def create_token(self, principal: str, *, ends_ms: int = 0) -> access_pb2.CreateTokenResponse:
        """Make a token. Its text is in this answer only. `ends_ms` is milliseconds since 1970, 0
        for a token that does not expire.
        """
        return self._thread.run(self._part.create_token(principal, ends_ms=ends_ms))

    def tokens(self, namespace: str = "") -> list[access_pb2.TokenInfo]:
        """All tokens, or those of a namespace's applications."""
        return self._thread.run(self._part.tokens(namespace))

    def delete_tokens(self, *, token_id: str = "", principal: str = "") -> list[str]:
        """Revoke one token, or all tokens of a principal, and return their ids. Connections that
        showed them are closed. Raises InvalidArgument.
        """
        return self._thread.run(self._part.delete_tokens(token_id=token_id, principal=principal))

    def put_quota(
        self, principal: str, limits: Mapping[str, int], *, quota_id: str = ""
    ) -> access_pb2.AccessQuota:
        """Set the limits of a principal, of a role or of a pattern.
        Raises InvalidArgument, InvalidName.
        """
        return self._thread.run(self._part.put_quota(principal, limits, quota_id=quota_id))

    def delete_quota(self, quota_id: str) -> None:
        """Delete a quota. Raises InvalidArgument."""
        self._thread.run(self._part.delete_quota(quota_id))

    def quotas(self, namespace: str = "") -> list[access_pb2.AccessQuota]:
        """All quotas, or those of a namespace."""
        return self._thread.run(self._part.quotas(namespace))
