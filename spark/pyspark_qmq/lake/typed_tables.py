"""Typed tables: their columns follow the subjects' schemas, and each has a second table for its rejected messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyiceberg.catalog import Catalog

from pyspark_qmq.lake import rejected_rows
from pyspark_qmq.lake.lake_table import LakeTable, open_table
from pyspark_qmq.lake.task_runner import TaskOutput
from pyspark_qmq.lake.typed_evolution import evolve
from pyspark_qmq.lake.typed_rows import BodyTypes
from qmq.schemas.declared_schema import DeclaredSchema


class TypedTables:
    def __init__(self, catalog: Catalog, namespace: str, schemas: Callable[[str], Sequence[DeclaredSchema]]) -> None:
        self._catalog = catalog
        self._namespace = namespace
        self._schemas = schemas
        self._rejected: dict[str, LakeTable] = {}
        self._types: dict[str, BodyTypes] = {}

    def output(self, table: LakeTable) -> TaskOutput:
        """Where a round writes, by the newest schema. Raises InvalidArgument if there is none, IncompatibleSchema, NotConnected."""
        versions = tuple(self._schemas(table.subject))
        known = self._types.get(table.subject)
        if known is None or known.versions != versions:
            self._types[table.subject] = known = evolve(table, versions)
        return TaskOutput(table.folder, known, self._of(table.subject).folder)

    def forget(self) -> None:
        """Open the tables again before they are used."""
        self._rejected.clear()
        self._types.clear()

    def complete(self, table: LakeTable) -> None:
        """Add the rejected messages of the last round to their table, as `rejected_rows.complete`."""
        rejected_rows.complete(table, self._of(table.subject))

    def _of(self, subject: str) -> LakeTable:
        found = self._rejected.get(subject)
        if found is None:
            found = self._rejected[subject] = open_table(self._catalog, self._namespace, subject, is_rejected=True)
        return found
