"""Exports messages to files, imports them, and copies them between subjects (docs/TRANSFER.md).

transfer_record.py       one message on its way (a value)
json_lines.py            records as lines of JSON (pure)
parquet_rows.py          records as rows of a Parquet file; the only module that needs pyarrow
record_files.py          chooses between the two; opens and finishes files
load_journal.py          the state file: what has been loaded
record_loader.py         sends records exactly once over any number of attempts
message_source.py        a subject as a source of records
"""
