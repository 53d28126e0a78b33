"""`qmq backup`: backups of a whole cluster, and clusters made from them (docs/BACKUP.md). Needs
`pip install qmq[server,tiering]`.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from qmq.cli.arguments import COUNT_MAX, DAYS_MAX
from qmq.cli.output import DryRun, Json, fail, progress_of, run, say, show, time_text, warn
from qmq.cli.roles import EtcdFlags, TlsFlags, taking
from qmq.errors import BackupDamaged, InvalidArgument, QmqError, Unavailable

if TYPE_CHECKING:
    from qmq_coordination.etcd.store import EtcdStore

    from qmq.backup.manifest import BackupManifest
    from qmq.backup.objects import BackupObjects
    from qmq.backup.prune import BackupPruner, KeepRule, Pruned
    from qmq.backup.restore import ReplicaTarget
    from qmq.rpc.network import Network

app = typer.Typer(help="Back up a whole cluster, and restore it.", no_args_is_help=True)

COLUMNS: Final = ("backup", "time", "revision", "groups", "bytes", "copied bytes", "release")

_R = TypeVar("_R")

Url = Annotated[
    str, typer.Argument(metavar="WHERE", help="A folder, s3://BUCKET/PREFIX, gs://… or az://….")
]
Which = Annotated[str, typer.Option("--backup", help="The backup's id; default: the newest.")]


@dataclass(frozen=True)
class _Where:
    where: Url


@dataclass(frozen=True)
class CreateOptions(TlsFlags, EtcdFlags, _Where):
    as_json: Json = False

    def network(self) -> Network:
        """Raises InvalidArgument."""
        from qmq.node.process import environment_with
        from qmq.security.tls import Tls

        if self.tls_ca is None and self.tls_cert is None and self.tls_key is None:
            return environment_with(None).network
        if self.tls_ca is None:
            raise InvalidArgument(
                "TLS needs --tls-ca: the CA that signed the servers' certificates"
            )
        return environment_with(Tls(self.tls_ca, self.tls_cert, self.tls_key)).network


@dataclass(frozen=True)
class RestoreOptions(EtcdFlags, _Where):
    backup: Which = ""
    into: Annotated[
        list[str] | None,
        typer.Option(
            "--into",
            metavar="GROUP/REPLICA=FOLDER",
            help="Restore a group's data as this replica's; repeatable.",
        ),
    ] = None
    as_json: Json = False


@dataclass(frozen=True)
class _Folders:
    folder: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="The data folders of stopped replicas."),
    ]


@dataclass(frozen=True)
class RebuildOptions(EtcdFlags, _Folders):
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="A place with backups: settings and rules come from the newest one.",
        ),
    ] = ""
    as_json: Json = False


@app.callback()
def backup() -> None:
    """Back up a whole cluster, and restore it."""


@app.command("create")
@taking(CreateOptions)
def create(_: typer.Context, options: CreateOptions) -> None:
    """Back up the whole cluster while it runs. Chunks of earlier backups in the same place are not
    copied again. The writes of all broker groups wait for an instant, so that the whole backup
    belongs to one moment. Needs a server's access to etcd and a server's certificate.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    try:
        objects, store, network = (
            _opened(options.where),
            options.etcd_options().open(),
            options.network(),
        )
    except (OSError, QmqError) as failure:
        fail(failure)
    columns = (TextColumn("backing up"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_of(*columns, quiet=options.as_json) as bar:
        task = bar.add_task("", total=None)
        made = run(
            _away(
                _create(
                    objects,
                    store,
                    network,
                    lambda done, total: bar.update(task, completed=done, total=total),
                )
            )
        )
    sentence = (
        f"backup {made.id}: {len(made.groups)} groups, {made.size:,} bytes, of which "
        f"{made.copied_bytes:,} were copied"
    )
    say(sentence, COLUMNS, _row(made), as_json=options.as_json)


async def _create(
    objects: BackupObjects, store: EtcdStore, network: Network, progress: Any
) -> BackupManifest:
    from qmq_coordination.access_records import SERVER_TOKEN

    from qmq.backup.create import BackupCreator
    from qmq.rpc.network import TokenNetwork

    try:
        token = await store.get(SERVER_TOKEN)
        text = "" if token is None else token.value.decode("ascii")
        shown = TokenNetwork(network, lambda: text, is_required=False)
        return await BackupCreator(
            store, shown, objects, now_ms=lambda: time.time_ns() // 1_000_000, progress=progress
        ).create()
    finally:
        await store.close()


@app.command("verify")
def verify(where: Url, backup: Which = "", as_json: Json = False) -> None:
    """Read a whole backup back, and check every byte and every entry's checksums."""
    try:
        objects = _opened(where)
    except QmqError as failure:
        fail(failure)
    made, entries = run(_away(_verify(objects, backup)))
    sentence = f"backup {made.id} is whole: {made.size:,} bytes, {entries:,} entries"
    say(sentence, ("backup", "bytes", "entries"), (made.id, made.size, entries), as_json=as_json)


async def _verify(objects: BackupObjects, backup_id: str) -> tuple[BackupManifest, int]:
    from qmq.backup.verify import BackupVerifier

    manifest = objects.manifest(backup_id)
    return manifest, BackupVerifier(objects).verify(manifest)


@app.command("list")
def list_backups(where: Url, as_json: Json = False) -> None:
    """List the backups in a place, oldest first."""
    try:
        objects = _opened(where)
    except QmqError as failure:
        fail(failure)
    show("backups", COLUMNS, run(_away(_list(objects))), as_json=as_json)


async def _list(objects: BackupObjects) -> list[tuple[Any, ...]]:
    return [_listed(objects, each) for each in objects.ids()]


def _listed(objects: BackupObjects, backup_id: str) -> tuple[Any, ...]:
    try:
        return _row(objects.manifest(backup_id))
    except BackupDamaged:
        return backup_id, time_text(0), 0, "damaged: its manifest cannot be read", 0, 0, ""


@app.command("prune")
def prune(
    where: Url,
    keep: Annotated[
        int, typer.Option("--keep", min=0, max=COUNT_MAX, help="The newest so many backups stay.")
    ] = 0,
    keep_days: Annotated[
        int,
        typer.Option(
            "--keep-days", min=0, max=DAYS_MAX, help="Backups of the last so many days stay."
        ),
    ] = 0,
    confirm_clock: Annotated[
        bool,
        typer.Option(
            "--confirm-clock",
            help=(
                "This machine's clock is right: delete even if more backups are too old than stay."
            ),
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete old backups, and the chunks that no other backup has. Backups that match --keep or
    --keep-days stay, and so does the newest one.

    While a backup is created in this place, nothing is deleted. With --keep-days, nothing is
    deleted either if more backups are too old than stay: this machine's clock may be wrong
    (--confirm-clock). If the command is interrupted, run it again.
    """
    from qmq.backup.prune import BackupPruner, KeepRule

    try:
        rule, objects = KeepRule(keep, keep_days), _opened(where)
    except QmqError as failure:
        fail(failure)
    pruner = BackupPruner(objects, now_ms=lambda: time.time_ns() // 1_000_000)
    done = run(_away(_prune(pruner, rule, dry_run, confirm_clock)))
    verb = "would delete" if dry_run else "deleted"
    sentence = (
        f"{verb} {len(done.deleted)} backups and {done.chunks:,} chunks; {len(done.kept)} "
        "backups stay"
    )
    say(
        sentence,
        ("kept", "deleted", "chunks"),
        (list(done.kept), list(done.deleted), done.chunks),
        as_json=as_json,
    )


async def _prune(
    pruner: BackupPruner, rule: KeepRule, dry_run: bool, confirm_clock: bool
) -> Pruned:
    return pruner.preview(rule) if dry_run else pruner.prune(rule, is_clock_confirmed=confirm_clock)


@app.command("restore")
@taking(RestoreOptions)
def restore(_: typer.Context, options: RestoreOptions) -> None:
    """Make a new cluster from a backup: put its keys into an empty etcd, and its data into empty
    folders.

    Stop nothing and start nothing meanwhile. Run it on each machine that is to have a group's first
    replica, with that group's `--into`.
    """
    try:
        targets = [_target(each) for each in options.into or []]
        objects, store = _opened(options.where), options.etcd_options().open()
    except QmqError as failure:
        fail(failure)
    made, missing = run(_away(_restore(objects, store, options.backup, targets)))
    done = ", ".join(each.group for each in targets) or "no data"
    left = (
        f"; still to be restored: {', '.join(missing)}"
        if missing
        else "; start the brokers and delay servers, then the metaservers"
    )
    row = (made.id, [each.group for each in targets], missing)
    say(
        f"backup {made.id} is restored into this etcd, with {done}{left}",
        ("backup", "restored", "missing"),
        row,
        as_json=options.as_json,
    )


@app.command("rebuild")
@taking(RebuildOptions)
def rebuild(_: typer.Context, options: RebuildOptions) -> None:
    """Make a new etcd's keys from the replicas' data, when the old etcd is lost for good and
    brokers' disks are not.

    Stop all servers first. Give at least one folder of each broker group and delay group; all
    existing folders are better. Then start the replicas with the new etcd, on their data.
    """
    try:
        objects = _opened(options.source) if options.source else None
        store = options.etcd_options().open()
    except QmqError as failure:
        fail(failure)
    groups, subjects, failed = run(_away(_rebuild(objects, store, options.folder)))
    for subject, why in failed.items():
        warn(f"not rebuilt: subject {subject}: {why}")
    made = f"rebuilt {len(groups)} groups ({', '.join(groups)}) and {subjects} subjects"
    sentence = f"{made}; start the replicas on their data, then the metaservers"
    say(
        sentence,
        ("groups", "subjects", "failed"),
        (groups, subjects, failed),
        as_json=options.as_json,
    )


async def _rebuild(
    objects: BackupObjects | None, store: EtcdStore, folders: list[Path]
) -> tuple[list[str], int, dict[str, str]]:
    from qmq_coordination.subjects import PREFIX

    from qmq.backup.manifest import decode_items
    from qmq.backup.rebuild import look_into, put_rebuilt, rebuilt_keys

    try:
        found = [look_into(each) for each in folders]
        items = (
            {} if objects is None else decode_items(objects.read_bytes(objects.manifest().items))
        )
        rebuilt = rebuilt_keys(found, items)
        await put_rebuilt(store, rebuilt)
    finally:
        await store.close()
    groups = sorted({each.identity.group for each in found})
    return groups, sum(key.startswith(PREFIX) for key in rebuilt.items), rebuilt.failed


def _target(text: str) -> ReplicaTarget:
    from qmq.backup.restore import ReplicaTarget

    place, _, folder = text.partition("=")
    group, _, replica = place.partition("/")
    if not group or not replica or not folder:
        raise InvalidArgument(f"--into is GROUP/REPLICA=FOLDER, not {text!r}")
    return ReplicaTarget(group, replica, Path(folder))


async def _restore(
    objects: BackupObjects, store: EtcdStore, backup_id: str, targets: list[ReplicaTarget]
) -> tuple[BackupManifest, list[str]]:
    from qmq.backup.restore import Restore

    try:
        manifest = objects.manifest(backup_id)
        return manifest, await Restore(store, objects, manifest).run(targets)
    finally:
        await store.close()


def _row(made: BackupManifest) -> tuple[Any, ...]:
    groups = ",".join(each.name for each in made.groups)
    return (
        made.id,
        time_text(made.time_ms),
        made.revision,
        groups,
        made.size,
        made.copied_bytes,
        made.release,
    )


def _opened(where: str) -> BackupObjects:
    """Raises InvalidArgument."""
    from qmq.backup.objects import BackupObjects
    from qmq.tiering.object_store import open_objects

    url = where if "://" in where else f"file://{Path(where).absolute()}"
    return BackupObjects(open_objects(url))


async def _away(work: Coroutine[Any, Any, _R]) -> _R:
    """Raises Unavailable if the object store is away."""
    from qmq.tiering.object_store import StoreAway

    try:
        return await work
    except StoreAway as cause:
        raise Unavailable(f"the object store: {cause}") from cause
