"""Sealed segments of the message log in an object store: docs/TIERING.md."""
