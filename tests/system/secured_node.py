"""A single node in the secured form of the fault tests (`scripts/test --secure`): TLS with certificates of both sides, and enforced rules.

node = NodeProcess(folder / "node")
async with secured(node, folder):       # clients in this process and its children show the certificate of app:load
    node.start()
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from unittest.mock import patch

from support import NodeProcess

import qmq
from qmq.security.certificates import create_authority, issue
from qmq.security.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, Tls

LOAD: Final = "load"
ADMIN: Final = "admin"
_KINDS: Final = {"node": "node", LOAD: "app", ADMIN: "op"}


@asynccontextmanager
async def secured(node: NodeProcess, folder: Path, *, secure: bool = True) -> AsyncIterator[None]:
    """Close a node that does not run yet: it starts behind TLS and enforces rules, also after each later start. Nothing without `secure`.

    app:load may do everything with subjects and groups, and nothing with the cluster.
    """
    if not secure:
        yield
        return
    papers = _issued(folder / "papers")
    own, shown = papers["node"], papers[LOAD]
    node.options += ("--tls-ca", str(own.ca), "--tls-cert", str(own.cert), "--tls-key", str(own.key), "--admins", f"op:{ADMIN}")
    with patch.dict(os.environ, {CA_VARIABLE: str(shown.ca), CERT_VARIABLE: str(shown.cert), KEY_VARIABLE: str(shown.key)}):
        await asyncio.to_thread(node.start)
        try:
            await _enforce(node.address, papers[ADMIN])
        finally:
            await asyncio.to_thread(node.stop)
        yield


def _issued(folder: Path) -> dict[str, Tls]:
    create_authority(folder)
    made = {name: issue(folder, name, kind, ["127.0.0.1"]) for name, kind in _KINDS.items()}
    return {name: Tls(folder / "ca.pem", each.cert, each.key) for name, each in made.items()}


async def _enforce(address: str, papers: Tls) -> None:
    async with qmq.connect(address, tls=papers) as mq:
        for kind in ("subject", "group"):
            await mq.access.put_rule(f"app:{LOAD}", [], kind)
        await mq.access.set_mode("enforce")
