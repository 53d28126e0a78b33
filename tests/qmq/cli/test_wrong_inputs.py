"""A wrong input is answered with one line that says what to do, with an exit status that is not 0,
and without a traceback.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cli_support import Command, FakeMeta

from qmq.errors import AccessDenied

NO_ID = "is not a message id: write its 32 hexadecimal digits"
NO_DURATION = "is not a duration: write 90s, 10m, 1h30m, 2d or 1w"
NO_TIME = "is not a time: write 2027-01-01T09:00:00+01:00, or ...Z for UTC"
NO_DELAYED = "is not the id of a delayed message: use the receipt's `delayed_id`"
NO_NAME = "may hold only letters, digits, '.', '_' and '-'"
NO_ADDRESS = "is not an address: write host:port"

WRONG = {
    "prodce orders": "No such command 'prodce'. Did you mean 'produce'",
    "subject lst": "Did you mean 'list'?",
    "subject list --serve x": "(Possible options: --server)",
    "subject show": "Missing argument",
    "subject show orders more": "unexpected extra argument(s) (more)",
    "subject create 'bad name'": NO_NAME,
    "subject create x --order strictly": "--order must be strict or best-effort, not 'strictly'",
    "subject create x --order strict --logical-partitions 0": "greater than or equal to 1",
    "subject alter orders": "nothing of subject 'orders' is to change: give a retention or the largest body",  # noqa: E501
    "subject alter orders --retention-hours soon": "--retention-hours is a positive number or 'default', not 'soon'",  # noqa: E501
    "subject alter orders --retention-hours 1e308": "--retention-hours is at most 2562047788015, not 1e+308",  # noqa: E501
    "subject alter orders --body-bytes-max 4294967296": "less than or equal to 15728640",
    "subject create x --retention-hours inf": "should be less than or equal to 2562047788015",
    "subject create x --retention-mib -5": "greater than or equal to 1",
    "subject create x --retention-mib 9000000000000": "less than or equal to 8796093022207",
    "subject create x --order strict --partitions 4294967296": "less than or equal to 65536",
    "subject flush orders --flush never": "--flush must be default or sync, not 'never'",
    "subject list --watch --interval 0": "greater than or equal to 0.1",
    "produce ../etc": NO_NAME,
    "produce orders --delay soon": NO_DURATION,
    "produce orders --at tomorrow": NO_TIME,
    "produce orders --at 2027-01-01T09:00": "has no time zone: write 2027-01-01T09:00:00+01:00, or 2027-01-01T09:00:00Z",  # noqa: E501
    "produce orders --at 2027-01-01T09:00Z --delay 1d": "give --delay or --at, not both",
    "produce orders --format xml": "--format must be 'lines' or 'json', not 'xml'",
    "produce orders --file /nowhere/lines": "/nowhere/lines cannot be read: No such file or directory",  # noqa: E501
    "produce orders --file /": "/ cannot be read: Is a directory",
    "consume orders": "Missing option '--group' / '-g'",
    "consume orders -g 'bad group' -n 1": NO_NAME,
    "consume orders -g billing -n few": "valid integer",
    "browse orders --at noon": NO_DURATION,
    "browse orders --at 2027-13-01": NO_TIME,
    "browse orders --grep [": "'[' is not a regular expression",
    "message show orders nonsense": NO_ID,
    "message trace orders xyz": NO_ID,
    "why orders nonsense": NO_ID,
    "delay list --from soon": NO_TIME,
    "delay show nonsense": NO_DELAYED,
    "delay cancel 0": NO_DELAYED,
    "delay move nonsense": "give either --to",
    "dlq replay billing --rate -1": "greater than or equal to 0",
    "group reset orders billing": "Missing option '--to'",
    "group reset orders billing --to never": "--to takes earliest, latest, a time or a sequence, not 'never'",  # noqa: E501
    "group reset orders billing --to 9223372036854775808": "--to takes earliest, latest, a time or a sequence",  # noqa: E501
    "group set orders billing --attempts-max 4294967296": "less than or equal to 1000000",
    "group set orders billing": "give --attempts-max, --retry-delays or both",
    "group set orders billing --retry-delays 1s,2x": NO_DURATION,
    "route split flights one": "valid integer",
    "route show flights --version 18446744073709551616": "less than or equal to 9223372036854775807",  # noqa: E501
    "route policy flights cool_down_ms=9223372036854775808": "cool_down_ms is a whole number from -9223372036854775808 to 9223372036854775807, not 9223372036854775808",  # noqa: E501
    "route policy flights partitions_max=4294967296": "partitions_max is a whole number from 0 to 4294967295, not 4294967296",  # noqa: E501
    "copy orders orders": "'orders' would be copied into itself: give another subject or another cluster",  # noqa: E501
    "copy orders more --to-context nope": "there is no context 'nope': `qmq context list` shows",
    "import orders --file /nowhere/file": "/nowhere/file cannot be read",
    "top --sort size": "is not one of",
    "top --interval 0": "greater than or equal to 0.1",
    "doctor --lag much": NO_DURATION,
    "bench pub orders --messages 0": "greater than or equal to 1",
    "quota set app:orders": "give at least one limit, such as produce_bytes_per_s=1000000",
    "quota set app:orders connections=9223372036854775808": "connections is a whole number from -9223372036854775808 to 9223372036854775807, not 9223372036854775808",  # noqa: E501
    "log dump /nowhere": "/nowhere is not a file: segments are in DATA/broker/message",
    "completion csh": "completion is for bash, zsh, fish, not 'csh'",
    "subject list --server :::": NO_ADDRESS,
    "subject list --server 127.0.0.1:99999": NO_ADDRESS,
    "console --port 99999": "less than or equal to 65535",
    "meta --metrics-port 65536": "less than or equal to 65535",
    "dev --gateway-port 99999": "less than or equal to 65535",
    "dev --console-port 65536": "less than or equal to 65535",
    "gateway --http-port 65536": "less than or equal to 65535",
    "gateway --processes 2 --http-port 65535": "port 65535 + 1 is over 65535: use lower ports, or fewer processes",  # noqa: E501
    "console --login magic": "--login must be own, token, oidc or proxy, not 'magic'",
    "console --login oidc": "--login oidc needs QMQ_CONSOLE_OIDC_ISSUER and QMQ_CONSOLE_OIDC_CLIENT_ID",  # noqa: E501
    "spark nonsense": "there is no job 'nonsense': jobs:",
    "context use prd": "there is no context 'prd': `qmq context list` shows",
    "context remove prd": "there is no context 'prd': `qmq context list` shows",
    "context add prod": "context 'prod' sets nothing: give --server HOST:PORT",
    "context add 'a b' --server x:1": NO_NAME,
    "context add prod --server a:b": NO_ADDRESS,
    "cert server b0": "Missing option '--host'",
    "cert server b0 --host localhost": "has no authority that can be used",
    "cert client a/b": NO_NAME,
    "cert cluster": "name at least one member: --meta NAME=HOST",
    "cert cluster --meta 'm0=bad host'": "'bad host' is neither a host name nor an address: write broker0.example.com",  # noqa: E501
    "cert cluster --op a/b": NO_NAME,
}
"""Command lines, and what their errors say."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and working folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
@pytest.mark.usefixtures("home")
def test_a_wrong_input_is_answered_with_what_to_do(qmq: Command, line: str) -> None:
    done = qmq(*shlex.split(line))
    assert isinstance(done.exception, SystemExit), done.exception
    told = [
        each
        for each in done.stderr.splitlines()
        if each and not each.startswith(("Usage: ", "Try 'qmq"))
    ]
    assert (done.exit_code, done.stdout, len(told)) == (2, "", 1), done.output
    assert WRONG[line] in told[0]


@pytest.mark.parametrize(
    ("line", "call"), [("pause list", "ListPauses"), ("subject list", "ListSubjects")]
)
def test_a_missing_permission_is_reported_in_the_clusters_words(
    meta: FakeMeta, qmq: Command, line: str, call: str
) -> None:
    meta.answers[call] = AccessDenied(
        "app:x:1 may not describe subject 'orders': ask for `qmq acl allow`"
    )
    assert qmq.error(*line.split()) == (
        2,
        "error: [E123] app:x:1 may not describe subject 'orders': ask for `qmq acl allow` ",
    )
