"""Names of subjects and groups in the cluster, for hints and completion. Names that the cluster does not return quickly are left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import qmq
from qmq.errors import AccessDenied, QmqError, UnknownGroup, UnknownSubject

PATIENCE_S: Final = 5.0
"""The longest wait for the names of a hint."""


def subject_names(server: str) -> list[str]:
    """All subjects; empty if the cluster does not answer in time."""
    return _asked(server, _subjects)


def group_names(server: str, subject: str = "") -> list[str]:
    """The groups that consumed a subject, or any subject; empty if the cluster does not answer in time."""

    async def groups(mq: qmq.Client) -> list[str]:
        return await groups_of(mq, subject)

    return _asked(server, groups)


def broker_group_names(server: str) -> list[str]:
    """All broker groups and delay groups; empty if the cluster does not answer in time."""

    async def groups(mq: qmq.Client) -> list[str]:
        return [each.broker_group for each in (await mq.metadata.cluster()).groups]

    return _asked(server, groups)


async def groups_of(mq: qmq.Client, subject: str = "") -> list[str]:
    """The groups that consumed a subject, or any subject. Raises QmqError."""
    ordered = await ordered_subjects(mq, subject)
    names = {each.group for each in await mq.metadata.describe_groups(subject)} if subject not in ordered else set()
    for name in ordered:
        names |= {each.group for each in (await mq.metadata.describe_route(name)).groups}
    names |= {each.group for each in await mq.metadata.dead_letter_queues("")} if not subject else set()
    return sorted(names)


async def ordered_subjects(mq: qmq.Client, subject: str = "") -> list[str]:
    """All ordered subjects; or, given a name, that subject if it is ordered. Raises QmqError."""
    if subject:
        found = await mq.metadata.find_subject(subject)
        return [subject] if found is not None and found.settings.order else []
    return [each.settings.name for each in await mq.metadata.list_subjects() if each.settings.order]


async def require_subject(mq: qmq.Client, subject: str, *, must_answer: bool = False) -> None:
    """For a command that found no data of a subject. Raises UnknownSubject if the cluster says that the subject does not exist; with
    `must_answer` also the error if no metaserver answers: "no message" would then be no answer.
    """
    if not subject:
        return
    try:
        is_known = await mq.metadata.find_subject(subject) is not None
    except QmqError as failure:  # the cluster does not say; also to who may only consume
        if must_answer and not isinstance(failure, AccessDenied):
            raise
        return
    if not is_known:
        raise UnknownSubject(f"there is no subject {subject!r}: `qmq subject list` shows all")


async def require_group(mq: qmq.Client, group: str) -> None:
    """For a command that found no data of a group. Raises UnknownGroup if the group never consumed a message and has no dead letters."""
    if group and group not in await _or_none(groups_of(mq), group):
        raise UnknownGroup(f"there is no group {group!r}: `qmq group list` shows all")


async def _or_none(names: Awaitable[list[str]], name: str) -> list[str]:
    """The known names. If the cluster does not answer, only the given name, so that no error is raised about it."""
    try:
        return await names
    except QmqError:
        return [name]


async def _subjects(mq: qmq.Client, prefix: str = "") -> list[str]:
    return [each.settings.name for each in await mq.metadata.list_subjects(prefix)]


def _asked(server: str, ask: Callable[[qmq.Client], Awaitable[list[str]]]) -> list[str]:
    async def work() -> list[str]:
        async with asyncio.timeout(PATIENCE_S), qmq.connect(server, create_subjects=False) as mq:
            return await ask(mq)

    try:
        return asyncio.run(work())
    except (QmqError, TimeoutError, OSError):
        return []
