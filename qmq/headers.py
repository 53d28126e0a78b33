"""Headers that the system itself gives messages or looks at. Applications see them; their own must not begin with `qmq-`."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "qmq-"
CRON: Final = "qmq-cron"
"""Of a recurring message: when, five fields as in cron."""
ZONE: Final = "qmq-zone"
"""Of a recurring message: the time zone of `qmq-cron`, an IANA name."""
SCHEDULE_ID: Final = "qmq-schedule-id"
"""Of a recurring message's runs but the first: the first one's message id, 32 hexadecimal digits."""
GROUP: Final = "qmq-group"
"""Of a directed message: the consumer group that it is for."""
ATTEMPT: Final = "qmq-attempt"
"""Of a directed message: how often it was handed out and failed before, a decimal number."""
SUBJECT: Final = "qmq-subject"
"""Of a dead letter: the subject to which the message was sent."""
SEQUENCE: Final = "qmq-sequence"
"""Of a dead letter: the message's sequence there, on the broker group that has the letter."""
ERROR: Final = "qmq-error"
"""Of a dead letter: the last error's text."""
DEAD_MS: Final = "qmq-dead-ms"
"""Of a dead letter: when the message died, milliseconds since 1970."""
