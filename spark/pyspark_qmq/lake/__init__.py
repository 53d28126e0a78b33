"""Subjects as Apache Iceberg tables, written without Spark (jobs/archive.py uses Spark). docs/LAKE.md lists the promises.

catalog.py       a table's columns, and its name
positions.py         how far a table has each queue, and where a table keeps that
day_files.py         writes record batches into Parquet files, one for each day
catalog.py       the folder of data files, which is pickled for executors
table.py        one table: open, commit files with positions
task_runner.py       runs the tasks of a round, in this process or in Spark's executors
writer.py       rounds: each copies what is committed in the log and not yet in the table
maintenance.py compaction, expiry, leftovers of crashes
typed_columns.py     decoded bodies as Arrow columns
typed_rows.py        splits a batch of the log into typed rows and rejected ones
typed.py   a typed table's column follows the subject's schema
typed.py      typed tables with their tables of rejected messages
rows.py converts rows of older files to the table's current columns
typed.py     adds rejected messages to their table exactly once
snapshot.py     what the lake has of a subject, for a read of lake and log together
snapshot.py     which messages such a read takes from the lake, and which from the log
rows.py        which task reads which part of which file
rows.py         the rows of a task
migration.py copies archives of older versions into tables, once
"""
