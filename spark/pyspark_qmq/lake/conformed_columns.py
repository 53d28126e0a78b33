"""Converts rows of older files to the table's current columns: fields that were added later are null, and types may be wider. Pure.

PyIceberg's own reader is not used where rows are written again, because it reads a null list of structs as an empty list (iceberg-python
issue 3833).
"""

from __future__ import annotations

import pyarrow as pa


def conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the schema's columns."""
    if rows.schema.equals(schema):
        return rows
    columns = []
    for each in schema:
        if each.name not in rows.column_names:
            columns.append(pa.nulls(rows.num_rows, each.type))
        else:
            chunks = [conformed_array(chunk, each.type) for chunk in rows.column(each.name).chunks]
            columns.append(pa.chunked_array(chunks, each.type))
    return pa.Table.from_arrays(columns, schema=schema)


def conformed_array(held: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same values as another type: wider, with more fields, or with other names for the items of lists and maps."""
    if held.type.equals(kind):
        return held
    if pa.types.is_struct(kind):
        parts = dict(zip((each.name for each in held.type), held.flatten(), strict=True))
        arrays = [conformed_array(parts[each.name], each.type) if each.name in parts else pa.nulls(len(held), each.type) for each in kind]
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=held.is_null())
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(held.offsets, conformed_array(held.values, kind.value_type), type=kind, mask=held.is_null())
    if pa.types.is_map(kind):
        items = conformed_array(held.items, kind.item_type)
        return pa.MapArray.from_arrays(held.offsets, held.keys.cast(kind.key_type), items, type=kind, mask=held.is_null())
    return held.cast(kind)
