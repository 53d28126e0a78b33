"""What Spark's driver and executors show servers to say who they are: the token that the environment names (docs/ACCESS.md).

Set it for executors by `spark.executorEnv.QMQ_TOKEN_FILE`: the file's name shows in Spark's UI, the token does not.
"""

from __future__ import annotations

from qmq.network import require_private
from qmq.security.client_tokens import token_source
from qmq.security.tls import Tls


def token_for(address: str) -> str:
    """Empty for none. Raises InvalidArgument: it cannot be read, or would travel in plain text to another machine."""
    source = token_source(None)
    if source is None:
        return ""
    require_private(address, is_encrypted=Tls.from_environment() is not None)
    return source()
