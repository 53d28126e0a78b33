"""Subjects as Apache Iceberg tables, written without Spark: docs/LAKE.md says what is promised.

lake_schema.py       a table's columns, and its name
positions.py         how far a table has each queue, and where a table keeps that
day_files.py         record batches into Parquet files, one for each day
lake_table.py        one table: open, commit files with positions
lake_writer.py       rounds: what is committed in the log and not in the table goes into it
table_maintenance.py compaction, expiry, leftovers of crashes
"""
