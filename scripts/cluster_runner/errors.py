"""The one error of the runner: it says what failed, and where to look."""


class ClusterError(Exception):
    """The cluster could not do what it was told; the message is for a person."""
