"""QMQ with an application's own database: sending in its transactions (docs/OUTBOX.md), and
exactly-once effects (docs/DEDUP.md).

`pip install qmq[sql]` installs SQLAlchemy, which compiles the statements. Printing migrations does
not need it, so it is imported with `SqlDedup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmq.sql.dialects import check_installed

if TYPE_CHECKING:
    from qmq.sql.dedup import SqlDedup

__all__ = ["SqlDedup"]


def __getattr__(name: str) -> Any:
    if name != "SqlDedup":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed()
    from qmq.sql.dedup import SqlDedup

    return SqlDedup
