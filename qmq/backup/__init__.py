"""Backups of a whole cluster, and clusters made from them: docs/BACKUP.md."""
