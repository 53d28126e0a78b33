"""The `qmq` command runs servers, sends and consumes messages, administers a cluster, reads log
files. Each group of verbs has a file.
"""
