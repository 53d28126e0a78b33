"""Exports messages to files, imports them, and copies them between subjects (docs/TRANSFER.md).

records.py       one message on its way (a value)
records.py            records as lines of JSON (pure)
records.py          records as rows of a Parquet file; the only module that needs pyarrow
records.py          chooses between the two; opens and finishes files
loading.py          the state file: what has been loaded
loading.py         sends records exactly once over any number of attempts
message_source.py        a subject as a source of records
"""
