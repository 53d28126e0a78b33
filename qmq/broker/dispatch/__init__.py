"""What consumers of a shared backlog get, and what their verdicts change."""
