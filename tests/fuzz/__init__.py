"""Fuzzing: what reads bytes or text from elsewhere answers any input with a value or a typed error
(docs/JUDGES.md).
"""
