"""Headers that QMQ itself adds to messages or reads. Applications see them; their own headers must not begin with `qmq-`."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "qmq-"
CRON: Final = "qmq-cron"
"""The schedule of a recurring message: five fields as in cron."""
ZONE: Final = "qmq-zone"
"""The time zone of `qmq-cron`: an IANA name."""
SCHEDULE_ID: Final = "qmq-schedule-id"
"""On every run of a recurring message but the first: the first run's message id, 32 hexadecimal digits."""
PLANNED: Final = "qmq-planned"
"""On a run of a recurring message that was moved: PLANNED/DUE, its time by the schedule and the time to which it was moved, in milliseconds
since 1970. It holds for that due time only: release 0.2 copies the header to the runs after it.
"""
GROUP: Final = "qmq-group"
"""On a directed message: the consumer group that it is for."""
ATTEMPT: Final = "qmq-attempt"
"""On a directed message: how often it was handed out and failed before, a decimal number."""
SUBJECT: Final = "qmq-subject"
"""On a dead letter: the subject to which the message was sent."""
SEQUENCE: Final = "qmq-sequence"
"""On a dead letter: the message's sequence in that subject, on the broker group that holds the dead letter."""
ERROR: Final = "qmq-error"
"""On a dead letter: the last error's text."""
DEAD_MS: Final = "qmq-dead-ms"
"""On a dead letter: when the message died, milliseconds since 1970."""
REPLAY_OF: Final = "qmq-replay-of"
"""On a replayed dead letter: which letter it is a replay of, as BROKER-GROUP/SEQUENCE/TIME: its place in the dead-letter queue, and when it
died."""
