"""Outlets: the ways of due messages to the real-time brokers, one for each subject. docs/DELAY.md."""
