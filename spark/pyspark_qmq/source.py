"""The data source that Spark calls: `spark.read.format("qmq")`, `spark.readStream.format("qmq")`,
`df.write.format("qmq")`.

A loaded DataFrame is a snapshot: its offsets are fixed when its first action is planned, and every
action reads the same rows. The data source must not define `pushFilters`: in PySpark 4.3, filters
leak from one scan into another (docs/SPARK.md). Options narrow a read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

import pyspark_qmq.needed  # noqa: F401 - before all others
from pyspark_qmq.reader import LogReader
from pyspark_qmq.source_schema import check_schema, default_schema
from qmq.columns import options
from qmq.columns.reading import LogAddress, address_of
from qmq.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from pyspark_qmq.stream import LogStreamReader


class QmqDataSource(DataSource):
    """The data source `qmq`. Options: `qmq.columns.options`;
    columns: `pyspark_qmq.source_schema`.
    """

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "qmq"

    def schema(self) -> StructType:
        """All columns. Use `.schema(...)` to read only some of them. Raises InvalidArgument."""
        log = options.log_of(self.options)
        if log != "messages":
            from pyspark_qmq import datasets

            return datasets.schema_of(log)
        return default_schema(with_headers=options.with_headers(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`. Raises InvalidArgument."""
        log = options.log_of(self.options)
        if log != "messages":
            return DatasetReader(log, address_of(options.start_position(self.options)), schema)
        check_schema(schema)
        asked = options.parse(self.options, is_stream=False)
        if asked.lake is not None:
            try:
                from pyspark_qmq.lake_reader import LakeReader
            except ModuleNotFoundError as cause:
                raise InvalidArgument(
                    f"option qmq.lake needs another package ({cause.name} is missing): "
                    "pip install 'qmq[lake]'"
                ) from None
            return LakeReader(asked, asked.lake, schema)
        return LogReader(asked, schema)

    def streamReader(self, schema: StructType) -> LogStreamReader:  # noqa: N802 - the name is Spark's
        """For `spark.readStream`. Raises InvalidArgument."""
        from pyspark_qmq.stream import LogStreamReader

        if options.log_of(self.options) != "messages":
            raise InvalidArgument("only messages can be read as a stream: use spark.read")
        check_schema(schema)
        return LogStreamReader(options.parse(self.options, is_stream=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For `df.write`. Raises InvalidArgument, UnknownSubject, NotConnected."""
        from pyspark_qmq.sink.writer import arrow_writer, find_subject

        found = arrow_writer(_plain(self.options), schema, overwrite)
        find_subject(found.options)
        return found

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - the name is Spark's
        """For `df.writeStream`. Raises InvalidArgument."""
        from pyspark_qmq.sink.writer import arrow_stream_writer

        return arrow_stream_writer(_plain(self.options), schema, overwrite)


def _plain(given: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in given.items()}


class DatasetPartition(InputPartition):
    """A part of a dataset other than messages."""

    def __init__(self, part: Any) -> None:
        super().__init__(None)
        self.part = part


class DatasetReader(DataSourceReader):
    """A batch read of another dataset than messages (`pyspark_qmq.datasets`)."""

    def __init__(self, log: str, address: LogAddress, schema: StructType) -> None:
        from pyspark_qmq import datasets

        known = {field.name: field.dataType for field in datasets.schema_of(log).fields}
        for field in schema.fields:
            if known.get(field.name) != field.dataType:
                raise InvalidArgument(
                    f"{log} have no column {field.name!r} of type {field.dataType.simpleString()}: "
                    f"{', '.join(known)}"
                )
        self._log = log
        self._address = address
        self._columns = schema.fieldNames()

    def partitions(self) -> list[InputPartition]:
        """Raises NotConnected, LogDamaged, InvalidArgument."""
        from pyspark_qmq import datasets

        return [DatasetPartition(each) for each in datasets.partitions(self._log, self._address)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, DatasetPartition):
            from pyspark_qmq import datasets

            yield from datasets.read(self._log, partition.part, self._columns)
