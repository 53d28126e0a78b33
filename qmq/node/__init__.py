"""A node in one process: metaserver, broker and coordination store, on one data folder. What `qmq dev` runs."""
