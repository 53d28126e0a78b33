"""The client without asyncio, for scripts: the same names, each call waits.

    with qmq.blocking.connect("localhost:20880") as mq:
        mq.send("flight.departed", b"...", key="N14228")
        for message in mq.consumer("flight.departed", group="ops"):
            ...

An event loop runs in its own thread; any thread may call.
"""

# Made by scripts/generate_blocking.py: change the asyncio client, and run that again.
from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qmq.blocking_base import BlockingClientBase, BlockingConsumerBase, BlockingPart, LoopThread
from qmq.client.client import Client
from qmq.client.interceptors import Interceptor
from qmq.client.state_folder import StateDir
from qmq.security.client_tokens import Token
from qmq.security.contexts import default_server
from qmq.security.tls import Tls
from qmq.security.tls_network import network_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime, timedelta

    from qmq.client.access_client import AccessClient
    from qmq.client.browse_selection import BrowsedMessage
    from qmq.client.browsing import BrowseProgress
    from qmq.client.delayed import Delayed
    from qmq.client.delayed_message import DelayedMessage, DelayStats
    from qmq.client.due_times import When
    from qmq.client.metadata import MetadataClient
    from qmq.client.metadata_answers import FoundSubject
    from qmq.client.partial import Partial
    from qmq.client.receipts import Receipt, Receipts
    from qmq.errors import QmqError
    from qmq.metrics.exposition import Collector
    from qmq.model import DelayedId, SubjectConfig, SubjectFlush
    from qmq.proto.v1 import access_pb2, control_pb2, delay_pb2, meta_pb2
    from qmq.schemas.declared_schema import Compatibility, DeclaredSchema, SchemaFormat


class BlockingClient(BlockingClientBase):
    """Sends and consumes. Make it with `qmq.blocking.connect`; use it with `with`. Any thread may call."""

    def send(
        self,
        subject: str,
        body: object,
        *,
        key: str | bytes | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        cron: str | None = None,
        zone: str | None = None,
        acks: str = "quorum",
    ) -> Receipt:
        """Send a message and wait until it is stored. On an ordered subject it needs a key, and is stored behind earlier messages of the
        key.

        The body is bytes, or a value that `qmq.payload.encode` takes: a str, a dataclass, a model, anything that JSON can express.

        With `delay`, or `at` (a datetime with a time zone), the message is delivered at that time, or immediately if the time is past;
        `delayed` finds it by the receipt's `delayed_id`. With `cron` (five fields) and `zone` (such as "Europe/Berlin") the message is
        recurring; `at` is the earliest time of its first delivery.

        `acks` is as for `producer`. On an ordered subject, the messages of a key are in order among those sent with the same `acks`.

        Raises InvalidName, InvalidArgument, MessageTooLarge, UnknownSubject, DelayTooLong, DeadlineExceeded (see its `outcome`),
        ClientClosed.
        """
        return self._thread.run(
            self._client.send(subject, body, key=key, tags=tags, headers=headers, delay=delay, at=at, cron=cron, zone=zone, acks=acks)
        )

    def send_many(
        self,
        subject: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None,
        headers: Sequence[Mapping[str, str | bytes]] | None = None,
        delays: Sequence[timedelta] | timedelta | None = None,
        ats: Sequence[datetime] | datetime | None = None,
        acks: str = "quorum",
    ) -> Receipts:
        """Send many messages and wait until all are stored. `keys`, `tags` and `headers` have one item for each message, if they are given.

        `delays` or `ats` (with time zones) delay the messages: one item for each message, or one for all. Raises as `send`.
        """
        return self._thread.run(
            self._client.send_many(subject, bodies, keys=keys, tags=tags, headers=headers, delays=delays, ats=ats, acks=acks)
        )

    @property
    def metadata(self) -> BlockingMetadata:
        """Administration: subjects, groups, routes and broker groups, as a metaserver sees them."""
        return BlockingMetadata(self._thread, self._thread.call(lambda: self._client.metadata))

    def browse(
        self,
        subject: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        last: int | None = None,
        key: str | bytes | None = None,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        follow: bool = False,
        partial: bool = False,
        positions: Mapping[tuple[str, int], int] | None = None,
        sequences: tuple[int, int | None] = (0, None),
        broker_group: str = "",
        content: bytes = b"",
        progress: BrowseProgress | None = None,
    ) -> Iterator[BrowsedMessage]:
        """Read stored messages of a subject without a consumer group: messages stored from `start` on (default: the oldest) and before
        `end`, or, with `last`, the newest messages of each queue. With `follow` the iterator then waits for messages that are stored later,
        and does not end.

        Messages of one queue come in its order; those of several queues come in the order in which they were stored. `partial=True` skips
        broker groups that cannot be read. With `broker_group`, only what that one has. With `content`, only messages whose body holds these
        bytes. `progress` is kept up to date with how far was read.

        Raises InvalidName, InvalidArgument, UnknownSubject, AccessDenied, NotConnected, LogDamaged, ClientClosed.
        """
        return self._thread.iterate(
            self._client.browse(
                subject,
                start=start,
                end=end,
                last=last,
                key=key,
                tags_any=tags_any,
                tags_all=tags_all,
                follow=follow,
                partial=partial,
                positions=positions,
                sequences=sequences,
                broker_group=broker_group,
                content=content,
                progress=progress,
            )
        )

    def queue_ends(self, subject: str) -> dict[tuple[str, int], int]:
        """Where each queue of a subject ends: by broker group and partition, the sequence of its next message. Everything sent to the
        brokers before this call is decided: stored messages lie before the ends, and no other message is stored later.

        Needs `produce` and `browse` on the subject. Raises InvalidName, UnknownSubject, AccessDenied, NotConnected, ClientClosed.
        """
        return self._thread.run(self._client.queue_ends(subject))

    @property
    def metrics(self) -> Collector:
        """For prometheus_client: `REGISTRY.register(mq.metrics)`. Raises InvalidArgument if that is not installed."""
        return self._client.metrics

    def serve_metrics(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve the client's metrics for Prometheus at /metrics until the client is closed, and return the port; 0 takes a free one.

        Raises InvalidArgument if prometheus_client is not installed, OSError if the port is taken.
        """
        return self._thread.run(self._client.serve_metrics(port, host))

    @property
    def access(self) -> BlockingAccess:
        """Rules, roles, tokens and quotas of the cluster."""
        return BlockingAccess(self._thread, self._thread.call(lambda: self._client.access))

    @property
    def delayed(self) -> BlockingDelayed:
        """Pending delayed messages: cancel, move, show and list them."""
        return BlockingDelayed(self._thread, self._thread.call(lambda: self._client.delayed))

    def consumer(
        self,
        subject: str,
        group: str,
        *,
        name: str | None = None,
        start: str = "",
        broadcast: bool = False,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        ack: str = "auto",
        consume_most_once: bool = False,
        prefetch: int = 2000,
        prefetch_bytes: int = 64 * 1024 * 1024,
        pull_bytes: int = 1024 * 1024,
        lease_ms: int = 30000,
        expired: str = "raise",
    ) -> BlockingConsumer:
        """A consumer of a group: iterate over it, or `pull`.

        A new group begins at `start`: "earliest" (default) or "latest". With `broadcast` every consumer of the group gets every message,
        from "latest" on by default; a consumer that returns with the same `name` continues where it stopped. At most `prefetch` messages
        and `prefetch_bytes` bytes (the last batch may exceed them) are unsettled at a time. With `expired="skip"` the consumer continues
        with the oldest stored message where retention deleted some; the default raises MessagesExpired. Raises InvalidName,
        InvalidArgument, ClientClosed.
        """
        return BlockingConsumer(
            self._thread,
            self._thread.call(
                lambda: self._client.consumer(
                    subject,
                    group,
                    name=name,
                    start=start,
                    broadcast=broadcast,
                    tags_any=tags_any,
                    tags_all=tags_all,
                    ack=ack,
                    consume_most_once=consume_most_once,
                    prefetch=prefetch,
                    prefetch_bytes=prefetch_bytes,
                    pull_bytes=pull_bytes,
                    lease_ms=lease_ms,
                    expired=expired,
                )
            ),
            self.interceptors,
        )

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called."""
        return self._client.is_paused

    def pause(self) -> None:
        """Pause all consumers of this client, also those made later; see `Consumer.pause`. The client can still send."""
        self._thread.call(lambda: self._client.pause())

    def resume(self) -> None:
        """Resume all consumers, except those that were paused by `Consumer.pause`."""
        self._thread.call(lambda: self._client.resume())


class BlockingConsumer(BlockingConsumerBase):
    """One consumer of a group. Make it with `BlockingClient.consumer`, and iterate over it, or `pull`."""

    def join(self) -> None:
        """Return when this consumer is a member of its group on every broker group of the subject: from then on, a group that begins at
        "latest" gets every message whose `send` begins. Without `join` a consumer joins when it is first asked for messages.

        Raises UnknownSubject, AccessDenied, ClientClosed.
        """
        self._thread.run(self._consumer.join())

    @property
    def held(self) -> int:
        """Messages that this consumer holds without a verdict."""
        return self._consumer.held

    @property
    def is_paused(self) -> bool:
        """Whether this consumer or its client was paused by the application. Brokers keep the pauses of operators; the consumer does not
        see them.
        """
        return self._consumer.is_paused

    def limit(self, prefetch: int) -> None:
        """Change `prefetch`. Messages handed out beyond a lower limit stay handed out. Raises InvalidArgument."""
        self._thread.call(lambda: self._consumer.limit(prefetch))

    def pause(self) -> None:
        """Hand out nothing and pull nothing until `resume`. The consumer keeps its place in the group, its lease and its messages: messages
        that were handed out may be settled, and unseen messages wait here. A loop that asks for more waits.
        """
        self._thread.call(lambda: self._consumer.pause())

    def resume(self) -> None:
        """Resume delivery, unless the whole client is paused (`Client.pause`)."""
        self._thread.call(lambda: self._consumer.resume())

    def close(self, error: BaseException | None = None) -> None:
        """Send the remaining verdicts and leave the group. The message that the loop is handling fails (with `error`, if there is one);
        unseen messages return to the group immediately.

        Waits until retries with a delay of more than an hour are stored, for two minutes at most.
        """
        self._thread.run(self._consumer.close(error))


class BlockingDelayed(BlockingPart):
    """Delayed messages that wait: `BlockingClient.delayed`."""

    def __init__(self, thread: LoopThread, part: Delayed) -> None:
        super().__init__(thread)
        self._part = part

    def cancel(self, id: str | DelayedId) -> DelayedMessage:
        """Cancel a delayed message, or all further runs of a recurring one. Cancelling it again has the same result.

        Raises TooLate if the message is on its way or delivered, MessageNotFound, InvalidArgument; Unavailable (see its `outcome`),
        ClientClosed.
        """
        return self._thread.run(self._part.cancel(id))

    def move(self, id: str | DelayedId, when: When) -> DelayedMessage:
        """Change the due time, by a timedelta from now or a datetime; a time in the past means now. For a recurring message this moves the
        next run.

        Raises as `cancel`, and DelayTooLong.
        """
        return self._thread.run(self._part.move(id, when))

    def show(self, id: str | DelayedId) -> DelayedMessage:
        """The message and its state. Raises MessageNotFound, InvalidArgument, Unavailable, ClientClosed."""
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
        """Pending messages of a subject (default: all subjects) that are due from `start` on and before `end`, ordered by due time, without
        bodies; at most `limit`. With `is_half`, only half messages, which wait for a decision: see `Client.delayed_producer`.

        Raises InvalidName, InvalidArgument; NotConnected if a delay group does not answer, because the list would be incomplete. With a
        dict as `silent` an incomplete list is returned if at least one group answers; the dict then says which groups are missing, and why.
        """
        return self._thread.iterate(self._part.list(subject, start, end, limit, is_half=is_half, silent=silent))

    def stats(self) -> DelayStats:
        """Pending messages, lateness of deliveries, and which delay groups did not answer. Raises NotConnected, ClientClosed."""
        return self._thread.run(self._part.stats())


class BlockingMetadata(BlockingPart):
    """Administration: subjects, groups, routes and broker groups, as a metaserver sees them: `BlockingClient.metadata`."""

    def __init__(self, thread: LoopThread, part: MetadataClient) -> None:
        super().__init__(thread)
        self._part = part

    def create_subject(self, config: SubjectConfig, *, partitions: int = 0) -> meta_pb2.SubjectSettings:
        """Create a subject. An ordered subject gets `partitions` partitions; 0 means one for each of its broker groups.

        Raises SubjectExists, InvalidName, InvalidArgument.
        """
        return self._thread.run(self._part.create_subject(config, partitions=partitions))

    def list_subjects(self, prefix: str = "") -> Partial[meta_pb2.SubjectDescription]:
        """Subjects with their queues, except those on broker groups that do not answer."""
        return self._thread.run(self._part.list_subjects(prefix))

    def find_subject(self, name: str) -> FoundSubject | None:
        """The subject, without its queues on broker groups that do not answer: `silent` has those. None if it does not exist."""
        return self._thread.run(self._part.find_subject(name))

    def describe_groups(self, subject: str = "", group: str = "") -> Partial[control_pb2.Group]:
        """The progress of groups, on the broker groups that answer. Raises UnknownSubject, UnknownGroup; NotConnected if none answers."""
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
        """Move a group to "earliest" or "latest" (`to`), to a time, or to a sequence. Not repeated after a lost answer.

        Applies to every broker group of the subject, or to `broker_group` only. `directly` calls that group's master without the
        metaserver.
        """
        return self._thread.run(
            self._part.reset_group(subject, group, to=to, time_ms=time_ms, sequence=sequence, broker_group=broker_group, directly=directly)
        )

    def find_message(self, subject: str, message_id: str) -> control_pb2.StoredMessage:
        """Find a stored message by its id. Raises MessageNotFound, UnknownSubject."""
        return self._thread.run(self._part.find_message(subject, message_id))

    def find_every(self, message_id: str, subject: str = "", *, since_ms: int = 0) -> control_pb2.FindMessageResponse:
        """Every place where a message is stored, in one subject or in all; delay groups included.

        Batches that delay groups delivered are searched from `since_ms` on. Raises MessageNotFound, UnknownSubject.
        """
        return self._thread.run(self._part.find_every(message_id, subject, since_ms=since_ms))

    def trace_message(self, place: control_pb2.StoredMessage, group: str = "", cursor: bytes = b"") -> control_pb2.TraceMessageResponse:
        """The deliveries of a stored message to groups, and their verdicts, page by page: pass the answer's cursor for the next
        page. Raises MessageNotFound."""
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
        """Split, merge or move partitions. Returns when the next route is published, or with `dry_run` when it is planned.

        After a lost answer the call is repeated only if `from_version` is given, because then the change is made at most once. Otherwise
        the error is raised, and `route_history` shows whether the change was made.

        Raises RouteConflict, UnknownSubject, OrderMismatch, UnknownPartition, InvalidArgument; DeadlineExceeded if the change has begun but
        is not published in time: it continues.
        """
        return self._thread.run(
            self._part.change_route(subject, split=split, merge=merge, move=move, from_version=from_version, reason=reason, dry_run=dry_run)
        )

    def describe_route(self, subject: str, version: int = 0) -> meta_pb2.DescribeRouteResponse:
        """A subject's route (0: the latest), its partitions, and the progress of groups. Raises UnknownSubject, OrderMismatch,
        InvalidArgument.
        """
        return self._thread.run(self._part.describe_route(subject, version))

    def route_history(self, subject: str) -> list[meta_pb2.RouteChangeInfo]:
        """The changes of the subject's route, oldest first. Raises UnknownSubject, OrderMismatch."""
        return self._thread.run(self._part.route_history(subject))

    def parked(self, subject: str, group: str, *, keys_max: int = 10000) -> Partial[control_pb2.ParkedKey]:
        """Parked keys, on the broker groups that answer. Raises UnknownSubject, UnknownGroup, OrderMismatch."""
        return self._thread.run(self._part.parked(subject, group, keys_max=keys_max))

    def unpark(self, subject: str, group: str, partition: int, key: bytes, *, replay: bool) -> int:
        """Replay a parked key's messages in order, or drop them (count them as done). Returns their number. Not repeated after a lost
        answer.
        """
        return self._thread.run(self._part.unpark(subject, group, partition, key, replay=replay))

    def set_reshard_policy(self, policy: meta_pb2.ReshardPolicy) -> meta_pb2.ReshardPolicy:
        """Set the policy by which a subject is resharded automatically. Raises UnknownSubject, OrderMismatch, InvalidArgument."""
        return self._thread.run(self._part.set_reshard_policy(policy))

    def explain_reshard(self, subject: str) -> meta_pb2.ExplainReshardResponse:
        """The policy, what it would do now and why, and what it did last. Raises UnknownSubject, OrderMismatch."""
        return self._thread.run(self._part.explain_reshard(subject))

    def list_delayed(self, request: delay_pb2.ListDelayedRequest) -> delay_pb2.ListDelayedResponse:
        """A page of pending messages. Raises InvalidArgument, NotConnected."""
        return self._thread.run(self._part.list_delayed(request))

    def describe_delays(self) -> meta_pb2.DescribeDelaysResponse:
        """The delay groups, and which of them did not answer. Raises NotConnected."""
        return self._thread.run(self._part.describe_delays())

    def cluster(self) -> meta_pb2.DescribeClusterResponse:
        """The broker groups with their replicas, and for how long the metaserver has not reached the coordination store."""
        return self._thread.run(self._part.cluster())

    def metaservers(self) -> dict[str, meta_pb2.DescribeClusterResponse | QmqError]:
        """The status of each metaserver, by its address, or the error of asking it; all are asked at the same time."""
        return self._thread.run(self._part.metaservers())

    def set_subject_flush(self, subject: str, flush: SubjectFlush) -> meta_pb2.SubjectSettings:
        """Set when the subject's producers get their acknowledgement. Raises UnknownSubject."""
        return self._thread.run(self._part.set_subject_flush(subject, flush))

    def set_subject_schema(
        self, subject: str, format: SchemaFormat, text: str, compatibility: Compatibility | None = None, *, dry_run: bool = False
    ) -> DeclaredSchema:
        """Declare the next version of a subject's schema; the newest one again changes nothing. `compatibility`: default as before."""
        return self._thread.run(self._part.set_subject_schema(subject, format, text, compatibility, dry_run=dry_run))

    def subject_schemas(self, subject: str) -> list[DeclaredSchema]:
        """All versions of a subject's schema, the newest one last. Raises UnknownSubject; InvalidArgument if it has none."""
        return self._thread.run(self._part.subject_schemas(subject))

    def delete_subject_schemas(self, subject: str) -> int:
        """Delete all versions of a subject's schema. Returns their number. Raises UnknownSubject."""
        return self._thread.run(self._part.delete_subject_schemas(subject))

    def place_subject(self, subject: str, broker_groups: Sequence[str]) -> meta_pb2.SubjectSettings:
        """Set the broker groups of a subject. Messages on former groups can still be consumed. Raises UnknownSubject, InvalidArgument."""
        return self._thread.run(self._part.place_subject(subject, broker_groups))

    def set_group_mode(self, broker_group: str, mode: str) -> str:
        """ "read-only" drains a broker group, "read-write" resumes it. Raises InvalidArgument."""
        return self._thread.run(self._part.set_group_mode(broker_group, mode))

    def transfer(self, broker_group: str, to: str = "") -> control_pb2.TransferResponse:
        """Hand a group's mastership over to a replica; the default is the most advanced one. Not repeated after a lost answer."""
        return self._thread.run(self._part.transfer(broker_group, to))

    def add_replica(self, broker_group: str, replica: str) -> control_pb2.ChangeReplicasResponse:
        """Add a replica to a group: first as a learner, then as a voter. Not repeated after a lost answer."""
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
        self, principal: str, operations: Iterable[str], kind: str, pattern: str = "*", *, is_deny: bool = False, rule_id: str = ""
    ) -> access_pb2.AccessRule:
        """Add a rule that allows or denies `operations`, or all operations if it is empty. Adding the same rule again changes nothing.

        Raises InvalidArgument, InvalidName.
        """
        return self._thread.run(self._part.put_rule(principal, operations, kind, pattern, is_deny=is_deny, rule_id=rule_id))

    def delete_rule(self, rule_id: str) -> None:
        """Delete a rule. Raises InvalidArgument if there is no such rule, or if the caller would lose `administer`."""
        self._thread.run(self._part.delete_rule(rule_id))

    def set_mode(self, mode: str) -> str:
        """Set the mode, "off", "watch" or "enforce", and return the previous one. Raises InvalidArgument."""
        return self._thread.run(self._part.set_mode(mode))

    def test(self, principal: str, operation: str, kind: str, name: str = "") -> access_pb2.TestAccessResponse:
        """The decision of the rules about a principal, in any mode."""
        return self._thread.run(self._part.test(principal, operation, kind, name))

    def change_role(self, name: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()) -> access_pb2.Role:
        """Add principals to a role, and remove others. A role without members does not exist."""
        return self._thread.run(self._part.change_role(name, add=add, remove=remove))

    def create_token(self, principal: str, *, ends_ms: int = 0) -> access_pb2.CreateTokenResponse:
        """Make a token. Its text is in this answer only. `ends_ms` is milliseconds since 1970, 0 for a token that does not expire."""
        return self._thread.run(self._part.create_token(principal, ends_ms=ends_ms))

    def tokens(self, namespace: str = "") -> list[access_pb2.TokenInfo]:
        """All tokens, or those of a namespace's applications."""
        return self._thread.run(self._part.tokens(namespace))

    def delete_tokens(self, *, token_id: str = "", principal: str = "") -> list[str]:
        """Revoke one token, or all tokens of a principal, and return their ids. Connections that showed them are closed. Raises
        InvalidArgument.
        """
        return self._thread.run(self._part.delete_tokens(token_id=token_id, principal=principal))

    def put_quota(self, principal: str, limits: Mapping[str, int], *, quota_id: str = "") -> access_pb2.AccessQuota:
        """Set the limits of a principal, of a role or of a pattern. Raises InvalidArgument, InvalidName."""
        return self._thread.run(self._part.put_quota(principal, limits, quota_id=quota_id))

    def delete_quota(self, quota_id: str) -> None:
        """Delete a quota. Raises InvalidArgument."""
        self._thread.run(self._part.delete_quota(quota_id))

    def quotas(self, namespace: str = "") -> list[access_pb2.AccessQuota]:
        """All quotas, or those of a namespace."""
        return self._thread.run(self._part.quotas(namespace))


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    create_subjects: bool = True,
    interceptors: Iterable[Interceptor] = (),
    name: str | None = None,
    state_dir: StateDir = None,
    tls: Tls | None = None,
    token: Token = None,
) -> BlockingClient:
    """A client whose calls wait; `qmq.connect` explains the parameters and the errors."""
    thread = LoopThread()
    client = Client(
        addresses or default_server(),
        create_subjects=create_subjects,
        interceptors=interceptors,
        name=name,
        state_dir=state_dir,
        network=network_of(tls, token),
        for_threads=beside,
    )
    thread.start()
    return BlockingClient(client, thread)


def beside(client: Client, loop: asyncio.AbstractEventLoop) -> BlockingClient:
    """A blocking client beside an asyncio client, for the threads of plain handlers. Its `close` does nothing."""
    return BlockingClient(client, LoopThread(loop))
