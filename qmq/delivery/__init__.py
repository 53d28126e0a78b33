"""The delivery core: numbered batches on their way to broker groups and partitions."""
