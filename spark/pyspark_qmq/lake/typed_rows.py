"""Splits a record batch of the log into rows of a typed table and rows whose bodies do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_qmq.lake.catalog import REJECTED_SCHEMA, typed_schema
from pyspark_qmq.lake.typed_columns import column
from qmq.schemas.body_decoder import Decode, decoder_of, reason_of
from qmq.schemas.declared_schema import DeclaredSchema
from qmq.schemas.field_types import Struct

_REASON_CHARS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class BodyTypes:
    """How bodies are decoded: a value that can be pickled. `held`: the table's column."""

    versions: tuple[DeclaredSchema, ...]
    held: Struct


class TypedRows:
    def __init__(self, types: BodyTypes) -> None:
        self._types = types
        self._declared = types.versions[-1].struct()
        self._version = types.versions[-1].version
        self._decode = decoder_of(types.versions)
        self._schema = typed_schema(types.held)

    def split(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """The rows with their values, and the rest with the reasons."""
        bodies = batch.column("body").to_pylist()
        values, reasons = decoded(self._decode, bodies)
        rejected = None
        if reasons:
            is_bad = pa.array([place in reasons for place in range(len(bodies))], pa.bool_())
            rejected = self._rejected(batch.filter(is_bad), reasons.values())
            batch = batch.filter(pc.invert(is_bad))
        if not values:
            return None, rejected
        return pa.RecordBatch.from_arrays([*batch.columns, column(values, self._declared, self._types.held)], schema=self._schema), rejected

    def _rejected(self, rows: pa.RecordBatch, reasons: Iterable[str]) -> pa.RecordBatch:
        told = pa.array(list(reasons), pa.string())
        versions = pa.array([self._version] * rows.num_rows, pa.int32())
        return pa.RecordBatch.from_arrays([*rows.columns, told, versions], schema=REJECTED_SCHEMA)


def decoded(decode: Decode, bodies: Sequence[bytes]) -> tuple[list[Any], dict[int, str]]:
    """The values of the bodies that fit, and the reasons by index for those that do not."""
    try:
        return list(map(decode, bodies)), {}
    except Exception:  # a body does not fit: decode one by one to find out which
        values: list[Any] = []
        reasons: dict[int, str] = {}
    for place, body in enumerate(bodies):
        try:
            values.append(decode(body))
        except Exception as failure:
            reasons[place] = reason_of(failure)[:_REASON_CHARS_MAX]
    return values, reasons
