"""Subjects' schemas in the coordination store.

    /qmq/schemas/SUBJECT/0000000001              DeclaredSchema, JSON; a key for each version

Versions are never changed, and are deleted together (qmq/meta/subject_schemas.py writes them).
"""

from __future__ import annotations

from typing import Final

from qmq.model import check_name

SCHEMAS: Final = "/qmq/schemas/"


def schemas_prefix(subject: str) -> str:
    """The prefix of all versions. Raises InvalidName."""
    return f"{SCHEMAS}{check_name('subject', subject)}/"


def schema_key(subject: str, version: int) -> str:
    """The key of a version. Keys are in the order of versions. Raises InvalidName."""
    return f"{schemas_prefix(subject)}{version:010}"
