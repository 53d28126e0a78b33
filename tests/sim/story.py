"""The events of one seed as readable lines: `tools/run sim --replay SEED`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmq_replication.ready import Ack, Append, Message, Mismatch, Ready

if TYPE_CHECKING:
    from sim.node import Node


class Story:
    """Lines of (milliseconds, who, what). Signs of life and acknowledgements are left out."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def tell(self, now_ms: int, name: str, what: str) -> None:
        """One line."""
        self.lines.append((now_ms, name, what))

    def did(self, node: Node, ready: Ready) -> None:
        """A replica's next action."""
        parts = [*_own(ready), *(f"to {to}: {_short(message)}" for to, message in ready.messages if not _is_routine(message))]
        if parts:
            self.tell(node.world.now, node.name, ", ".join(parts))


def _own(ready: Ready) -> list[str]:
    found: list[str] = []
    if ready.save is not None:
        found.append("save promised {} whole {} resetting until {}".format(*ready.save))
    if ready.reset is not None:
        found.append(f"start over behind {ready.reset.start_index}")
    if ready.truncate is not None:
        found.append(f"cut to {ready.truncate}")
    found += [f"write to {each.last_index}" for each in ready.append]
    if ready.commit is not None:
        found.append(f"commit {ready.commit}")
    if ready.role is not None:
        found.append(f"become {ready.role.value}")
    if ready.lead is not None:
        found.append(f"LEAD {ready.lead}")
    return found + [str(each) for each in ready.requests]


def _is_routine(message: Message) -> bool:
    return isinstance(message, Ack) or (isinstance(message, Append) and message.prev_index == message.last_index and not message.cut)


def _short(message: Message) -> str:
    if isinstance(message, Append):
        what = "cut behind" if message.cut else f"entries to {message.last_index} behind"
        return f"Append {what} {(message.prev_epoch, message.prev_index)}, commit {message.commit}, round {message.round}"
    if isinstance(message, Mismatch):
        runs = " ".join(f"{run.epoch}@{run.first}" for run in message.runs[-3:])
        return f"Mismatch round {message.round}, ends at {message.last_index}, last runs {runs}"
    return str(message)
