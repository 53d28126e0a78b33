"""The part of cert-manager: a Secret for each Certificate of the chart, from an authority of this test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from qmq.security.certificates import Place, create_authority, issue

PRINCIPAL: Final = "spiffe://qmq/"


def make_secrets(objects: Sequence[Mapping[str, Any]], folder: Path, addresses: Callable[[str], Sequence[str]]) -> None:
    """Make `secrets/NAME` in `folder` for each Certificate, with an authority in `authority` if there are any.

    `addresses` returns the local addresses of the pods that a certificate is for: they take the place of the pods' DNS names.
    """
    wanted = [each for each in objects if each["kind"] == "Certificate"]
    if wanted:
        create_authority(folder / "authority")
    for each in wanted:
        spec, secret = each["spec"], folder / "secrets" / each["spec"]["secretName"]
        secret.mkdir(parents=True)
        (uri,) = spec["uris"]
        kind, name = uri.removeprefix(PRINCIPAL).split("/")
        hosts = [*spec["dnsNames"], *addresses(each["metadata"]["name"].removesuffix("-tls"))]
        issue(folder / "authority", name, kind, hosts, place=Place(secret / "ca.crt", secret / "tls.crt", secret / "tls.key"))
