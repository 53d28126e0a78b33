"""One running group for all tests of a session that need one, because it takes ten seconds to
start.

With QMQ_TEST_SECURE=1 (`scripts/test --secure`) it is a secured group that enforces rules, and
clients that a test opens without certificates show the operator's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import needs
from system.group import SECURE, Group, enforce_rules, running_group

from qmq.security.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Group g1 with etcd and metaservers."""
    network = "netns" if needs.can_use_namespaces() else "loopback"
    with running_group(tmp_path_factory.mktemp("cluster"), network, secure=SECURE) as found:
        if SECURE:
            enforce_rules(found.cluster)
        yield found


@pytest.fixture(autouse=True)
def papers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate of a secured group's client, where the test names none."""
    if SECURE and "group" in request.fixturenames:
        shown = request.getfixturevalue("group").papers("admin")
        for name, path in (
            (CA_VARIABLE, shown.ca),
            (CERT_VARIABLE, shown.cert),
            (KEY_VARIABLE, shown.key),
        ):
            monkeypatch.setenv(name, str(path))
