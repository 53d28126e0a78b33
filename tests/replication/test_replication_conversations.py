"""Whole conversations as text (as etcd-io/raft's data-driven tests): a file has commands, and below
`----` the messages that they caused.

    replicas abc a=1,1,2 b=1     a group; logs by the epochs of their entries
    campaign a                   win an epoch, and ask for promises
    append a 2                   the master writes entries
    cut a b | heal               the links between two replicas
    beat                         time for a sign of life
    settle                       let everything arrive until it is quiet; signs of life that change nothing are left out

QMQ_REWRITE=1 rewrites the files; read the difference.
"""  # noqa: E501

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from qmq_replication.ready import Ack, Append, Mismatch, Promise, PromiseRequest
from replication_world import Group

FILES = sorted((Path(__file__).parent / "conversations").glob("*.txt"))


def say(message: Any) -> str:
    """A message in a few words."""
    if isinstance(message, Append):
        what = (
            "cut"
            if message.cut
            else f"entries to {message.last_index}"
            if message.runs
            else "alive"
        )
        return (
            f"Append {what} behind {message.prev_index} of epoch {message.prev_epoch}, commit "
            f"{message.commit}"
        )
    if isinstance(message, Ack):
        return f"Ack stored {message.stored}"
    if isinstance(message, Mismatch):
        return (
            "Mismatch "
            + " ".join(f"epoch {run.epoch} from {run.first}" for run in message.runs)
            + f", ends at {message.last_index}"
        )
    if isinstance(message, Promise):
        return (
            f"Promise {message.epoch}, ends at {message.last_index} of epoch {message.last_epoch}"
        )
    return (
        f"PromiseRequest {message.epoch}" if isinstance(message, PromiseRequest) else str(message)
    )


class Script:
    """Runs commands; `lines` is the conversation."""

    def __init__(self) -> None:
        self.group = Group()
        self.lines: list[str] = []

    def run(self, command: str) -> list[str]:
        """One command."""
        self.lines = []
        word, *words = command.split()
        getattr(self, f"_do_{word}")(*words)
        return self.lines

    def _do_replicas(self, names: str, *logs: str) -> None:
        found = dict(each.split("=") for each in logs)
        self.group = Group(
            names,
            logs={
                name: tuple(int(epoch) for epoch in log.split(",")) for name, log in found.items()
            },
        )

    def _do_campaign(self, name: str) -> None:
        self.group.campaign(name)

    def _do_append(self, name: str, count: str) -> None:
        self.group.append(name, int(count))

    def _do_cut(self, left: str, right: str) -> None:
        self.group.cut |= {(left, right), (right, left)}

    def _do_heal(self) -> None:
        self.group.heal()

    def _do_beat(self) -> None:
        self.group.pass_time(self.group.timing.heartbeat_ms, self.group.master)

    def _do_settle(self) -> None:
        while self.group.queue:
            for sender, to, message in self.group.queue:
                lost = " (lost)" if (sender, to) in self.group.cut else ""
                self.lines.append(f"{sender} -> {to}: {say(message)}{lost}")
            self.group.deliver()
        for name, core in self.group.core.items():
            log = "".join(f" {epoch}" for epoch in self.group.log[name].epochs)
            self.lines.append(
                f"{name} {core.state.role.value}, log{log}, commit {core.state.commit}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_conversation(path: Path) -> None:
    script = Script()
    said = ""
    for block in path.read_text().split("\n\n"):
        commands = [line for line in block.split("\n----")[0].splitlines() if line]
        lines = [
            line
            for command in commands
            if not command.startswith("#")
            for line in script.run(command)
        ]
        said += "\n".join([*commands, *(["----", *lines] if lines else [])]) + "\n\n"
    said = said.rstrip() + "\n"
    if os.environ.get("QMQ_REWRITE"):
        path.write_text(said)
    assert path.read_text() == said
