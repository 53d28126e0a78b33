"""What consumers of a shared backlog, or of lanes, get, and what their verdicts change."""
