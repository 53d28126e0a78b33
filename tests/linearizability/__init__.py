"""Histories of concurrent clients, judged by porcupine (docs/JUDGES.md)."""
