"""Faults: each module has a tuple FAULTS."""
