"""The runner's error. Its message says what failed and where to look."""


class ClusterError(Exception):
    """The cluster could not do what was requested. The message is for a person."""
