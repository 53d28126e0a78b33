"""Names of subjects and groups in the cluster, for hints and completion. Names that the cluster
does not return quickly are left out.

For an unknown subject or group the nearest existing name is suggested, with the corrected command:

    error: [E105] there is no subject 'order': see `qmq subject list`
    did you mean 'orders'? try: qmq group list orders
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from qmq.errors import AccessDenied, QmqError, UnknownGroup, UnknownSubject

if TYPE_CHECKING:
    import qmq
    from qmq.client.metadata.service import MetadataClient

PATIENCE_S: Final = 5.0
"""The longest wait for the names of a hint."""


def subject_names(server: str) -> list[str]:
    """All subjects; empty if the cluster does not answer in time."""
    return _asked(server, _subjects)


def group_names(server: str, subject: str = "") -> list[str]:
    """The groups that consumed a subject, or any subject;
    empty if the cluster does not answer in time.
    """

    return _asked(server, lambda metadata: groups_of(metadata, subject))


def broker_group_names(server: str) -> list[str]:
    """All broker groups and delay groups; empty if the cluster does not answer in time."""

    async def groups(metadata: MetadataClient) -> list[str]:
        return [each.broker_group for each in (await metadata.cluster()).groups]

    return _asked(server, groups)


async def groups_of(metadata: MetadataClient, subject: str = "") -> list[str]:
    """The groups that consumed a subject, or any subject. Raises QmqError."""
    ordered = await ordered_subjects(metadata, subject)
    names = (
        {each.group for each in await metadata.describe_groups(subject)}
        if subject not in ordered
        else set()
    )
    for name in ordered:
        names |= {each.group for each in (await metadata.describe_route(name)).groups}
    names |= (
        {each.group for each in await metadata.dead_letter_queues("")} if not subject else set()
    )
    return sorted(names)


async def ordered_subjects(metadata: MetadataClient, subject: str = "") -> list[str]:
    """All ordered subjects; or, given a name, that subject if it is ordered. Raises QmqError."""
    if subject:
        found = await metadata.find_subject(subject)
        return [subject] if found is not None and found.settings.order else []
    return [each.settings.name for each in await metadata.list_subjects() if each.settings.order]


async def require_subject(mq: qmq.Client, subject: str, *, must_answer: bool = False) -> None:
    """For a command that found no data of a subject. Raises UnknownSubject if the cluster says that
    the subject does not exist; with `must_answer` also the error if no metaserver answers: "no
    message" would then be no answer.
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
    """For a command that found no data of a group. Raises UnknownGroup if the group never consumed
    a message and has no dead letters.
    """
    if group and group not in await _or_none(groups_of(mq.metadata), group):
        raise UnknownGroup(f"there is no group {group!r}: `qmq group list` shows all")


async def _or_none(names: Awaitable[list[str]], name: str) -> list[str]:
    """The known names. If the cluster does not answer, only the given name, so that no error is
    raised about it.
    """
    try:
        return await names
    except QmqError:
        return [name]


async def _subjects(metadata: MetadataClient) -> list[str]:
    return [each.settings.name for each in await metadata.list_subjects()]


def _asked(server: str, ask: Callable[[MetadataClient], Awaitable[list[str]]]) -> list[str]:
    from qmq.cli.administration import Administration  # has gRPC, which not all commands need

    async def work() -> list[str]:
        async with asyncio.timeout(PATIENCE_S), Administration(server) as mq:
            return await ask(mq.metadata)

    client_log = logging.getLogger(
        "qmq.client"
    )  # a hint is left out without a word, so what the client waits for is not said either
    was_disabled, client_log.disabled = client_log.disabled, True
    try:
        return asyncio.run(work())
    except (QmqError, TimeoutError, OSError):
        return []
    finally:
        client_log.disabled = was_disabled


class Given:
    """The arguments of this process's command,
    by parameter name (set by qmq/cli/added_options.py).
    """

    values: Mapping[str, Any] = {}
    words: Sequence[str] = ()
    """The command line as typed, without `qmq`."""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The known name that is closest to `wrong`, or None if none is close. Pure."""
    names = {each.lower(): each for each in sorted(known)}
    found = get_close_matches(wrong.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found and names[found[0]] != wrong else None


def corrected(words: Sequence[str], wrong: str, right: str) -> str:
    """The command line with the right name; empty if the wrong name is not a word of it. Pure."""
    if wrong not in words:
        return ""
    return shlex.join(["qmq", *[right if word == wrong else word for word in words]])


def hint(failure: BaseException) -> str:
    """The hint below an error about an unknown subject or group; empty if no name is close. Asks
    the cluster once.
    """
    server = Given.values.get("server")
    if not isinstance(failure, UnknownSubject | UnknownGroup) or not server:
        return ""
    for wrong in _quoted(failure):
        known = subject_names(server) if isinstance(failure, UnknownSubject) else _groups(server)
        right = nearest(wrong, known)
        if right is not None:
            again = corrected(Given.words, wrong, right)
            return f"did you mean {right!r}?" + (f" try: {again}" if again else "")
    return ""


def _groups(server: str) -> list[str]:
    """The groups of the subject in the command, if it names one, followed by all other groups."""
    subject = Given.values.get("subject")
    return group_names(server, subject) if isinstance(subject, str) else group_names(server)


def _quoted(failure: QmqError) -> list[str]:
    """The first name quoted in the error message."""
    given = [
        each
        for value in Given.values.values()
        for each in (value if isinstance(value, list | tuple) else [value])
    ]
    named = [
        each for each in given if isinstance(each, str) and each and repr(each) in failure.message
    ]
    return sorted(named, key=lambda each: failure.message.index(repr(each)))[:1]
