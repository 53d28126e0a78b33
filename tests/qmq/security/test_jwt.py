"""Tokens of an identity provider."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from access_support import CLAIMS, EC, ISSUER, NOW_MS, jwks, token
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from support import eventually, node_config, running

import qmq
from qmq.errors import InvalidArgument, NotAuthenticated
from qmq.security.access import AccessConfig, JwtConfig
from qmq.security.jwt_tokens import LEEWAY_S, JwtVerifier
from qmq.security.principal import Principal

OTHER = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
ED = ed25519.Ed25519PrivateKey.generate()


def verifier(keys: Callable[[], bytes] | None = None, **config: str) -> JwtVerifier:
    given = keys or (lambda: jwks(one=EC, two=RSA, three=ED))
    return JwtVerifier(
        JwtConfig(ISSUER, "https://id.example/jwks", **config), fetch=given, now_ms=lambda: NOW_MS
    )


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [(EC, "ES256", "one"), (RSA, "RS256", "two"), (ED, "EdDSA", "three")],
    ids=["EC", "RSA", "Ed25519"],
)
def test_a_token_names_its_principal(key: Any, algorithm: str, kid: str) -> None:
    assert verifier().verify(token(key, algorithm, kid)) == (
        Principal("app", "orders"),
        (CLAIMS["exp"] + LEEWAY_S) * 1000,
    )


async def test_a_token_accepted_in_the_leeway_is_served_and_not_cut_at_once(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks(one=EC))
    access = AccessConfig(frozenset({"app:orders"}), jwt=JwtConfig(ISSUER, str(file)))
    async with running(dataclasses.replace(node_config(tmp_path / "node"), access=access)) as node:
        async with qmq.connect(node.address, token=token(exp=int(time.time()) + 600)) as admin:
            await admin.access.set_mode("enforce")
        await eventually(lambda: node.view.access.mode.value == "enforce")
        async with qmq.connect(node.address, token=token(exp=int(time.time()) - 1)) as orders:
            await orders.send("orders", b"1")


def test_the_claim_that_names_the_principal_is_chosen() -> None:
    found = verifier(claim="email", email_domain="example.org").verify(
        token(email="alice@Example.org")
    )
    assert found[0] == Principal("app", "alice")
    assert verifier(claim="role").verify(token(role="op:alice"))[0] == Principal("op", "alice")


@pytest.mark.parametrize(
    "email",
    [
        "alice@evil.example",
        "alice@evil.example@example.org",
        "alice@example.org.evil.example",
        "@example.org",
    ],
)
def test_an_address_of_another_domain_is_another_principal(email: str) -> None:
    with pytest.raises(NotAuthenticated):
        verifier(claim="email", email_domain="example.org").verify(token(email=email))


def test_an_address_that_is_not_verified_names_no_principal() -> None:
    given = verifier(claim="email", email_domain="example.org")
    with pytest.raises(NotAuthenticated, match="not verified"):
        given.verify(token(email="alice@example.org", email_verified=False))
    assert given.verify(token(email="alice@example.org", email_verified=True))[0] == Principal(
        "app", "alice"
    )


def test_an_address_is_refused_until_its_domain_is_named() -> None:
    with pytest.raises(NotAuthenticated, match="QMQ_JWT_EMAIL_DOMAIN"):
        verifier().verify(token(sub="alice@example.org"))


@pytest.mark.parametrize("claim", ["preferred_username", "nickname", "name"])
def test_a_claim_that_people_choose_makes_no_operator(claim: str) -> None:
    with pytest.raises(NotAuthenticated, match="people choose"):
        verifier(claim=claim).verify(token(**{claim: "op:admin"}))
    assert verifier(claim=claim).verify(token(**{claim: "admin"}))[0] == Principal("app", "admin")


WRONG: dict[str, Callable[[], str]] = {
    "another audience": lambda: token(aud="other"),
    "another issuer": lambda: token(iss="https://evil.example"),
    "ended": lambda: token(exp=NOW_MS // 1000 - 60),
    "without an end": lambda: token(exp=None),
    "not valid yet": lambda: token(nbf=NOW_MS // 1000 + 60),
    "of nobody": lambda: token(sub=None),
    "of a server": lambda: token(sub="node:b0"),
    "of no name": lambda: token(sub="a b"),
    "signed by another key": lambda: token(OTHER),
    "of a key that is not known": lambda: token(kid="nobody"),
    "signed with a shared secret": lambda: jwt.encode(
        CLAIMS, "s" * 32, algorithm="HS256", headers={"kid": "one"}
    ),
    "not signed": lambda: jwt.encode(CLAIMS, None, algorithm="none", headers={"kid": "one"}),
    "changed": lambda: token()[:-4] + "AAAA",
    "no token": lambda: "a.b.c",
    "nothing": lambda: "",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_token_that_does_not_hold_is_refused(name: str) -> None:
    made = WRONG[name]()
    with pytest.raises(NotAuthenticated) as refused:
        verifier().verify(made)
    assert not made or made not in str(refused.value)


def test_a_public_key_is_not_accepted_as_a_shared_secret() -> None:
    pem = EC.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    body = token().split(".")[1].encode()
    forged = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=") + b"." + body
    mac = base64.urlsafe_b64encode(hmac.new(pem, forged, hashlib.sha256).digest()).rstrip(b"=")
    with pytest.raises(NotAuthenticated):
        verifier(lambda: pem).verify((forged + b"." + mac).decode())


async def test_keys_that_the_provider_changed_are_fetched_without_waiting() -> None:
    shown, may_answer = [jwks(old=EC)], threading.Event()
    may_answer.set()

    def fetch() -> bytes:
        may_answer.wait()
        return shown[0]

    found = verifier(fetch)
    assert found.verify(token(kid="old"))
    shown[0] = jwks(new=OTHER)
    may_answer.clear()

    def is_known() -> bool:
        try:
            return bool(found.verify(token(OTHER, kid="new")))
        except NotAuthenticated:
            return False

    assert not is_known(), "the first one is refused, and has the keys fetched"
    may_answer.set()
    await eventually(is_known)


def test_an_absent_provider_does_not_keep_a_server_from_starting() -> None:
    def away() -> bytes:
        raise OSError("no route")

    with pytest.raises(NotAuthenticated, match="try again"):
        verifier(away).verify(token())


@pytest.mark.parametrize("keys", ["http://id.example/jwks", "/nowhere/jwks.json"])
def test_keys_that_cannot_be_trusted_or_read_are_refused(keys: str) -> None:
    with pytest.raises(InvalidArgument):
        JwtVerifier(JwtConfig(ISSUER, keys))


async def test_a_node_takes_the_tokens_of_its_provider_for_itself_only(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks(one=EC))
    config = dataclasses.replace(
        node_config(tmp_path / "node"), access=AccessConfig(jwt=JwtConfig(ISSUER, str(file)))
    )
    made = token(exp=int(time.time()) + 600)
    async with running(config) as node, qmq.connect(node.address, token=made) as orders:
        await orders.send("orders", b"1")
        found = await orders.access.whoami()
        assert (found.principal, found.how) == ("app:orders", "jwt")
        for wrong in (token(OTHER), token(exp=int(time.time()) + 600, aud="billing-service")):
            async with qmq.connect(node.address, token=wrong) as stranger:
                with pytest.raises(NotAuthenticated):
                    await stranger.send("orders", b"1")
