"""`qmq cert cluster` makes all certificates of a cluster. Each member gets its own files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from support import cli_process

from qmq.errors import InvalidArgument
from qmq.security.certificates import CertificateHolder, make_certificates, member_of

CLUSTER = (
    member_of("etcd", "etcd0=10.0.0.1:2379,localhost"),
    member_of("meta", "meta0"),
    member_of("node", "g1-a=10.0.0.2:20891"),
    CertificateHolder("op", "admin"),
)


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_existing_certificates_are_kept_and_missing_ones_made(tmp_path: Path) -> None:
    make_certificates(tmp_path, CLUSTER)
    before = contents(tmp_path)
    assert make_certificates(tmp_path, CLUSTER) == []
    assert contents(tmp_path) == before
    made = make_certificates(tmp_path, [*CLUSTER, CertificateHolder("app", "orders")])
    assert [each.cert.parent.name for each in made] == ["orders"]
    (
        tmp_path / "members" / "g1-a" / "cert.pem"
    ).unlink()  # as after a crash: the certificate is written last
    (repaired,) = make_certificates(tmp_path, CLUSTER)
    assert repaired.cert == tmp_path / "members" / "g1-a" / "cert.pem"


def test_renewed_certificates_come_from_the_same_authorities(tmp_path: Path) -> None:
    make_certificates(tmp_path, CLUSTER)
    before = contents(tmp_path)
    make_certificates(tmp_path, CLUSTER, renews=True)
    same = {name for name, content in contents(tmp_path).items() if before[name] == content}
    assert same == {name for name in before if "authority" in name or name.endswith("ca.pem")}


def test_a_member_is_given_no_key_but_its_own(tmp_path: Path) -> None:
    make_certificates(tmp_path, CLUSTER)
    members = {
        folder.name: {path.name for path in folder.iterdir()}
        for folder in (tmp_path / "members").iterdir()
    }
    own, for_etcd = (
        {"ca.pem", "cert.pem", "key.pem"},
        {"etcd-ca.pem", "etcd-cert.pem", "etcd-key.pem"},
    )
    assert members == {
        "admin": own,
        "etcd0": own,
        "etcd-root": for_etcd,
        "meta0": own | for_etcd,
        "g1-a": own | for_etcd,
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*key*")} == {0o600}


def test_etcd_trusts_its_own_authority_and_knows_servers_by_one_name(tmp_path: Path) -> None:
    make_certificates(tmp_path, CLUSTER)
    members = tmp_path / "members"
    ours, etcds = (read(members / "g1-a" / name) for name in ("ca.pem", "etcd-ca.pem"))
    read(members / "g1-a" / "cert.pem").verify_directly_issued_by(ours)
    paper = read(members / "g1-a" / "etcd-cert.pem")
    paper.verify_directly_issued_by(etcds)
    assert (members / "etcd0" / "ca.pem").read_bytes() == (
        members / "g1-a" / "etcd-ca.pem"
    ).read_bytes()
    assert ours.public_key() != etcds.public_key()
    assert [each.value for each in paper.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [
        "qmq"
    ]


def test_a_server_is_reached_by_its_name_and_by_the_hosts_that_were_given(tmp_path: Path) -> None:
    make_certificates(tmp_path, CLUSTER)
    names = (
        read(tmp_path / "members" / "etcd0" / "cert.pem")
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    assert names.get_values_for_type(x509.DNSName) == ["etcd0", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    assert member_of("node", "a=[::1]:1,fe80::1,b").hosts == ("a", "[::1]", "fe80::1", "b")


def test_without_etcd_there_is_one_authority(tmp_path: Path) -> None:
    make_certificates(tmp_path, [CertificateHolder("node", "a", ("a",))])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority", "members"]


@pytest.mark.parametrize(
    "members",
    [
        [CertificateHolder("op", "a"), CertificateHolder("app", "a")],
        [CertificateHolder("app", "etcd-root")],
    ],
)
def test_two_members_cannot_have_one_folder(
    tmp_path: Path, members: list[CertificateHolder]
) -> None:
    with pytest.raises(InvalidArgument, match="needs its own name"):
        make_certificates(tmp_path, members)


def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    words = (
        "cert",
        "cluster",
        "--folder",
        str(tmp_path),
        "--node",
        "a=127.0.0.1",
        "--app",
        "orders",
        "--json",
    )
    done = cli_process.run(words, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert {Path(each["certificate"]).parent.name for each in json.loads(done.stdout)} == {
        "authority",
        "a",
        "orders",
    }
    assert json.loads(cli_process.run(words, dict(os.environ)).stdout) == []
