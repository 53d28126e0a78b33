"""Every limit in one place, with its unit, its reason and a precedent."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

NAME_CHARS_MAX: Final = 127
"""Subject, group and consumer names. Kafka allows 249 (a file name), NATS 255; ours never become file names."""

BODY_BYTES_MAX: Final = 4 * MIB
"""Default largest body of one message. Kafka 1 MiB, NATS 1 MiB (advises < 8), RocketMQ 4 MiB."""

BATCH_BYTES_MAX: Final = 16 * MIB
"""Largest batch a broker takes, header included. Bounds what one checksum covers and one frame carries."""

BATCH_MESSAGES_MAX: Final = 65_535
"""Messages in a batch: the index inside a batch is 16 bits of the message id."""

FRAME_BYTES_MAX: Final = BATCH_BYTES_MAX + 64 * KIB
"""Largest frame, checked before a byte is allocated for it (Kafka KIP-498 is why)."""

ANSWER_BYTES_MAX: Final = FRAME_BYTES_MAX + 2 * 8 * MIB
"""Largest answer: a delivery is full when it reaches what the pull asked for, and the batch that fills it may be of the largest size."""

REPLICA_FRAME_BYTES_MAX: Final = 256 * MIB
"""Largest frame between replicas of a group: one write of the master, such as a segment's opening snapshot."""

ASKING_BYTES_MAX: Final = 64 * KIB
"""Largest frame that only asks (JSON and fixed structs): reading 16 MiB of JSON held a broker up for seconds."""

SETTLE_RANGES_MAX: Final = 20_000
"""Ranges in one SETTLE or LANE_SETTLE, as a broker takes them: clients have been sending so many."""

SETTLE_RANGES_SENT: Final = 10_000
"""As a client sends them: there have been brokers that took no more."""

ERROR_VALUE_CHARS_MAX: Final = 200
"""Of a value that an error repeats; what is longer is cut."""

HELLO_BYTES_MAX: Final = 16 * KIB
"""Until a connection has said hello it may not make us hold more than this."""

INFLIGHT_BYTES_MAX: Final = 64 * MIB
"""Unanswered bytes one connection may have at a broker before the broker stops reading from it."""

PARTIAL_FRAMES_BYTES_MAX: Final = 256 * MIB
"""Of large frames that have come in part, over all connections: sixteen of the largest. Kafka's `queued.max.request.bytes` is its like."""

PULL_MESSAGES_MAX: Final = 65_535
"""Messages one pull may ask for."""

PULL_BYTES_MAX: Final = 8 * MIB
"""Bytes one pull answer aims at; one batch may exceed it, since a batch is never cut."""

TAGS_MAX: Final = 10
"""Tags on one message (the Java original's limit)."""

TAG_BYTES_MAX: Final = 255
FETCH_TAGS_MAX: Final = 2 * TAGS_MAX
"""Tags that one reading without a group may select, both ways together: each is looked for in every batch while others wait."""

FETCH_RANGES_MAX: Final = 64
"""Ranges of logical partitions that it may select, for the same reason."""

KEY_BYTES_MAX: Final = 4 * KIB
HEADER_BYTES_MAX: Final = 64 * KIB
"""All headers of one message together, names and values."""

STORED_HEADER_BYTES_MAX: Final = HEADER_BYTES_MAX + 16 * KIB
"""The same as a broker takes it: with the headers that QMQ's clients and brokers add."""

CREATE_TIME_MS_END: Final = 253_370_764_800_000
"""Create times lie before the year 9999: readers make dates of them."""

DELAY_MS_MAX: Final = 2 * 366 * 24 * 3600 * 1000
"""Longest delay: two years, leap days included (the Java original's limit; RocketMQ 3 days, SQS 15 minutes)."""

REQUEUE_MS_MAX: Final = 3600 * 1000
"""Longest delay of a retry that a broker keeps itself, in memory and only while retention keeps the message: an hour. A consumer sends
longer ones to a delay group (docs/adr/0012)."""

LOGICAL_PARTITIONS_MAX: Final = 65_536
"""Logical partitions of an ordered subject: one takes 16 bits in a batch."""

CONSUMER_UNACKED_MAX: Final = 100_000
"""Messages one consumer may hold of a group before its pulls wait for acknowledgements."""

CONSUMER_UNACKED_BYTES_MAX: Final = 256 * MIB
"""Bytes of the same, as they lie in the log."""

ATTEMPTS_MAX: Final = 1_000_000
"""Most attempts that a group may give a message."""

RETRY_DELAYS_MAX: Final = 64
"""Delays between attempts that a group may set."""

GROUP_CONSUMERS_MAX: Final = 10_000
"""Consumers of a group on one queue."""

CONNECTION_SESSIONS_MAX: Final = 10_000
"""Queues and lanes that one connection reads, of each kind."""

SESSION_PULLS_MAX: Final = 64
"""Pulls of one session that wait for messages; QMQ's own clients have one or two."""

WAIT_MS_MAX: Final = 60_000
"""Longest long-poll."""

FLUSH_INTERVAL_MS: Final = 2
"""With `--flush async`: from the beginning of one flush to that of the next, at least (docs/REPLICATION.md says why)."""
