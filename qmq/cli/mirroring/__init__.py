"""Mirrors of subjects in another cluster: docs/BACKUP.md."""
