"""A client of the cluster for each token that callers present, so that rules, quotas and the audit log see the caller.

A token takes a place here only after the cluster said whose it is, and before the request's body is read: made-up tokens take nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import qmq
from qmq.errors import NotAuthenticated, QuotaExceeded
from qmq.fair_share import payer
from qmq.integrations.http.group_receipts import GroupReceipts

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
                raise QuotaExceeded(f"this caller reads {GROUPS_MAX} groups, the limit: use another token, or wait until a group is idle")
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
    """The callers of this process. With `allows_anonymous`, a request without a token is sent without one."""

    def __init__(self, connect: Connect, *, allows_anonymous: bool) -> None:
        self._connect, self._allows_anonymous = connect, allows_anonymous
        self._callers: dict[bytes, HttpCaller] = {}
        """The callers by the token's digest; the one that asked last is at the end."""

    @asynccontextmanager
    async def caller(self, authorization: str | None, attempt: Callable[[], None] = lambda: None) -> AsyncIterator[HttpCaller]:
        """The caller of a request, by the header `authorization: Bearer TOKEN`. `attempt` is called before the cluster is asked whose token
        it is, and may raise an error instead. Raises NotAuthenticated, QuotaExceeded, NotConnected.
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
        if scheme.lower() != "bearer" or not token or not token.isascii() or not token.isprintable():
            raise NotAuthenticated("the header is `authorization: Bearer TOKEN`")
        return token

    async def _make_room(self, principal: str) -> None:
        """End an idle caller if all places are taken; without one, a caller of the principal with the most, if that has more than this."""
        if len(self._callers) < CLIENTS_MAX:
            return
        ending = next((digest for digest, each in self._callers.items() if each.is_idle), None)
        if ending is None:
            ending = payer((digest, each.principal, 1) for digest, each in self._callers.items())
            has = Counter(each.principal for each in self._callers.values())
            if has[self._callers[ending].principal] <= has[principal] + 1:
                raise QuotaExceeded(f"{CLIENTS_MAX} callers are connected, the limit: try again later")
        await self._callers.pop(ending).close()

    async def close(self) -> None:
        """Give back the messages of all callers, and disconnect."""
        while self._callers:
            await self._callers.popitem()[1].close()
