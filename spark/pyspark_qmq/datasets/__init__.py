"""Other datasets than the messages: option `qmq.log` of the data source. tables.py lists their
columns.

    deliveries    what was delivered to consumers, with outcomes       from the action logs of
                                                                       brokers or of folders
    progress      the progress of groups, second by second             from the same logs
    schedules     delayed messages and their states                    from a delay group's folder

An action log can only be replayed as a whole, so one task reads all of a broker group's log. A
schedule is split into parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_qmq.datasets.schedules import FolderStretch
    from qmq.columns.files.log import FileAddress
    from qmq.columns.reading import LogAddress
    from qmq.columns.servers.log import ServerAddress
    from qmq.wire.batch import Envelope

NAMES: Final = ("deliveries", "progress", "schedules")


class ActionLog(NamedTuple):
    """One broker group's action log, in a folder or at brokers, read by one task."""

    broker_group: str
    folder: str = ""
    committed: str = ""
    address: ServerAddress | None = None


def schema_of(name: str) -> StructType:
    """A dataset's columns. Raises InvalidArgument for an unknown dataset."""
    from pyspark_qmq.datasets import tables

    return tables.struct(check_name(name))


def check_name(name: str) -> str:
    """Raise InvalidArgument for an unknown dataset."""
    if name not in NAMES:
        raise InvalidArgument(f"there is no dataset {name!r}; datasets: {', '.join(NAMES)}")
    return name


def partitions(name: str, address: LogAddress) -> list[ActionLog | FolderStretch]:
    """The tasks of a read, which are sent to executors.
    Raises InvalidArgument, NotConnected, LogDamaged.
    """
    files = _files(address)
    if check_name(name) == "schedules":
        if files is None:
            raise InvalidArgument("schedules are read from a delay group's folder: option qmq.path")
        return list(_schedule_tasks(files))
    if files is not None:
        return list(_folder_tasks(files))
    from qmq.columns.servers.log import action_groups

    servers = _servers(address)
    return [ActionLog(group, address=servers) for group in action_groups(servers)]


def _servers(address: LogAddress) -> ServerAddress:
    from qmq.columns.servers.log import ServerAddress

    if not isinstance(address, ServerAddress):
        raise InvalidArgument(f"{address} has no action log: give qmq.servers or qmq.path")
    return address


def _files(address: LogAddress) -> FileAddress | None:
    """The folders of the address, if it has any. An address may have folders together with servers,
    which know the routes.
    """
    from qmq.columns.files.log import FileAddress
    from qmq.columns.reading import RoutedAddress

    if isinstance(address, RoutedAddress):
        return address.files
    return address if isinstance(address, FileAddress) else None


def _folder_tasks(files: FileAddress) -> Iterator[ActionLog]:
    from qmq.columns.files.log import action_folders

    found = [
        each for each in action_folders(list(files.paths), files.committed) if not each.is_delay
    ]
    if not found:
        raise InvalidArgument(
            f"{', '.join(files.paths)} has no action log: it is the folder action/ in a "
            "broker's folder"
        )
    for each in found:
        yield ActionLog(each.broker_group, str(each.path), files.committed)


def _schedule_tasks(files: FileAddress) -> Iterator[FolderStretch]:
    from pyspark_qmq.datasets.schedules import furthest, stretches
    from qmq.columns.files.folders import find_folders

    delays = [each for each in find_folders(files.paths, with_delay=True) if each.is_delay]
    if not delays:
        raise InvalidArgument(
            f"{', '.join(files.paths)} is not the folder of a delay group, which has a "
            "subfolder schedule/"
        )
    for group, (folder, state) in sorted(
        furthest((each.broker_group, each.path) for each in delays).items()
    ):
        yield from stretches(folder, group, state)


def read(
    name: str, partition: ActionLog | FolderStretch, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yields a task's rows with these columns, in this order. Raises InvalidArgument, LogDamaged,
    NotConnected, MessagesExpired.
    """
    from pyspark_qmq.datasets import schedules, tables
    from pyspark_qmq.datasets.deliveries import deliveries, standings

    tables.check_columns(check_name(name), columns)
    if not isinstance(partition, ActionLog):
        return schedules.read(partition, columns)
    if name == "progress":
        return tables.progress_batches(
            partition.broker_group, standings(_entries(partition)), columns
        )
    return tables.delivery_batches(partition.broker_group, deliveries(_entries(partition)), columns)


def _entries(log: ActionLog) -> Iterator[tuple[Envelope, bytes]]:
    if log.address is None:
        from qmq.columns.files import log as file_log

        return file_log.committed_actions(Path(log.folder), log.committed)
    from qmq.columns.servers import log as server_log

    return server_log.committed_actions(log.address, log.broker_group)
