"""The text of an internal error is in the server's log, and not in the answer."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from qmq.rpc.channel import abort


class CallContext:
    """The context of a call that ends with an error."""

    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str] | None = None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: Any = ()) -> None:
        self.ended = code, details
        raise grpc.RpcError


async def test_a_client_does_not_read_what_failed_inside_and_the_log_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context: Any = CallContext()
    with pytest.raises(grpc.RpcError):
        await abort(context, OSError("cannot open /data/private/coordination.db"), "DeleteSubject")
    assert context.ended == (
        grpc.StatusCode.INTERNAL,
        "an internal error (OSError), which the server's log explains",
    )
    assert "/data/private/coordination.db" in caplog.text
