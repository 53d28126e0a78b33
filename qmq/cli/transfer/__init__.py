"""Exports messages to files, imports them, and copies them between subjects (docs/TRANSFER.md).

commands.py              `qmq export`, `qmq import`, `qmq copy`
records.py               records as lines of JSON, and files of them
parquet_rows.py          records as rows of a Parquet file; the only module that needs pyarrow
loading.py               the state file of what has been loaded; sends records exactly once over any
                         number of attempts
message_source.py        one message on its way (a value), and a subject as a source of records
"""
