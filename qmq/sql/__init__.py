"""QMQ beside an application's own database: sending with its transactions (docs/OUTBOX.md), effects that happen once (docs/DEDUP.md)."""

from qmq.sql.dedup import SqlDedup

__all__ = ["SqlDedup"]
