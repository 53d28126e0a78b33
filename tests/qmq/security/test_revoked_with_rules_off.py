"""With the rules off servers check no token after they know its principal: docs/SECURITY.md says
so.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from access_support import guarded
from support import eventually

import qmq
from qmq.errors import NotAuthenticated
from qmq.integrations.http.site import HttpConfig, HttpServer


async def test_a_revoked_token_is_refused_by_http_only_under_rules(tmp_path: Path) -> None:
    async with guarded(tmp_path, "off") as cluster:
        token = await cluster.token("app:orders")
        server = HttpServer(
            HttpConfig("127.0.0.1", 0),
            lambda token: qmq.connect(cluster.node.address, token=lambda: token, state_dir=False),
        )
        await server.start()
        try:
            async with httpx.AsyncClient(
                base_url=server.url, headers={"authorization": f"Bearer {token}"}
            ) as http:
                assert (await http.post("/subjects/orders", content=b"1")).status_code == 200
                await cluster.admin.access.delete_tokens(principal="app:orders")
                await eventually(lambda: token.split("_")[1] not in cluster.node.view.access.tokens)
                assert (await http.post("/subjects/orders", content=b"2")).status_code == 200
                async with qmq.connect(cluster.node.address, token=token) as late:
                    with pytest.raises(NotAuthenticated):
                        await late.access.whoami()
                await cluster.admin.access.set_mode("enforce")
                await eventually(lambda: cluster.node.view.access.mode.value == "enforce")
                assert (await http.post("/subjects/orders", content=b"3")).status_code == 401
        finally:
            await server.stop()
