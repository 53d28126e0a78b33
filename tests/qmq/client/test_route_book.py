"""A client's knowledge about the cluster."""

from __future__ import annotations

from qmq.client.metadata.cache import Master, RouteTable, SubjectRoute


def learned(book: RouteTable, *routes: SubjectRoute, subject: str = "s") -> set[str]:
    return book.learn(book.ask(), subject, routes).outdated


def test_an_older_epoch_is_ignored_and_a_newer_one_counts_for_all_subjects() -> None:
    book = RouteTable()
    learned(book, SubjectRoute("g1", "a:1", 4, True))
    learned(book, SubjectRoute("g1", "a:1", 4, True), subject="t")
    book.doubt("g1", Master("a:1", 4))
    assert learned(book, SubjectRoute("g1", "b:1", 3, True)) == {"g1"}
    assert book.master("g1") is None
    learned(book, SubjectRoute("g1", "b:1", 5, True), subject="t")
    assert book.master("g1") == Master("b:1", 5)
    assert learned(book, SubjectRoute("g1", "a:1", 4, False)) == {"g1"}
    assert book.groups("s") == {"g1": True}


def test_a_doubt_is_cleared_only_by_a_later_request() -> None:
    book = RouteTable()
    learned(book, SubjectRoute("g1", "a:1", 4, True))
    under_way = book.ask()
    assert book.doubt("g1", Master("a:1", 4))
    book.learn(under_way, "s", [SubjectRoute("g1", "a:1", 4, True)])
    assert book.master("g1") is None
    learned(book, SubjectRoute("g1", "a:1", 4, True))
    assert book.master("g1") == Master("a:1", 4)


def test_another_master_is_accepted_whenever_it_was_asked_for() -> None:
    book = RouteTable()
    learned(book, SubjectRoute("g1", "a:1", 4, True))
    under_way = book.ask()
    book.doubt("g1", Master("a:1", 4))
    book.learn(under_way, "s", [SubjectRoute("g1", "b:1", 5, True)])
    assert book.master("g1") == Master("b:1", 5)
    assert not book.doubt("g1", Master("a:1", 4)), (
        "who complains of the old master does not spoil the new one"
    )
    assert book.master("g1") == Master("b:1", 5)


def test_a_few_subjects_cover_all_groups() -> None:
    book = RouteTable()
    learned(
        book, SubjectRoute("g1", "a:1", 1, True), SubjectRoute("g2", "b:1", 1, True), subject="s"
    )
    learned(book, SubjectRoute("g2", "b:1", 1, True), subject="t")
    learned(book, SubjectRoute("g3", "c:1", 1, True), subject="u")
    assert book.cover() == ["s", "u"]
    assert book.subject_on("g3") == "u"
