"""The client's calls to metaservers for access: rules, roles, tokens, quotas (docs/ACCESS.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qmq.model import texts
from qmq.proto.v1 import access_pb2 as access
from qmq.wire.number_fields import request_of

if TYPE_CHECKING:
    from qmq.client.metadata.service import MetadataClient


class AccessClient:
    """Every method except `whoami` needs the permission `administer` and raises AccessDenied
    without it: the permission on the cluster, or on a namespace for names with its prefix. Every
    call may be repeated after a lost answer, except `create_token`, which then makes another token.
    """

    def __init__(self, metaservers: MetadataClient) -> None:
        self._metaservers = metaservers

    async def whoami(self) -> access.WhoAmIResponse:
        """The principal of this client, as the cluster authenticated it."""
        found: access.WhoAmIResponse = await self._metaservers.call(
            "WhoAmI", access.WhoAmIRequest()
        )
        return found

    async def rules(self, namespace: str = "") -> access.ListRulesResponse:
        """All rules and roles, or those of a namespace, and the mode."""
        found: access.ListRulesResponse = await self._metaservers.call(
            "ListRules", access.ListRulesRequest(namespace=namespace)
        )
        return found

    async def put_rule(
        self,
        principal: str,
        operations: Iterable[str],
        kind: str,
        pattern: str = "*",
        *,
        is_deny: bool = False,
        rule_id: str = "",
    ) -> access.AccessRule:
        """Add a rule that allows or denies `operations`, or all operations if it is empty. Adding
        the same rule again changes nothing.

        Raises InvalidArgument, InvalidName.
        """
        rule = access.AccessRule(
            id=rule_id,
            is_deny=is_deny,
            principal=principal,
            operations=sorted({*texts("operations", operations)}),
            kind=kind,
            pattern=pattern,
        )
        found: access.AccessRule = await self._metaservers.call(
            "PutRule", access.PutRuleRequest(rule=rule)
        )
        return found

    async def delete_rule(self, rule_id: str) -> None:
        """Delete a rule. Raises InvalidArgument if there is no such rule, or if the caller would
        lose `administer`.
        """
        await self._metaservers.call("DeleteRule", access.DeleteRuleRequest(id=rule_id))

    async def set_mode(self, mode: str) -> str:
        """Set the mode, "off", "watch" or "enforce", and return the previous one.
        Raises InvalidArgument.
        """
        found: access.SetAccessModeResponse = await self._metaservers.call(
            "SetAccessMode", access.SetAccessModeRequest(mode=mode)
        )
        return found.mode_before

    async def test(
        self, principal: str, operation: str, kind: str, name: str = ""
    ) -> access.TestAccessResponse:
        """The decision of the rules about a principal, in any mode."""
        request = access.TestAccessRequest(
            principal=principal, operation=operation, kind=kind, name=name
        )
        found: access.TestAccessResponse = await self._metaservers.call("TestAccess", request)
        return found

    async def change_role(
        self, name: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> access.Role:
        """Add principals to a role, and remove others. A role without members does not exist."""
        request = access.ChangeRoleRequest(
            name=name, add=sorted(texts("add", add)), remove=sorted(texts("remove", remove))
        )
        found: access.Role = await self._metaservers.call("ChangeRole", request)
        return found

    async def create_token(self, principal: str, *, ends_ms: int = 0) -> access.CreateTokenResponse:
        """Make a token. Its text is in this answer only. `ends_ms` is milliseconds since 1970, 0
        for a token that does not expire.
        """
        request = request_of(access.CreateTokenRequest, principal=principal, ends_ms=ends_ms)
        found: access.CreateTokenResponse = await self._metaservers.call("CreateToken", request)
        return found

    async def tokens(self, namespace: str = "") -> list[access.TokenInfo]:
        """All tokens, or those of a namespace's applications."""
        found: access.ListTokensResponse = await self._metaservers.call(
            "ListTokens", access.ListTokensRequest(namespace=namespace)
        )
        return list(found.tokens)

    async def delete_tokens(self, *, token_id: str = "", principal: str = "") -> list[str]:
        """Revoke one token, or all tokens of a principal, and return their ids. Connections that
        showed them are closed. Raises InvalidArgument.
        """
        request = access.DeleteTokensRequest(id=token_id, principal=principal)
        found: access.DeleteTokensResponse = await self._metaservers.call("DeleteTokens", request)
        return list(found.ids)

    async def put_quota(
        self, principal: str, limits: Mapping[str, int], *, quota_id: str = ""
    ) -> access.AccessQuota:
        """Set the limits of a principal, of a role or of a pattern.
        Raises InvalidArgument, InvalidName.
        """
        quota = request_of(access.AccessQuota, id=quota_id, principal=principal, limits=limits)
        found: access.AccessQuota = await self._metaservers.call(
            "PutQuota", access.PutQuotaRequest(quota=quota)
        )
        return found

    async def delete_quota(self, quota_id: str) -> None:
        """Delete a quota. Raises InvalidArgument."""
        await self._metaservers.call("DeleteQuota", access.DeleteQuotaRequest(id=quota_id))

    async def quotas(self, namespace: str = "") -> list[access.AccessQuota]:
        """All quotas, or those of a namespace."""
        found: access.ListQuotasResponse = await self._metaservers.call(
            "ListQuotas", access.ListQuotasRequest(namespace=namespace)
        )
        return list(found.quotas)
