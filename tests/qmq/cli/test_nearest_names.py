"""An error about a misspelt subject or group suggests the nearest existing name, in every
command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NodeProcess, cli_process

import qmq.blocking
from qmq.cli.names import corrected, nearest
from qmq.model import Order, SubjectConfig

pytestmark = pytest.mark.sampled

NO_ID = "0" * 32
WRONG_SUBJECT = (
    ("group", "list", "order"),
    ("group", "lag", "order", "billing"),
    ("group", "reset", "order", "billing", "--to", "latest"),
    ("group", "set", "order", "billing", "--attempts-max", "3"),
    ("group", "settings", "order", "billing"),
    ("group", "delete", "order", "billing", "--yes"),
    ("pause", "group", "order", "billing"),
    ("delay", "list", "order"),
    ("message", "find", "order", NO_ID),
    ("message", "show", "order", NO_ID),
    ("why", "order", NO_ID),
    ("consume", "order", "-g", "billing", "--timeout", "0.1"),
    ("bench", "sub", "order"),
    ("browse", "order"),
    ("tail", "order"),
    ("subject", "show", "order"),
    ("subject", "flush", "order", "--flush", "sync"),
    ("subject", "place", "order", "--groups", "broker-0"),
    ("subject", "delete", "order", "--yes"),
    ("route", "show", "order"),
    ("route", "history", "order"),
    ("route", "split", "order", "1"),
    ("dlq", "list", "order", "billing"),
)
WRONG_GROUP = (
    ("group", "lag", "orders", "biling"),
    ("group", "reset", "orders", "biling", "--to", "latest"),
    ("group", "delete", "orders", "biling", "--yes"),
    ("group", "lag", "flights", "biling"),
    ("dlq", "list", "biling"),
    ("dlq", "show", "biling"),
    ("dlq", "purge", "biling"),
    ("dlq", "delete", "biling", "--yes"),
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with two subjects, one of them ordered, and a group on each."""
    node = NodeProcess(tmp_path_factory.mktemp("shop"))
    node.start()
    try:
        with qmq.blocking.connect(node.address) as mq:
            mq.metadata.create_subject(
                SubjectConfig("flights", order=Order.STRICT, logical_partitions=16)
            )
            mq.send("flights", b"", key="k")
            mq.send("orders", b"")
        for subject in ("flights", "orders"):
            words = ("consume", subject, "-g", "billing", "-n", "1")
            assert (
                cli_process.run(words, {**os.environ, "QMQ_SERVER": node.address}).returncode == 0
            )
        yield node
    finally:
        node.kill()


@pytest.mark.parametrize("words", [*WRONG_SUBJECT, *WRONG_GROUP], ids=" ".join)
def test_a_misspelt_name_is_answered_with_the_nearest_one(
    shop: NodeProcess, words: tuple[str, ...]
) -> None:
    wrong, right = ("order", "orders") if "order" in words else ("biling", "billing")
    done = cli_process.run(words, {**os.environ, "QMQ_SERVER": shop.address})
    again = " ".join(["qmq", *[right if word == wrong else word for word in words]])
    assert (done.returncode, done.stderr.decode().splitlines()[1:]) == (
        2,
        [f"did you mean {right!r}? try: {again}"],
    ), done
    with qmq.blocking.connect(shop.address) as mq:
        assert [each.settings.name for each in mq.metadata.list_subjects()] == [
            "flights",
            "orders",
        ], "and nothing was created"


def test_a_name_that_resembles_no_other_gets_no_suggestion(shop: NodeProcess) -> None:
    done = cli_process.run(("browse", "xylophone"), {**os.environ, "QMQ_SERVER": shop.address})
    assert done.returncode == 2
    assert done.stderr.decode().count("\n") == 1
    assert b"did you mean" not in done.stderr


@given(st.lists(st.text("abc", min_size=1, max_size=6)), st.text("abc", min_size=1, max_size=6))
def test_a_guess_is_a_name_that_exists_and_another_one(known: list[str], wrong: str) -> None:
    found = nearest(wrong, known)
    assert found is None or (found in known and found != wrong)


def test_the_corrected_command_is_one_for_a_shell() -> None:
    assert (
        corrected(["browse", "order", "--grep", "a b"], "order", "orders")
        == "qmq browse orders --grep 'a b'"
    )
    assert corrected(["browse", "--x=order"], "order", "orders") == ""
    assert nearest("ORDERS", ["orders", "bills"]) == "orders"
