"""`qmq copy`: messages from one subject to another, of the same cluster or of another one (docs/TRANSFER.md)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import qmq
from qmq.cli import exporting
from qmq.cli.exporting import LOAD_COLUMNS, bar, keep_saying
from qmq.cli.output import SERVER, Json, Server, fail, run, show
from qmq.cli.transfer.load_journal import LoadJournal
from qmq.cli.transfer.message_source import MessageRange, MessageSource
from qmq.cli.transfer.record_loader import RecordLoader
from qmq.client.client import Client
from qmq.errors import InvalidArgument, QmqError
from qmq.security.contexts import ClusterContext, ContextFile
from qmq.security.tls_network import network_of


def copy(
    source: Annotated[str, typer.Argument(help="The subject that is read.")],
    target: Annotated[str, typer.Argument(help="The subject that the messages go to; it exists.")],
    to_context: Annotated[str, typer.Option("--to-context", help="The target's cluster, by its context: `qmq context list`.")] = "",
    to_server: Annotated[str, typer.Option("--to-server", help="The target's cluster, by its metaservers; TLS and token as here.")] = "",
    at: exporting.At = None,
    until: exporting.Until = None,
    first: exporting.First = None,
    end: exporting.End = None,
    partition: exporting.Partition = None,
    broker_group: exporting.BrokerGroup = "",
    key: exporting.Key = None,
    key_from: exporting.KeyFrom = None,
    key_before: exporting.KeyBefore = None,
    tag: exporting.Tag = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="Keep here how far it came; in the state folder, under a name of its own, without it.")
    ] = None,
    rate: exporting.Rate = 0.0,
    compression: exporting.Compression = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Copy stored messages, with ids, keys, tags, headers and create times; those of a key stay in order. No consumer group takes part.

    Run it again after a crash: it goes on where it was, and stores nothing twice. Run it again when it is done: it copies what came since.
    """
    try:
        chosen = exporting.range_of(at, until, first, end, partition, broker_group, key, key_from, key_before, tag)
        there = target_of(server, to_context, to_server)
        if source == target and there.server == server:
            raise InvalidArgument(f"{source!r} would be copied into itself: name another subject, or another cluster")
        words = {name: text for name, text in (("start", at), ("end", until)) if text is not None}
        meant = {**chosen.to_json(), **words}  # "2h" ago is another time each time; the same words mean the same copy
        load = {"from": [server, source], "subject": target, "to": there.server, "range": meant}
        journal = LoadJournal(state or default_state(load), load)
    except (OSError, QmqError) as failure:
        fail(failure)
    try:
        row = run(_copy(server, source, there, target, chosen, journal, rate, compression, as_json))
    finally:
        journal.close()
    show("copied", LOAD_COLUMNS, [row], as_json=as_json)


def target_of(server: str, context: str, to_server: str) -> ClusterContext:
    """The target's cluster; this one, if none is named. Raises InvalidArgument."""
    if context and to_server:
        raise InvalidArgument("give --to-context or --to-server, not both")
    if not context:
        return ClusterContext("", to_server or server)
    found = ContextFile.of_user().find(context)
    if not found.server:
        raise InvalidArgument(f"context {context!r} names no server: `qmq context add {context} --server HOST:PORT`")
    return found


def connected(there: ClusterContext) -> Client:
    """A client of the target's cluster. A context says all of it: certificates and tokens of the environment are for the source, and are
    not shown to another cluster. Raises InvalidArgument."""
    if not there.name:
        return qmq.connect(there.server, create_subjects=False)
    return Client(there.server, create_subjects=False, network=network_of(environment=there.variables()))


def default_state(load: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Path:
    """One file for each source, target and range, in the folder of the user's states."""
    base = environment.get("XDG_STATE_HOME")
    folder = (Path(base) if base else Path.home() / ".local" / "state") / "qmq" / "copies"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(json.dumps(load, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{load['from'][1]}-to-{load['subject']}-{name}"


async def _copy(
    server: str,
    source: str,
    there: ClusterContext,
    target: str,
    chosen: MessageRange,
    journal: LoadJournal,
    rate: float,
    compression: str | None,
    quiet: bool,
) -> tuple[str, int, int, int]:
    state = journal.state
    before = 0 if state is None else state.records
    async with qmq.connect(server, create_subjects=False) as here, connected(there) as mq:
        messages = MessageSource(here, source, chosen, None if state is None else state.mark)
        left = max(await exporting.stored_count(here, source), before)
        with bar(quiet) as shown:
            task = shown.add_task(f"copying {source} to {target}", total=left)
            loader = RecordLoader(
                mq, target, journal, rate=rate, compression=compression, progress=lambda count: shown.update(task, completed=count)
            )
            await keep_saying(loader.load(messages), journal)
            total = journal.state.records if journal.state is not None else 0
            shown.update(task, completed=total, total=total)
    return (target, total, loader.sent, total - loader.sent)
