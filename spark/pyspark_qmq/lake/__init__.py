"""Subjects as Apache Iceberg tables, written without Spark (jobs/archive.py: with it): docs/LAKE.md says what is promised.

lake_schema.py       a table's columns, and its name
positions.py         how far a table has each queue, and where a table keeps that
day_files.py         record batches into Parquet files, one for each day
data_folder.py       where data files go; executors get it pickled
lake_table.py        one table: open, commit files with positions
task_runner.py       who reads a round's tasks and writes its files: this process, or Spark's executors
lake_writer.py       rounds: what is committed in the log and not in the table goes into it
table_maintenance.py compaction, expiry, leftovers of crashes
typed_columns.py     decoded bodies as Arrow columns
typed_rows.py        a batch of the log into typed rows and rejected ones
typed_evolution.py   a typed table's column follows the subject's schema
typed_tables.py      typed tables with their tables of rejected messages
conformed_columns.py rows of older files in the table's present columns
rejected_rows.py     rejected messages reach their table once
lake_snapshot.py     what the lake has of a subject, for a read of lake and log together
split_reading.py     which messages such a read takes from where
lake_tasks.py        which task reads which part of which file
lake_rows.py         the rows of a task
archive_migration.py archives of older versions into tables, once
"""
