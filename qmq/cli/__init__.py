"""The `qmq` command: runs a node, sends, consumes, administers, looks into log files. One file a group of verbs."""
