"""The pure parts of the etcd client: endpoints, verdicts, conversions, whole revisions; and the
search for the binary.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from qmq_coordination.coordination_store import (
    Compare,
    CompareTarget,
    Delete,
    Get,
    KeyValue,
    LeaseId,
    Put,
    Revision,
    WatchedChanges,
    WatchEvent,
)
from qmq_coordination.etcd.calls import CallVerdict, LeaseExists, refusal, verdict
from qmq_coordination.etcd.channel import EtcdEndpoint, EtcdTls, Rotation, parse_endpoint
from qmq_coordination.etcd.store import EtcdStore
from qmq_coordination.etcd.values import Converter, range_end
from qmq_coordination.etcd.watch import WholeRevisions
from support import needs
from support.etcd_process import EtcdFailed, EtcdProcess, find_binary, free_ports

from qmq.errors import Compacted, CoordinationError, InvalidArgument, LeaseNotFound
from qmq.proto.etcd import etcd_pb2 as pb


@pytest.mark.parametrize(
    ("text", "has_tls_files", "expected"),
    [
        ("etcd-0:2379", False, EtcdEndpoint("etcd-0:2379", False)),
        ("etcd-0:2379", True, EtcdEndpoint("etcd-0:2379", True)),
        ("http://127.0.0.1:2379/", False, EtcdEndpoint("127.0.0.1:2379", False)),
        ("https://etcd:1", False, EtcdEndpoint("etcd:1", True)),
        (" [::1]:2379", False, EtcdEndpoint("[::1]:2379", False)),
    ],
)
def test_an_endpoint_is_read(text: str, has_tls_files: bool, expected: EtcdEndpoint) -> None:
    assert parse_endpoint(text, has_tls_files=has_tls_files) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        *[
            "etcd",
            "etcd:",
            ":2379",
            "etcd:0",
            "etcd:65536",
            "etcd:http",
            "ftp://etcd:1",
            "http://etcd",
        ],
    ],
)
def test_a_wrong_endpoint_is_refused_when_it_is_given(text: str) -> None:
    with pytest.raises(InvalidArgument):
        EtcdStore([text])


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    for endpoints, files in (
        (["http://e:1"], {"ca": tmp_path}),
        (["e:1"], {"cert": tmp_path}),
        ([], {}),
    ):
        with pytest.raises(InvalidArgument):
            EtcdStore(endpoints, tls=EtcdTls(**files))


def test_many_calls_that_fail_together_move_on_by_one() -> None:
    first, second, third = endpoints = [EtcdEndpoint(f"e{n}:1", False) for n in range(3)]
    rotation = Rotation([*endpoints, first])
    for _ in range(5):
        rotation.leave(first)
    assert rotation.current() == second
    rotation.leave(second)
    assert rotation.current() == third
    rotation.leave(third)
    assert rotation.current() == first
    assert str(rotation) == "e0:1, e1:1, e2:1"


VERDICTS = {
    CallVerdict.NOT_DONE: """
        UNAVAILABLE failed to connect to all addresses; last error: refused
        UNAVAILABLE DNS resolution failed for etcd-0:2379
        UNAVAILABLE etcdserver: no leader
        RESOURCE_EXHAUSTED etcdserver: too many requests""",
    CallVerdict.OLD_TOKEN: """
        UNAUTHENTICATED etcdserver: invalid auth token
        INVALID_ARGUMENT etcdserver: revision of auth store is old""",
    CallVerdict.REFUSED: """
        NOT_FOUND etcdserver: requested lease not found
        RESOURCE_EXHAUSTED etcdserver: mvcc: database space exceeded
        RESOURCE_EXHAUSTED grpc: received message larger than max (9 vs. 8)
        UNIMPLEMENTED unknown service etcdserverpb.KV""",
    CallVerdict.UNKNOWN: """
        RESOURCE_EXHAUSTED CLIENT: Received message larger than max (9 vs. 8)
        PERMISSION_DENIED Received http2 header with status: 403
        UNAVAILABLE etcdserver: request timed out
        UNAVAILABLE etcdserver: request timed out, possibly due to previous leader failure
        UNAVAILABLE etcdserver: leader changed
        UNAVAILABLE etcdserver: server stopped
        UNAVAILABLE Socket closed
        DEADLINE_EXCEEDED Deadline Exceeded
        CANCELLED
        UNKNOWN raft proposal dropped
        INTERNAL""",
}


@pytest.mark.parametrize("expected", VERDICTS, ids=lambda each: each.name)
def test_only_certain_failures_are_reported_as_certain(expected: CallVerdict) -> None:
    for line in VERDICTS[expected].split("\n")[1:]:
        code, _, details = line.strip().partition(" ")
        assert verdict(grpc.StatusCode[code], details) is expected, line


def test_refusals_become_our_errors() -> None:
    assert type(refusal("etcdserver: requested lease not found")) is LeaseNotFound
    assert type(refusal("etcdserver: mvcc: required revision has been compacted")) is Compacted
    assert type(refusal("etcdserver: lease already exists")) is LeaseExists
    assert type(refusal("etcdserver: duplicate key given in txn request")) is CoordinationError


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        (b"a", b"b"),
        (b"a/", b"a0"),
        (b"a\xff", b"b"),
        (b"", b"\0"),
        (b"\xff\xff", b"\0"),
        ("☃".encode(), b"\xe2\x98\x84"),
    ],
)
def test_a_prefix_ends_before_the_next_one(prefix: bytes, end: bytes) -> None:
    assert range_end(prefix) == end


def test_keys_go_out_with_the_namespace_and_come_back_without() -> None:
    converter = Converter("/ns/")
    assert converter.key("é") == "/ns/é".encode()
    assert converter.span("", is_prefix=True) == (b"/ns/", b"/ns0")
    assert converter.span("k", is_prefix=False) == (b"/ns/k", b"")
    assert Converter("").span("", is_prefix=True) == (b"\0", b"\0")
    kv = pb.KeyValue(
        key=b"/ns/k", value=b"v", create_revision=2, mod_revision=3, version=2, lease=9
    )
    item = KeyValue("k", b"v", 2, 3, 2, LeaseId(9))
    assert converter.item(kv) == item
    assert converter.event(pb.Event(type=pb.Event.PUT, kv=kv)) == WatchEvent("k", 3, item)
    assert converter.event(pb.Event(type=pb.Event.DELETE, kv=kv)) == WatchEvent("k", 3, None)
    assert converter.event(pb.Event(kv=pb.KeyValue(key=b"/ns/\xff"))).key == "\udcff"
    with pytest.raises(CoordinationError):
        converter.key("")


def test_comparisons_and_operations_become_etcds() -> None:
    converter = Converter("n")
    assert converter.compare(Compare("k", CompareTarget.VALUE, "!=", b"v")) == pb.Compare(
        key=b"nk", result=pb.Compare.NOT_EQUAL, target=pb.Compare.VALUE, value=b"v"
    )
    assert converter.compare(Compare("k", CompareTarget.MOD, "<", 7)).mod_revision == 7
    # 0 must go out as a value that is set: etcd's server compares with what the oneof holds.
    assert converter.compare(Compare("k", CompareTarget.CREATE, "=", 0)).HasField("create_revision")
    assert converter.compare(Compare("k", CompareTarget.VERSION, ">", 0)).HasField("version")
    assert converter.operation(Put("k", b"v", LeaseId(3))).request_put == pb.PutRequest(
        key=b"nk", value=b"v", lease=3
    )
    assert converter.operation(Get("k", True)).request_range == pb.RangeRequest(
        key=b"nk", range_end=b"nl"
    )
    assert converter.operation(Delete("k")).request_delete_range == pb.DeleteRangeRequest(
        key=b"nk", prev_kv=True
    )
    assert converter.result(pb.ResponseOp(response_put=pb.PutResponse())) == ()


def event(revision: int, key: str = "k") -> WatchEvent:
    return WatchEvent(key, revision, None)


def test_a_revision_cut_into_fragments_is_given_out_whole() -> None:
    revisions = WholeRevisions(5)
    assert revisions.feed([event(5), event(6, "a")], has_more=True) == [
        WatchedChanges(Revision(5), (event(5),))
    ]
    assert revisions.next_revision == 6
    assert revisions.feed([event(6, "b")], has_more=True) == []
    assert revisions.feed([event(6, "c"), event(9)], has_more=False) == [
        WatchedChanges(Revision(6), (event(6, "a"), event(6, "b"), event(6, "c"))),
        WatchedChanges(Revision(9), (event(9),)),
    ]
    assert revisions.next_revision == 10
    assert revisions.feed([], has_more=False) == []


def test_what_was_held_back_when_the_stream_broke_comes_again_once() -> None:
    revisions = WholeRevisions(5)
    assert revisions.feed([event(5, "a")], has_more=True) == []
    revisions.restart()
    assert revisions.next_revision == 5
    assert revisions.feed([event(4), event(5, "a"), event(5, "b")], has_more=False) == [
        WatchedChanges(Revision(5), (event(5, "a"), event(5, "b")))
    ]
    assert revisions.feed([event(5, "a")], has_more=False) == []


def test_the_named_binary_is_taken_first_and_then_one_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary = tmp_path / "etcd"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("QMQ_ETCD_BIN", str(tmp_path / "mine"))
    assert find_binary() == tmp_path / "mine"
    monkeypatch.delenv("QMQ_ETCD_BIN")
    assert find_binary() == binary


def test_free_ports_are_below_those_of_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < 32_768


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    needs.need_etcd()
    server = EtcdProcess(tmp_path)
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(EtcdFailed, match="data"):
        server.start()
    server.stop()
