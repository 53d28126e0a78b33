"""The console logs people in at an identity provider by itself: code flow, PKCE, real signatures;
the cluster checks the tokens again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from support import eventually, needs, node_config, running
from support.console import (
    CLIENT_ID,
    CLIENT_SECRET,
    COOKIE,
    LOGIN_COOKIE,
    IdentityProvider,
    PlainBrowser,
    SteppedClock,
    identity_provider,
)

import qmq
from qmq.console.app import ConsoleServer, ConsoleSite
from qmq.console.config import ConsoleConfig, LoginMode, OidcConfig, check
from qmq.console.oidc import LOGIN_S, OidcFlow, ProviderAddresses, challenge
from qmq.console.sessions import IDLE_S
from qmq.errors import InvalidArgument, NotAuthenticated, NotConnected
from qmq.security.access import AccessConfig, JwtConfig


@dataclass
class Stage:
    """A cluster that accepts the provider's tokens, and a console for the cluster."""

    provider: IdentityProvider
    site: ConsoleSite
    clock: SteppedClock

    def browser(self) -> PlainBrowser:
        return PlainBrowser(self.site)

    async def at_provider(self, browser: PlainBrowser, target: str = "/") -> dict[str, str]:
        """The request to the provider when a person begins to log in."""
        answer = await browser.ask("GET", f"/login/begin?next={target}")
        assert answer.status == 303, answer.text
        assert answer.headers["location"].startswith(f"{self.provider.issuer}/authorize?")
        return {
            name: values[0]
            for name, values in parse_qs(urlsplit(answer.headers["location"]).query).items()
        }

    async def log_in(self, user: str, target: str = "/") -> PlainBrowser:
        browser = self.browser()
        back = self.provider.logged_in(await self.at_provider(browser, target), user)
        answer = await browser.ask("GET", path_of(back), {"sec-fetch-site": "cross-site"})
        assert answer.status == 200, answer.text
        return browser


def path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"


def oidc_config(provider: IdentityProvider, **given: str) -> OidcConfig:
    return OidcConfig(
        provider.issuer, CLIENT_ID, "http://127.0.0.1:20888/login/callback", CLIENT_SECRET, **given
    )


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    with identity_provider() as provider:
        keys = tmp_path / "jwks.json"
        keys.write_bytes(provider.jwks())
        access = AccessConfig(frozenset({"op:alice"}), jwt=JwtConfig(provider.issuer, str(keys)))
        async with running(
            dataclasses.replace(node_config(tmp_path / "node"), access=access)
        ) as node:
            async with qmq.connect(
                node.address, token=provider.signed(sub="op:alice", aud="qmq")
            ) as admin:
                await admin.send("orders", b"seen")
                await admin.send("secrets", b"hidden")
                await admin.access.put_rule("op:bob", ("browse", "describe"), "subject", "orders")
                await admin.access.set_mode("enforce")
            await eventually(lambda: node.view.access.mode.value == "enforce")
            clock = SteppedClock()
            config = ConsoleConfig(node.address, login=LoginMode.OIDC, oidc=oidc_config(provider))
            site = ConsoleSite(
                config,
                lambda token: qmq.connect(
                    node.address, token=token, create_subjects=False, state_dir=False
                ),
                monotonic_s=clock,
            )
            yield Stage(provider, site, clock)
            await site.close()


async def test_who_logs_in_at_the_provider_acts_with_the_rights_that_the_cluster_gives(
    stage: Stage,
) -> None:
    alice, bob = [await stage.log_in(name) for name in ("op:alice", "op:bob")]
    assert "op:alice" in (await alice.get("/")).text
    assert "hidden" in (await alice.get("/subjects/secrets")).text
    assert "seen" in (await bob.get("/subjects/orders")).text
    assert "hidden" not in (await bob.get("/subjects/secrets")).text


async def test_the_browser_continues_where_it_wanted_to_by_a_page_of_the_console(
    stage: Stage,
) -> None:
    """The provider does not redirect straight to that page: the session's cookie is Strict, and a
    browser would not send it then.
    """
    browser = stage.browser()
    page = await browser.get("/subjects/orders")
    assert 'href="/login/begin?next=%2Fsubjects%2Forders"' in page.text
    back = stage.provider.logged_in(await stage.at_provider(browser, "/subjects/orders"), "op:bob")
    answer = await browser.ask("GET", path_of(back))
    assert 'content="0; url=/subjects/orders"' in answer.text
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert COOKIE in browser.cookies


@needs.chromium
@pytest.mark.xdist_group("chromium")
async def test_a_real_browser_logs_in_at_the_provider_and_comes_back_where_it_wanted_to_go(
    stage: Stage,
) -> None:
    playwright = pytest.importorskip("playwright.async_api", reason="scripts/setup installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    oidc = dataclasses.replace(
        oidc_config(stage.provider), redirect_url=f"http://localhost:{port}/login/callback"
    )
    config = dataclasses.replace(stage.site.config, port=port, oidc=oidc)
    console = ConsoleServer(config)
    await console.start()
    async with playwright.async_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=arguments
        )
        page = await browser.new_page(locale="en")
        await page.goto(f"http://localhost:{port}/subjects/orders")
        await page.get_by_role("link", name="Log in").click()
        await page.get_by_label("User").fill("op:bob")
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url(f"http://localhost:{port}/subjects/orders")
        await page.locator(".principal", has_text="op:bob").wait_for()
        assert "code=" not in page.url
        await browser.close()
    await console.stop()


async def test_the_provider_is_shown_a_challenge_and_never_the_verifier(stage: Stage) -> None:
    browser = stage.browser()
    asked = await stage.at_provider(browser)
    assert asked["code_challenge_method"] == "S256"
    assert asked["response_type"] == "code"
    assert asked["client_id"] == CLIENT_ID
    assert asked["scope"] == "openid"
    assert not {"code_verifier", "client_secret"} & asked.keys()
    assert stage.site.oidc is not None
    login = stage.site.oidc.flow.came_back(asked["state"], browser.cookies[LOGIN_COOKIE])
    assert asked["code_challenge"] == challenge(login.verifier) != login.verifier


async def test_a_code_counts_once_and_only_for_the_browser_that_began(stage: Stage) -> None:
    browser, thief = stage.browser(), stage.browser()
    back = path_of(stage.provider.logged_in(await stage.at_provider(browser), "op:alice"))
    await stage.at_provider(thief)
    for cookie in ({}, dict(thief.cookies)):
        thief.cookies = cookie
        assert (await thief.ask("GET", back)).status == 403
        assert COOKIE not in thief.cookies
    assert (await browser.ask("GET", back)).status == 200
    assert (await browser.ask("GET", back)).status == 403
    assert stage.provider.grants == ["authorization_code"]


async def test_a_login_that_takes_too_long_is_begun_again(stage: Stage) -> None:
    browser = stage.browser()
    back = path_of(stage.provider.logged_in(await stage.at_provider(browser), "op:alice"))
    stage.clock.now_s += LOGIN_S + 1
    assert (await browser.ask("GET", back)).status == 403
    assert stage.provider.grants == []


async def test_a_code_that_was_stolen_is_worth_nothing_without_the_verifier(stage: Stage) -> None:
    stolen, asked = stage.browser(), await stage.at_provider(stage.browser())
    code = parse_qs(urlsplit(stage.provider.logged_in(asked, "op:alice")).query)["code"][0]
    own = await stage.at_provider(stolen)
    answer = await stolen.ask("GET", f"/login/callback?code={code}&state={own['state']}")
    assert answer.status == 403
    assert "the code does not hold" in answer.text


FORGED = {
    "another issuer": {"iss": "https://evil.example"},
    "for another client": {"aud": "other"},
    "made for another client": {"azp": "other"},
    "of another login": {"nonce": "another"},
    "without a nonce": {"nonce": None},
    "ended": {"exp": 1},
}


@pytest.mark.parametrize("name", FORGED)
async def test_an_invalid_id_token_opens_no_session(name: str, stage: Stage) -> None:
    stage.provider.changed = FORGED[name]
    browser = stage.browser()
    back = stage.provider.logged_in(await stage.at_provider(browser), "op:alice")
    assert (await browser.ask("GET", path_of(back))).status == 403
    assert COOKIE not in browser.cookies


async def test_an_id_token_signed_by_another_key_opens_no_session(stage: Stage) -> None:
    stage.provider.keys["forged"] = ec.generate_private_key(ec.SECP256R1())
    stage.provider.signs_with = "forged"
    browser = stage.browser()
    back = stage.provider.logged_in(await stage.at_provider(browser), "op:alice")
    assert (await browser.ask("GET", path_of(back))).status == 403


async def test_who_the_cluster_does_not_know_is_not_let_in(stage: Stage) -> None:
    stage.provider.keys["two"] = ec.generate_private_key(ec.SECP256R1())
    stage.provider.signs_with = "two"  # the cluster's file has key one only
    browser = stage.browser()
    back = stage.provider.logged_in(await stage.at_provider(browser), "op:alice")
    answer = await browser.ask("GET", path_of(back))
    assert answer.status == 403
    assert COOKIE not in browser.cookies


async def test_a_person_who_refuses_at_the_provider_sees_that_on_the_page(stage: Stage) -> None:
    browser = stage.browser()
    asked = await stage.at_provider(browser)
    answer = await browser.ask("GET", f"/login/callback?error=access_denied&state={asked['state']}")
    assert answer.status == 403
    assert "access_denied" in answer.text


async def test_a_token_is_renewed_before_it_ends_and_the_person_does_not_notice(
    stage: Stage,
) -> None:
    browser = await stage.log_in("op:alice")
    (session,) = [stage.site.sessions.find(browser.cookies[COOKIE])]
    assert session is not None
    assert session.shown is not None
    before = session.shown()
    stage.clock.now_s += stage.provider.lasts_s - 30
    answers = await asyncio.gather(*[browser.ask("GET", "/subjects/secrets") for _ in range(3)])
    assert all("hidden" in each.text for each in answers)
    assert session.shown() != before
    assert stage.provider.grants == ["authorization_code", "refresh_token"]


async def test_who_the_provider_does_not_renew_logs_in_again(stage: Stage) -> None:
    browser = await stage.log_in("op:alice")
    stage.provider.refused.add("refresh_token")
    stage.clock.now_s += stage.provider.lasts_s
    assert (await browser.ask("GET", "/")).headers["location"] == "/login"
    assert not stage.site.sessions.callers()


async def test_no_token_is_in_a_page_a_cookie_or_an_error(stage: Stage) -> None:
    browser = await stage.log_in("op:alice")
    session = stage.site.sessions.find(browser.cookies[COOKIE])
    assert session is not None
    assert session.shown is not None
    shown = session.shown()
    assert shown not in (await browser.get("/")).text + str(browser.cookies) + repr(
        session.shown
    ) + repr(stage.site.config)
    assert CLIENT_SECRET not in repr(stage.site.config)


async def test_logins_end_as_other_sessions_do(stage: Stage) -> None:
    browser = await stage.log_in("op:alice")
    stage.clock.now_s += IDLE_S + 1
    assert (await browser.ask("GET", "/")).status == 303
    assert (
        LOGIN_COOKIE not in browser.cookies
        or browser.cookies[LOGIN_COOKIE] != browser.cookies[COOKIE]
    )


def test_a_missing_or_wrong_identity_provider_is_reported() -> None:
    with identity_provider() as provider:
        config = oidc_config(provider)
    with pytest.raises(NotConnected, match="does not answer"):
        OidcFlow(config).addresses()
    with pytest.raises(InvalidArgument, match="names itself"):
        OidcFlow(config, ask=lambda *_: b'{"issuer": "https://other.example"}').addresses()
    with pytest.raises(InvalidArgument, match="authorization_endpoint"):
        told = f'{{"issuer": "{config.issuer}", "authorization_endpoint": "http://evil.example/a"}}'.encode()
        OidcFlow(config, ask=lambda *_: told).addresses()


@pytest.mark.parametrize(
    "wrong",
    [
        {"issuer": "http://id.example"},
        {"issuer": "id.example"},
        {"redirect_url": "http://console.example/login/callback"},
        {"token": "refresh_token"},
        {"scope": "profile"},
    ],
)
def test_a_setting_that_would_show_secrets_is_refused(wrong: dict[str, str]) -> None:
    given = {
        "issuer": "https://id.example",
        "client_id": "c",
        "redirect_url": "https://console.example/login/callback",
        **wrong,
    }
    with pytest.raises(InvalidArgument):
        check(ConsoleConfig("s", login=LoginMode.OIDC, oidc=OidcConfig(**given)), is_insecure=False)


def test_the_login_by_a_provider_needs_its_address() -> None:
    with pytest.raises(InvalidArgument, match="QMQ_CONSOLE_OIDC_ISSUER"):
        check(ConsoleConfig("s", login=LoginMode.OIDC), is_insecure=False)


def test_no_number_of_begun_logins_ends_another_one() -> None:
    clock = SteppedClock()
    flow = OidcFlow(
        OidcConfig("http://127.0.0.1:1", "c", redirect_url="http://127.0.0.1:2/login/callback"),
        monotonic_s=clock,
    )
    addresses = ProviderAddresses(
        "http://127.0.0.1:1/a", "http://127.0.0.1:1/t", "http://127.0.0.1:1/k"
    )

    def begun() -> tuple[str, str]:
        url, browser = flow.begin(addresses, "/subjects?q=ä")
        return parse_qs(urlsplit(url).query)["state"][0], browser

    state, browser = begun()
    others = [begun() for _ in range(3_000)]
    assert flow.came_back(state, browser).target == "/subjects?q=ä"
    for again in (
        (state, browser),
        (others[0][0], others[1][1]),
        (others[0][0], ""),
        ("", others[0][1]),
        ("ä", "ä.ö.ü"),
    ):
        with pytest.raises(NotAuthenticated):
            flow.came_back(*again)
    clock.now_s += LOGIN_S
    with pytest.raises(NotAuthenticated, match="took too long"):
        flow.came_back(*others[2])
