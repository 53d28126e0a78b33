"""Every limit in one place, with its unit, its reason and a precedent."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

NAME_CHARS_MAX: Final = 127
"""Subject, group and consumer names. Kafka allows 249 (a file name), NATS 255; ours never become
file names.
"""

BODY_BYTES_MAX: Final = 4 * MIB
"""Default largest body of one message. Kafka 1 MiB, NATS 1 MiB (advises < 8), RocketMQ 4 MiB."""

BATCH_BYTES_MAX: Final = 16 * MIB
"""Largest batch a broker takes, header included.
Bounds what one checksum covers and one frame carries.
"""

LONG_BODY_BYTES_MAX: Final = BATCH_BYTES_MAX - MIB
"""Largest body that a subject's settings may allow: the rest of the batch needs the other MiB."""

BATCH_MESSAGES_MAX: Final = 65_535
"""Messages in a batch: the index inside a batch is 16 bits of the message id."""

FRAME_BYTES_MAX: Final = BATCH_BYTES_MAX + 64 * KIB
"""Largest frame, checked before a byte is allocated for it (Kafka KIP-498 is why)."""

ANSWER_BYTES_MAX: Final = FRAME_BYTES_MAX + 2 * 8 * MIB
"""Largest answer. A delivery ends with the batch that reaches the size that the pull asked for, and
that batch may have the largest size.
"""

REPLICA_FRAME_BYTES_MAX: Final = 256 * MIB
"""Largest frame between replicas of a group:
one write of the master, such as a segment's opening snapshot.
"""

ASKING_BYTES_MAX: Final = 64 * KIB
"""Largest frame that carries no messages (JSON and fixed structs): parsing 16 MiB of JSON blocked a
broker for seconds.
"""

SETTLE_RANGES_MAX: Final = 20_000
"""Ranges in one SETTLE or LANE_SETTLE that a broker accepts,
because older clients send up to this many.
"""

STEP_MESSAGES_MAX: Final = 10_000
"""Messages that one step sends: those of ten full batches."""

STEP_BYTES_MAX: Final = 8 * MIB
"""Bytes that one step sends. With its settlements it is one entry of the log."""

STEP_TARGETS_MAX: Final = 64
"""Subjects that one step sends to."""

SETTLE_BYTES_MAX: Final = 8 * MIB
"""Largest SETTLE: its verdicts become one action, which must fit into one entry of the action log.
Clients send far less.
"""

UNWRITTEN_BYTES_MAX: Final = 64 * MIB
"""Actions that wait for disk space, beyond which a broker refuses requests of consumers that would
add to them.
"""

SETTLE_RANGES_SENT: Final = 10_000
"""Ranges in one SETTLE or LANE_SETTLE that a client sends: older brokers accept no more."""

ERROR_VALUE_CHARS_MAX: Final = 200
"""Characters of a value that an error message repeats; a longer value is cut."""

HELLO_BYTES_MAX: Final = 16 * KIB
"""Bytes that a broker buffers for a connection before its HELLO."""

INFLIGHT_BYTES_MAX: Final = 64 * MIB
"""Unanswered bytes of one connection beyond which a broker stops reading from it."""

PARKED_PAGE_BYTES: Final = MIB
"""Parked keys in one request or answer of a group's round: a metaserver waits a second for each."""

PARKED_LIST_BYTES: Final = 16 * MIB
"""Parked keys in a list for an operator: gRPC refuses answers of more than 32 MiB."""

PARTIAL_FRAMES_BYTES_MAX: Final = 256 * MIB
"""Bytes of partly received large frames, over all connections: sixteen of the largest. Compare
Kafka's `queued.max.request.bytes`.
"""

PULL_MESSAGES_MAX: Final = 65_535
"""Messages one pull may ask for."""

PULL_BYTES_MAX: Final = 8 * MIB
"""Bytes that a pull may ask for. The answer may be one batch larger,
because a batch is never cut.
"""

TAGS_MAX: Final = 10
"""Tags on one message (the Java original's limit)."""

TAG_BYTES_MAX: Final = 255
FETCH_TAGS_MAX: Final = 2 * TAGS_MAX
"""Tags that one read without a group may select, `tags_any` and `tags_all` together: the broker
looks for each of them in every batch.
"""

FETCH_RANGES_MAX: Final = 64
"""Ranges of logical partitions that one read without a group may select, for the same reason."""

KEY_BYTES_MAX: Final = 4 * KIB
HEADER_BYTES_MAX: Final = 64 * KIB
"""All headers of one message together, names and values."""

STORED_HEADER_BYTES_MAX: Final = HEADER_BYTES_MAX + 16 * KIB
"""All headers of one message as a broker accepts them:
with those that QMQ's clients and brokers add.
"""

CREATE_TIME_MS_END: Final = 253_370_764_800_000
"""Create times lie before the year 9999, because readers convert them to dates."""

DELAY_MS_MAX: Final = 2 * 366 * 24 * 3600 * 1000
"""Longest delay: two years, leap days included (the Java original's limit;
RocketMQ 3 days, SQS 15 minutes).
"""

REQUEUE_MS_MAX: Final = 3600 * 1000
"""Longest delay of a retry that a broker keeps itself: an hour. The broker keeps the retry in
memory, and only while retention keeps the message. A consumer sends longer ones to a delay group
(docs/adr/0012).
"""

LOGICAL_PARTITIONS_MAX: Final = 65_536
"""Logical partitions of an ordered subject: a batch stores each in 16 bits."""

CONSUMER_UNACKED_MAX: Final = 100_000
"""Unsettled messages of one consumer of a group,
beyond which its pulls wait for acknowledgements.
"""

CONSUMER_UNACKED_BYTES_MAX: Final = 256 * MIB
"""Unsettled bytes of one consumer of a group, as stored in the log."""

ATTEMPTS_MAX: Final = 1_000_000
"""Largest `attempts_max` of a group."""

RETRY_DELAYS_MAX: Final = 64
"""Largest number of delays between attempts that a group may set."""

GROUP_CONSUMERS_MAX: Final = 10_000
"""Consumers of a group on one queue."""

CONNECTION_SESSIONS_MAX: Final = 10_000
"""Sessions of one connection: of queues and of lanes, counted separately."""

SESSION_PULLS_MAX: Final = 64
"""Pulls of one session that wait for messages. QMQ's own clients use one or two."""

WAIT_MS_MAX: Final = 60_000
"""Longest long-poll."""

FLUSH_INTERVAL_MS: Final = 20
"""With `--flush async`: the least time from the beginning of one flush to the beginning of the next
(docs/REPLICATION.md says why).
"""
