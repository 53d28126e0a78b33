"""`qmq copy` copies messages to another subject of the same cluster or of another one (docs/TRANSFER.md)."""

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
from qmq.cli.exporting import LOAD_COLUMNS, keep_saying
from qmq.cli.output import SERVER, Json, Server, fail, run, show
from qmq.cli.progress_bar import counting
from qmq.cli.transfer.load_journal import LoadJournal
from qmq.cli.transfer.message_source import MessageRange, MessageSource
from qmq.cli.transfer.record_loader import RecordLoader
from qmq.client.client import Client
from qmq.client.state_folder import user_state_folder
from qmq.errors import InvalidArgument, QmqError
from qmq.security.contexts import ClusterContext, ContextFile
from qmq.security.tls_network import network_of


def copy(
    source: Annotated[str, typer.Argument(help="The subject to read.")],
    target: Annotated[str, typer.Argument(help="The subject to write; it must exist.")],
    to_context: Annotated[str, typer.Option("--to-context", help="The target cluster's context: see `qmq context list`.")] = "",
    to_server: Annotated[
        str, typer.Option("--to-server", help="The target cluster's metaservers; TLS and token are the same as for the source.")
    ] = "",
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
        Path | None, typer.Option("--state", help="File that records the progress; default: a file of this copy in the state folder.")
    ] = None,
    rate: exporting.Rate = 0.0,
    compression: exporting.Compression = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Copy stored messages, with ids, keys, tags, headers and create times; the order of each key is kept. No consumer group is involved.

    After a crash, run the command again: it continues where it stopped and stores no message twice. When the copy is complete, running it
    again copies the messages stored since.
    """
    try:
        chosen = exporting.range_of(at, until, first, end, partition, broker_group, key, key_from, key_before, tag)
        there = target_of(server, to_context, to_server)
        if source == target and there.server == server:
            raise InvalidArgument(f"{source!r} would be copied into itself: give another subject or another cluster")
        words = {name: text for name, text in (("start", at), ("end", until)) if text is not None}
        meant = {**chosen.to_json(), **words}  # "2h" is another time at each run, but the same arguments mean the same copy.
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
    """The target cluster; by default the source's. Raises InvalidArgument."""
    if context and to_server:
        raise InvalidArgument("give --to-context or --to-server, not both")
    if not context:
        return ClusterContext("", to_server or server)
    found = ContextFile.of_user().find(context)
    if not found.server:
        raise InvalidArgument(f"context {context!r} names no server: `qmq context add {context} --server HOST:PORT`")
    return found


def connected(there: ClusterContext) -> Client:
    """A client of the target cluster. A context supplies every setting: certificates and tokens from the environment belong to the source
    and are never sent to another cluster. Raises InvalidArgument."""
    if not there.name:
        return qmq.connect(there.server, create_subjects=False)
    return Client(there.server, create_subjects=False, network=network_of(environment=there.variables()))


def default_state(load: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Path:
    """The state file of this source, target and range, in the user's state folder."""
    folder = user_state_folder(environment) / "copies"
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
        with counting(f"copying {source} to {target}", left, quiet=quiet) as completed:
            loader = RecordLoader(mq, target, journal, rate=rate, compression=compression, progress=completed)
            await keep_saying(loader.load(messages), journal)
            total = journal.state.records if journal.state is not None else 0
            completed(total)
    return (target, total, loader.sent, total - loader.sent)
