"""The token with which Spark's driver and executors authenticate, taken from the environment (docs/ACCESS.md).

Set it for executors with `spark.executorEnv.QMQ_TOKEN_FILE`: Spark's UI shows the file's name, but not the token.
"""

from __future__ import annotations

from qmq.network import require_private
from qmq.security.client_tokens import token_source
from qmq.security.tls import Tls


def token_for(address: str) -> str:
    """The token, or an empty string. Raises InvalidArgument if it cannot be read, or would be sent in plain text to another machine."""
    source = token_source(None)
    if source is None:
        return ""
    require_private(address, is_encrypted=Tls.from_environment() is not None)
    return source()
