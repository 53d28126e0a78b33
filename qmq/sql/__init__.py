"""Messages and a SQL database in one transaction: the outbox (docs/OUTBOX.md), and recognising what was worked on already (docs/DEDUP.md)."""

from qmq.sql.dedup import SqlDedup

__all__ = ["SqlDedup"]
