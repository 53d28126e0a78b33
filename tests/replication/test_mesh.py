"""The link to one peer reconnects after any failure."""

from __future__ import annotations

import asyncio
from typing import Any

from qmq_replication.links import (
    DIALS,
    LISTENS,
    Mesh,
    PeerHello,
    ProofStep,
    Secret,
    is_proof,
    prove,
)

from qmq.rpc.network import Factory, Network
from qmq.wire import frame as frames
from qmq.wire.frame import Frame, FrameKind
from qmq.wire.frame_stream import FrameStream

SECRET = b"secret"


class Listening:
    """The other end of a link: asks for the proof, gives its own with `secret`, and keeps what it
    receives then.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._hello: PeerHello | None = None
        self.proofs: list[bool] = []
        self.heard = asyncio.Queue[int]()
        self.stream = FrameStream(
            on_frames=self._on_frames,
            on_closed=lambda _: None,
            on_writable=lambda: None,
            on_violation=lambda _: None,
        )

    def _on_frames(self, received: list[Frame]) -> None:
        for each in received:
            if each.kind == FrameKind.REPLICA_HELLO:
                self._answer(each)
            else:
                self.heard.put_nowait(each.kind)

    def _answer(self, each: Frame) -> None:
        if self._hello is None:
            self._hello = PeerHello.unpack(each.payload)
            step = ProofStep(nonce="challenge")
        else:
            self.proofs.append(
                is_proof(
                    ProofStep.unpack(each.payload).proof, SECRET, DIALS, self._hello, "challenge"
                )
            )
            step = ProofStep(proof=prove(self._secret, LISTENS, self._hello, "challenge"))
        self.stream.put(frames.frame(FrameKind.REPLICA_HELLO, 0, step.pack()))
        self.stream.flush()


class Failing(Network):
    """Fails in each of these ways first, then connects."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def connect(self, address: str, factory: Factory) -> None:
        """See Network."""
        if self.failures:
            raise self.failures.pop(0)
        await super().connect(address, factory)


async def listen(path: Any, *secrets: bytes) -> tuple[list[Listening], asyncio.Server]:
    waiting, came = list(secrets), list[Listening]()

    def accept() -> FrameStream:
        came.append(Listening(waiting.pop(0) if waiting else SECRET))
        return came[-1].stream

    return came, await asyncio.get_running_loop().create_unix_server(accept, str(path))


async def say(mesh: Mesh, came: list[Listening], number: int) -> None:
    """Repeat until the message arrives."""
    async with asyncio.timeout(10):
        while len(came) < number or came[number - 1].heard.empty():
            mesh.send("b", [b"message"])
            await asyncio.sleep(0.01)


async def test_a_link_survives_any_failure_to_connect(tmp_path: Any) -> None:
    came, server = await listen(tmp_path / "b:1")
    network = Failing(UnicodeError("label too long"), RuntimeError("anything"))
    mesh = Mesh(PeerHello("g", "a"), Secret(SECRET), lambda _: None, network)
    mesh.update({"b": f"unix:{tmp_path}/b:1"})
    await say(mesh, came, 1)
    assert came[0].proofs == [True]
    await mesh.close()
    server.close()


async def test_a_peer_without_the_secret_gets_no_answer(tmp_path: Any) -> None:
    came, server = await listen(tmp_path / "b:1", b"guessed")
    mesh = Mesh(PeerHello("g", "a"), Secret(SECRET), lambda _: None)
    mesh.update({"b": f"unix:{tmp_path}/b:1"})
    await say(mesh, came, 2)
    assert came[0].heard.empty()
    await mesh.close()
    server.close()


async def test_a_replica_dials_no_peer_before_it_knows_the_secret(tmp_path: Any) -> None:
    came, server = await listen(tmp_path / "b:1")
    secret = Secret()
    mesh = Mesh(PeerHello("g", "a"), secret, lambda _: None)
    mesh.update({"b": f"unix:{tmp_path}/b:1"})
    await asyncio.sleep(0)
    assert not came
    secret.set(SECRET)
    await say(mesh, came, 1)
    await mesh.close()
    server.close()
