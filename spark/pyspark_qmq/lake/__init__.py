"""Subjects as Apache Iceberg tables, written without Spark (jobs/archive.py uses Spark).
docs/LAKE.md lists the promises.

catalog.py         catalogs; a table's name and columns, and the folder of its data files
table.py           one table: open, how far it has each queue, commit files with positions
writer.py          rounds: each copies what is committed in the log and not yet in the table
task_runner.py     runs the tasks of a round, in this process or in Spark's executors; splits typed
                   rows from rejected ones
day_files.py       writes record batches into Parquet files, one for each day
typed.py           typed tables, whose columns follow the subjects' schemas, with their tables of
                   rejected messages
typed_columns.py   decoded bodies as Arrow columns
snapshot.py        what the lake has of a subject, and what a read of lake and log together takes
                   from each
rows.py            which task reads which part of which file, and the rows of a task
maintenance.py     compaction, expiry, leftovers of crashes
migration.py       copies archives of older versions into tables, once
lake_damage.py     names the file in errors about damaged files
"""
