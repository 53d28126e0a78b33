"""What lasts from one request to the next: a client of the cluster for each token, and messages
that requests received and did not settle yet. Each of these has a receipt, which is valid for a
limited time.

By a client for each token, rules, quotas and the audit log see the caller. A token takes a place
here only after the cluster said whose it is, and before the request's body is read: made-up tokens
take nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

import qmq
from qmq.client.consuming.ordered.consumer import AnyMessage, fail
from qmq.client.group_reading import GroupReading, reading_of
from qmq.errors import NotAuthenticated, QuotaExceeded
from qmq.integrations.http.requests import Receive, Settle
from qmq.model import check_name
from qmq.rpc.strangers import payer

HELD_MAX: Final = 10_000
IDLE_S: Final = 10.0
"""After this time without a request and without unsettled messages, other processes get the lanes
of an ordered subject.
"""
_LATE: Final = Settle((), "nack", timedelta(0), "no verdict came over HTTP in time")
_BACK: Final = Settle((), "release", None, "")


class GroupReceipts:
    """The messages of one group and subject that HTTP clients hold. The first request finds out
    whether the subject is ordered.

    A crash of this process, or its end, gives the messages back: the consumer's lease ends, or it
    leaves. Raises InvalidName.
    """

    def __init__(self, mq: qmq.Client, subject: str, group: str) -> None:
        self._mq = mq
        self._subject, self._group = check_name("subject", subject), check_name("group", group)
        self._reading: GroupReading | None = None
        self._finding = asyncio.Lock()
        self._held: dict[str, tuple[AnyMessage, asyncio.TimerHandle]] = {}
        self._asking = 0

    @property
    def held(self) -> int:
        """Messages without a verdict."""
        return len(self._held)

    async def receive(self, ask: Receive) -> dict[str, AnyMessage]:
        """Messages by receipt. Raises as `Consumer.pull`, QuotaExceeded."""
        if len(self._held) + ask.messages_max > HELD_MAX:
            raise QuotaExceeded(
                f"the group holds {len(self._held)} messages here without a verdict: settle "
                "some first"
            )
        reading = await self._found()
        self._asking += 1
        try:
            found = await reading.receive(ask.messages_max, max(ask.wait_s, 0.05))
        finally:
            self._asking -= 1
            if not self._asking:
                reading.idle()
        return {self._hold(each, ask.invisible_s): each for each in found}

    async def _found(self) -> GroupReading:
        async with self._finding:
            if self._reading is None:
                self._reading = await reading_of(
                    self._mq, self._subject, self._group, idle_s=IDLE_S
                )
            return self._reading

    def _hold(self, message: AnyMessage, invisible_s: float) -> str:
        receipt = secrets.token_urlsafe(16)
        timer = asyncio.get_running_loop().call_later(invisible_s, self._over, receipt)
        self._held[receipt] = (message, timer)
        return receipt

    def _over(self, receipt: str) -> None:
        message, _ = self._held.pop(receipt)
        self._settle(message, _LATE)

    def _settle(self, message: AnyMessage, ask: Settle) -> None:
        assert self._reading is not None, "a held message came from it"
        settle(message, ask)
        self._reading.settled()

    def settle(self, ask: Settle) -> tuple[Sequence[str], Sequence[str]]:
        """Returns (settled, over): the settled receipts,
        and those whose messages are not held any more.
        """
        settled = [each for each in dict.fromkeys(ask.receipts) if each in self._held]
        for each in settled:
            message, timer = self._held.pop(each)
            timer.cancel()
            self._settle(message, ask)
        return settled, [each for each in dict.fromkeys(ask.receipts) if each not in settled]

    async def close(self) -> None:
        """Give back what is held, and leave the group."""
        while self._held:
            _, (message, timer) = self._held.popitem()
            timer.cancel()
            self._settle(message, _BACK)
        if self._reading is not None:
            await self._reading.close()


def settle(message: AnyMessage, ask: Settle) -> None:
    """Pass a verdict on, the same for both kinds of subjects."""
    if ask.verdict == "ack":
        message.ack_later()
    elif ask.verdict == "nack":
        fail(message, ask.delay, ask.error)
    elif ask.verdict == "reject":
        message.reject(ask.error)
    else:
        message.release()


CLIENTS_MAX: Final = 200
GROUPS_MAX: Final = 1_000

Connect = Callable[[str], qmq.Client]
"""Makes a client with this token; "" for none."""


class HttpCaller:
    """The client of one token, with the groups that it reads."""

    def __init__(self, client: qmq.Client, principal: str) -> None:
        """`principal` is "" for all callers without a token."""
        self.client, self.principal = client, principal
        self.requests = 0
        """Under way."""
        self._groups: dict[tuple[str, str], GroupReceipts] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way, and no message is held."""
        return not self.requests and not any(each.held for each in self._groups.values())

    def group(self, subject: str, group: str) -> GroupReceipts:
        """The reader of a subject for a group. Raises InvalidName, QuotaExceeded."""
        found = self._groups.get((subject, group))
        if found is None:
            if len(self._groups) >= GROUPS_MAX:
                raise QuotaExceeded(
                    f"this caller reads {GROUPS_MAX} groups, the limit: use another token, "
                    "or wait until a group is idle"
                )
            found = self._groups[subject, group] = GroupReceipts(self.client, subject, group)
        return found

    async def leave(self, subject: str, group: str) -> None:
        """End a reader that failed: the next request makes another one."""
        found = self._groups.pop((subject, group), None)
        if found is not None:
            await found.close()

    async def close(self) -> None:
        """Give back what is held, and disconnect."""
        while self._groups:
            await self._groups.popitem()[1].close()
        await self.client.close()


class HttpClients:
    """The callers of this process. With `allows_anonymous`, a request without a token is sent
    without one.
    """

    def __init__(self, connect: Connect, *, allows_anonymous: bool) -> None:
        self._connect, self._allows_anonymous = connect, allows_anonymous
        self._callers: dict[bytes, HttpCaller] = {}
        """The callers by the token's digest; the one that asked last is at the end."""

    @asynccontextmanager
    async def caller(
        self, authorization: str | None, attempt: Callable[[], None] = lambda: None
    ) -> AsyncIterator[HttpCaller]:
        """The caller of a request, by the header `authorization: Bearer TOKEN`. `attempt` is called
        before the cluster is asked whose token it is, and may raise an error instead. Raises
        NotAuthenticated, QuotaExceeded, NotConnected.
        """
        token = self._token(authorization)
        digest = hashlib.sha256(token.encode()).digest()
        found = self._callers.get(digest) or await self._admitted(token, digest, attempt)
        self._callers[digest] = self._callers.pop(digest, found)
        found.requests += 1
        try:
            yield found
        except NotAuthenticated:
            if self._callers.get(digest) is found:
                del self._callers[digest]
            raise
        finally:
            found.requests -= 1
            if found is not self._callers.get(digest) and not found.requests:
                await found.close()

    async def _admitted(self, token: str, digest: bytes, attempt: Callable[[], None]) -> HttpCaller:
        """A new caller, or the one that another request with this token made meanwhile."""
        if token:
            attempt()
        client, principal = self._connect(token), ""
        try:
            if token:
                principal = (await client.access.whoami()).principal
            if digest not in self._callers:
                await self._make_room(principal)
        except BaseException:
            await client.close()
            raise
        if digest in self._callers:
            await client.close()
            return self._callers[digest]
        made = self._callers[digest] = HttpCaller(client, principal)
        return made

    def _token(self, authorization: str | None) -> str:
        if authorization is None:
            if not self._allows_anonymous:
                raise NotAuthenticated("a token is missing: send `authorization: Bearer TOKEN`")
            return ""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if (
            scheme.lower() != "bearer"
            or not token
            or not token.isascii()
            or not token.isprintable()
        ):
            raise NotAuthenticated("the header is `authorization: Bearer TOKEN`")
        return token

    async def _make_room(self, principal: str) -> None:
        """End an idle caller if all places are taken; without one, a caller of the principal with
        the most, if that has more than this.
        """
        if len(self._callers) < CLIENTS_MAX:
            return
        ending = next((digest for digest, each in self._callers.items() if each.is_idle), None)
        if ending is None:
            ending = payer((digest, each.principal, 1) for digest, each in self._callers.items())
            has = Counter(each.principal for each in self._callers.values())
            if has[self._callers[ending].principal] <= has[principal] + 1:
                raise QuotaExceeded(
                    f"{CLIENTS_MAX} callers are connected, the limit: try again later"
                )
        await self._callers.pop(ending).close()

    async def close(self) -> None:
        """Give back the messages of all callers, and disconnect."""
        while self._callers:
            await self._callers.popitem()[1].close()
