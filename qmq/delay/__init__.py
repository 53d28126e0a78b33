"""The delay server: messages wait on disk by the hour in which they are due, and leave at their tick. docs/DELAY.md."""
