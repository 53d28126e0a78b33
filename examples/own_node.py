"""A node for one run of an example, for those who have no cluster at hand."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path


async def own_node(stack: AsyncExitStack) -> str:
    """The address of a new node. When the stack is left, the node ends and its data is deleted."""
    from qmq.node.dev_node import Node, NodeConfig

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    node = Node(NodeConfig(Path(folder), meta_port=0, data_port=0, control_port=0))
    await node.start()
    stack.push_async_callback(node.stop)
    return node.address
