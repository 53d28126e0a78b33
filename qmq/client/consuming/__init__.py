"""Consumers of a shared backlog: attachment, messages, verdicts."""
