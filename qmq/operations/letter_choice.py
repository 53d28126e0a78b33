"""Selects dead letters of a group by an operator's conditions. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from qmq.client.dead_letter import Choose, DeadLetter
from qmq.errors import InvalidArgument


def chosen_by(subject: str, ids: list[str], error: str, since: datetime | None) -> Choose:
    """A function that selects letters: all given conditions must hold. Raises InvalidArgument for an invalid message id."""
    wanted = {each.strip().lower() for each in ids}
    if any(len(each) != 32 for each in wanted):
        raise InvalidArgument("a message id has 32 hexadecimal digits: `qmq dlq show GROUP --json` gives them")
    since_ms = 0 if since is None else int((since if since.tzinfo else since.replace(tzinfo=UTC)).timestamp() * 1000)

    def choose(letter: DeadLetter) -> bool:
        return (
            (not subject or letter.subject == subject)
            and (not wanted or str(letter.id) in wanted)
            and error in letter.error
            and letter.dead_ms >= since_ms
        )

    return choose
