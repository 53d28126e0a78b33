"""Messages into files, out of files, and from one subject to another (docs/TRANSFER.md).

transfer_record.py       one message on its way (a value)
json_lines.py            records as lines of JSON (pure)
parquet_rows.py          records as rows of a Parquet file; the only module that needs pyarrow
record_files.py          which of the two a file is; opening it, and finishing it
load_journal.py          the state file: what is loaded for sure
record_loader.py         sends records, each once over any number of attempts
message_source.py        a subject as a source of records
"""
