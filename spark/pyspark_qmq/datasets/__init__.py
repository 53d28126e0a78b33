"""Datasets beside the messages: option `qmq.log` of the data source. Their columns: tables.py.

    deliveries    what consumers were handed, and what became of it        from the action logs of brokers or of folders
    progress      how far groups were, second by second                    from the same
    schedules     delayed messages, and what became of them                from a delay group's folder

An action log is one story, so a task reads all of a broker group's; a schedule is cut into stretches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_qmq.committed_log import LogAddress
    from pyspark_qmq.datasets.schedule_folder import FolderStretch
    from pyspark_qmq.files.file_address import FileAddress
    from pyspark_qmq.servers.server_address import ServerAddress
    from qmq.batch import Envelope

NAMES: Final = ("deliveries", "progress", "schedules")


class ActionLog(NamedTuple):
    """One broker group's action log, for one task: in a folder, or at brokers."""

    broker_group: str
    folder: str = ""
    committed: str = ""
    address: ServerAddress | None = None


def schema_of(name: str) -> StructType:
    """A dataset's columns. Raises InvalidArgument if there is none of this name."""
    from pyspark_qmq.datasets import tables

    return tables.struct(check_name(name))


def check_name(name: str) -> str:
    """Raises InvalidArgument if no dataset has this name."""
    if name not in NAMES:
        raise InvalidArgument(f"there is no dataset {name!r}; there are {', '.join(NAMES)}")
    return name


def partitions(name: str, address: LogAddress) -> list[ActionLog | FolderStretch]:
    """The tasks of a read; they can be sent to executors. Raises InvalidArgument, NotConnected, LogDamaged."""
    files = _files(address)
    if check_name(name) == "schedules":
        if files is None:
            raise InvalidArgument("schedules are read from a delay group's folder: option qmq.path")
        return list(_schedule_tasks(files))
    if files is not None:
        return list(_folder_tasks(files))
    from pyspark_qmq.servers.server_actions import action_groups

    servers = _servers(address)
    return [ActionLog(group, address=servers) for group in action_groups(servers)]


def _servers(address: LogAddress) -> ServerAddress:
    from pyspark_qmq.servers.server_address import ServerAddress

    if not isinstance(address, ServerAddress):
        raise InvalidArgument(f"no action log is known at {address}: give qmq.servers or qmq.path")
    return address


def _files(address: LogAddress) -> FileAddress | None:
    """Where the folders are, if the address names any: it may have them beside the servers that know the routes."""
    from pyspark_qmq.files.file_address import FileAddress
    from pyspark_qmq.log_opening import RoutedAddress

    if isinstance(address, RoutedAddress):
        return address.files
    return address if isinstance(address, FileAddress) else None


def _folder_tasks(files: FileAddress) -> Iterator[ActionLog]:
    from pyspark_qmq.files.file_actions import action_folders

    found = [each for each in action_folders(list(files.paths), files.committed) if not each.is_delay]
    if not found:
        raise InvalidArgument(f"{', '.join(files.paths)} has no action log of a broker: it lies in a broker's folder, as action/")
    for each in found:
        yield ActionLog(each.broker_group, str(each.path), files.committed)


def _schedule_tasks(files: FileAddress) -> Iterator[FolderStretch]:
    from pyspark_qmq.datasets.schedule_folder import furthest, stretches
    from pyspark_qmq.files.log_folders import find_folders

    delays = [each for each in find_folders(files.paths, with_delay=True) if each.is_delay]
    if not delays:
        raise InvalidArgument(f"{', '.join(files.paths)} is no folder of a delay group: that has a folder schedule/")
    for group, (folder, state) in sorted(furthest((each.broker_group, each.path) for each in delays).items()):
        yield from stretches(folder, group, state)


def read(name: str, partition: ActionLog | FolderStretch, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """A task's rows, with these columns in this order. Raises InvalidArgument, LogDamaged, NotConnected, MessagesExpired."""
    from pyspark_qmq.datasets import schedule_folder, tables
    from pyspark_qmq.datasets.deliveries import deliveries
    from pyspark_qmq.datasets.group_progress import standings

    tables.check_columns(check_name(name), columns)
    if not isinstance(partition, ActionLog):
        return schedule_folder.read(partition, columns)
    if name == "progress":
        return tables.progress_batches(partition.broker_group, standings(_entries(partition)), columns)
    return tables.delivery_batches(partition.broker_group, deliveries(_entries(partition)), columns)


def _entries(log: ActionLog) -> Iterator[tuple[Envelope, bytes]]:
    if log.address is None:
        from pyspark_qmq.files import file_actions as in_files

        return in_files.committed_actions(Path(log.folder), log.committed)
    from pyspark_qmq.servers import server_actions as at_servers

    return at_servers.committed_actions(log.address, log.broker_group)
