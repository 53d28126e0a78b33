"""`qmq pause`, `qmq resume`, `qmq group set` and `settings`, and what `qmq group` shows of them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from cli_support import Command, FakeMeta

from qmq.cli.arguments import delays_text, parse_delays, parse_duration
from qmq.cli.roles import ATTEMPTS_MAX, RETRY_DELAYS, retries_of
from qmq.errors import InvalidArgument, UnknownSubject
from qmq.model import GroupSettings
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb

WHOM = [
    (("group", "orders", "billing"), {"kind": "group", "subject": "orders", "group": "billing"}),
    (("group", "*", "billing"), {"kind": "group", "subject": "*", "group": "billing"}),
    (
        ("consumer", "orders", "billing", "c1"),
        {"kind": "consumer", "subject": "orders", "group": "billing", "name": "c1"},
    ),
    (("client", "box-7"), {"kind": "client", "name": "box-7"}),
]
IDS = [" ".join(words) for words, _ in WHOM]


@pytest.mark.parametrize(("words", "fields"), WHOM, ids=IDS)
@pytest.mark.parametrize("was_paused", [True, False])
def test_pausing_reports_the_state_before_and_after(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...], fields: dict[str, str], was_paused: bool
) -> None:
    meta.answers["SetPause"] = pb.SetPauseResponse(was_paused=was_paused)
    (found,) = qmq.json("pause", *words, "--reason", "a bad release")
    named = dict.fromkeys(("kind", "subject", "group", "name"), "") | fields
    assert found == named | {"from": "paused" if was_paused else "running", "to": "paused"}
    (found,) = qmq.json("resume", *words)
    assert found == named | {"from": "paused" if was_paused else "running", "to": "running"}
    assert meta.requests("SetPause") == [
        pb.SetPauseRequest(pause=pb.Pause(**fields, reason="a bad release"), is_paused=True),
        pb.SetPauseRequest(pause=pb.Pause(**fields), is_paused=False),
    ]


def test_the_list_says_who_is_paused_since_when_and_why(meta: FakeMeta, qmq: Command) -> None:
    pauses = [
        pb.Pause(
            kind="group",
            subject="*",
            group="billing",
            since_ms=1_790_000_000_000,
            reason="[bold]release[/bold]",
        ),
        pb.Pause(kind="client", name="box-7", since_ms=1_790_000_000_001),
    ]
    meta.answers["ListPauses"] = pb.ListPausesResponse(pauses=pauses)
    group, client = qmq.json("pause", "list")
    assert group == {
        "kind": "group",
        "subject": "*",
        "group": "billing",
        "name": "",
        "since": "2026-09-21T14:13:20.000+00:00",
        "reason": "[bold]release[/bold]",
    }
    assert (client["kind"], client["name"], client["reason"]) == ("client", "box-7", "")
    assert "[bold]release[/bold]" in qmq.text("pause", "list")


def test_what_the_metaserver_refuses_is_an_error(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["SetPause"] = UnknownSubject("there is no subject 'orders'")
    assert qmq.error("pause", "group", "orders", "billing") == (
        2,
        "error: [E105] there is no subject 'orders' ",
    )


# --- settings of groups ---------------------------------------------------------------------------

HOLDS = pb.DescribeGroupSettingsResponse(
    attempts_max=3,
    retry_delays_ms=[1_000, 90_000, 3_600_000],
    attempts_from="orders",
    delays_from="",
)


def test_only_the_named_settings_change(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["SetGroupSettings"] = HOLDS
    qmq.text("group", "set", "orders", "billing", "--attempts-max", "0")
    qmq.text("group", "set", "*", "billing", "--retry-delays", "1s, 1m30s,1h")
    qmq.text("group", "set", "orders", "billing", "--default")
    assert meta.requests("SetGroupSettings") == [
        pb.SetGroupSettingsRequest(subject="orders", group="billing", attempts_max=0),
        pb.SetGroupSettingsRequest(
            subject="*", group="billing", retry_delays_ms=[1_000, 90_000, 3_600_000]
        ),
        pb.SetGroupSettingsRequest(subject="orders", group="billing", clears=True),
    ]


def test_settings_are_shown_with_where_each_is_from(meta: FakeMeta, qmq: Command) -> None:
    meta.answers["DescribeGroupSettings"] = HOLDS
    assert qmq.json("group", "settings", "orders", "billing") == [
        {
            "attempts_max": 3,
            "retry_delays_ms": [1_000, 90_000, 3_600_000],
            "attempts_from": "orders",
            "delays_from": "",
        }
    ]
    shown = " ".join(qmq.text("group", "settings", "orders", "billing").split())
    assert "attempts_max 3 orders" in shown
    assert "1s,90s,1h the brokers" in shown


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--default", "--attempts-max", "3"),
        ("--attempts-max", "-1"),
        ("--retry-delays", "soon"),
        ("--retry-delays", ""),
        ("--retry-delays", "1s,,2s"),
        ("--attempts-max", "5000000000"),
        ("--retry-delays", "90w"),
    ],
    ids=" ".join,
)
def test_settings_that_make_no_sense_are_refused_before_anybody_is_asked(
    meta: FakeMeta, qmq: Command, words: tuple[str, ...]
) -> None:
    assert qmq.error("group", "set", "orders", "billing", *words)[0] == 2
    assert meta.requests("SetGroupSettings") == []


def test_groups_and_consumers_are_shown_as_paused(meta: FakeMeta, qmq: Command) -> None:
    consumers = [
        control.Consumer(name="c1", unacked=2, client="box-7", is_paused=True),
        control.Consumer(name="c2", client="box-8"),
    ]
    group = control.Group(
        subject="s", broker_group="g1", group="billing", is_paused=True, consumers=consumers
    )
    meta.answers["DescribeGroups"] = control.DescribeGroupsResponse(groups=[group])
    meta.answers["ListSubjects"] = pb.ListSubjectsResponse()
    assert qmq.json("group", "list")[0]["is_paused"] is True
    (shown,) = qmq.json("group", "show", "s", "billing")
    assert (shown["is_paused"], shown["consumers"][0]["is_paused"], shown["consumers"][1]) == (
        True,
        True,
        {"name": "c2", "unacked": 0, "seen_ms_ago": 0, "client": "box-8", "is_paused": False},
    )
    assert "c1 (2, paused), c2 (0)" in " ".join(qmq.text("group", "show", "s", "billing").split())


# --- durations ------------------------------------------------------------------------------------


def test_delays_are_read_as_they_are_written() -> None:
    for delays in (
        (1_000,),
        (0, 1, 999, 1_000, 60_000, 90_000, 3_600_000),
        GroupSettings().retry_delays_ms,
    ):
        assert parse_delays(delays_text(delays)) == delays
    assert parse_duration(delays_text([90_000])) == timedelta(seconds=90)
    assert retries_of(ATTEMPTS_MAX, RETRY_DELAYS) == GroupSettings()
    with pytest.raises(InvalidArgument):
        retries_of(-1, RETRY_DELAYS)
