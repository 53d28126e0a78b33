"""Subjects as Apache Iceberg tables, written without Spark (jobs/archive.py uses Spark). docs/LAKE.md lists the promises.

lake_schema.py       a table's columns, and its name
positions.py         how far a table has each queue, and where a table keeps that
day_files.py         writes record batches into Parquet files, one for each day
data_folder.py       the folder of data files, which is pickled for executors
lake_table.py        one table: open, commit files with positions
task_runner.py       runs the tasks of a round, in this process or in Spark's executors
lake_writer.py       rounds: each copies what is committed in the log and not yet in the table
table_maintenance.py compaction, expiry, leftovers of crashes
typed_columns.py     decoded bodies as Arrow columns
typed_rows.py        splits a batch of the log into typed rows and rejected ones
typed_evolution.py   a typed table's column follows the subject's schema
typed_tables.py      typed tables with their tables of rejected messages
conformed_columns.py converts rows of older files to the table's current columns
rejected_rows.py     adds rejected messages to their table exactly once
lake_snapshot.py     what the lake has of a subject, for a read of lake and log together
split_reading.py     which messages such a read takes from the lake, and which from the log
lake_tasks.py        which task reads which part of which file
lake_rows.py         the rows of a task
archive_migration.py copies archives of older versions into tables, once
"""
