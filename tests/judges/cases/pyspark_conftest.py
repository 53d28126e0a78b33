"""Streams of text files in PySpark's tests become streams of a subject of QMQ: the lines of the
folder's files are its messages. Files that a test adds are sent before `processAllAvailable`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyspark_qmq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from qmq.blocking import connect
from qmq.model import SubjectConfig

SERVER = os.environ["QMQ_JUDGED"]


class Folder:
    """A folder of text files, and the subject that has their lines."""

    def __init__(self, path: str) -> None:
        self.subject = f"text-{uuid4().hex}"
        self._path = Path(path)
        self._sent: set[Path] = set()

    def send(self) -> None:
        """Send the lines of files that were not sent yet. Spark leaves out folders inside, too."""
        files = {each for each in self._path.iterdir() if each.is_file()}
        with connect(SERVER) as mq:
            for each in sorted(files - self._sent):
                for line in each.read_text().splitlines():
                    mq.send(self.subject, line.encode())
        self._sent = files


FOLDERS: list[Folder] = []
FORMATS: dict[int, str] = {}
format_before, load_before = DataStreamReader.format, DataStreamReader.load
process_before = StreamingQuery.processAllAvailable


def format_kept(reader: DataStreamReader, source: str) -> DataStreamReader:
    FORMATS[id(reader)] = source
    return format_before(reader, source)


def load_of_subject(reader: DataStreamReader, path: str | None = None, **options: Any) -> DataFrame:
    if FORMATS.pop(id(reader), "") != "text" or path is None or options:
        return load_before(reader, path, **options)
    folder = Folder(path)
    with connect(SERVER) as mq:
        mq.metadata.create_subject(SubjectConfig(folder.subject))
    folder.send()
    FOLDERS.append(folder)
    spark = SparkSession.active()
    pyspark_qmq.register(spark)
    ours = format_before(spark.readStream, "qmq").options(
        **{"qmq.servers": SERVER, "subscribe": folder.subject, "startingOffsets": "earliest"}
    )
    return load_before(ours).selectExpr("CAST(body AS STRING) AS value")


def process_all(query: StreamingQuery) -> None:
    for each in FOLDERS:
        each.send()
    process_before(query)


DataStreamReader.format = format_kept
DataStreamReader.load = load_of_subject
StreamingQuery.processAllAvailable = process_all
