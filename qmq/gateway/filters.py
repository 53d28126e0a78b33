"""The filter of a subscription: by tags, or by an SQL92 condition over a message's properties.
Pure.

    price > 10 AND (region = 'Hangzhou' OR region IS NULL)
    TAGS IN ('a', 'b') AND NOT (code BETWEEN 5 AND 7)

A name is a property (a header); TAGS is the message's tag. Properties are texts: a text that is
compared with a number is converted to a number.

As in SQL there are three values. A comparison with a property that the message lacks, or of a
number with a text that is not a number, is neither true nor false: None. A message matches if the
whole condition is true.

RocketMQ's tag expressions name the tags that a subscription wants:

    *  or nothing     every message
    a || b            messages with tag a or tag b; empty parts, as in `a || || b`, are ignored, as
                      RocketMQ does
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

from qmq import limits
from qmq.client.consuming.message import StoredMessage
from qmq.gateway.status import Refused
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.text import number

EXPRESSION_CHARS_MAX: Final = 8_192
DEPTH_MAX: Final = 50
"""The nesting limit for parentheses and NOT."""

Value: TypeAlias = str | int | float | bool | None
Properties: TypeAlias = Mapping[str, str]
Term: TypeAlias = Callable[[Properties], Value]
Condition: TypeAlias = Callable[[Properties], bool | None]

GRAMMAR: Final = r"""
?start: disjunction
?disjunction: conjunction (_OR conjunction)*
?conjunction: inversion (_AND inversion)*
?inversion: _NOT inversion -> negation
          | "(" disjunction ")"
          | predicate
predicate: term COMPARE term -> comparison
         | term _BETWEEN term _AND term -> between
         | term _NOT _BETWEEN term _AND term -> not_between
         | term _IN "(" literal ("," literal)* ")" -> within
         | term _NOT _IN "(" literal ("," literal)* ")" -> not_within
         | term _IS _NULL -> absent
         | term _IS _NOT _NULL -> present
         | term SEARCH text -> search
         | term _NOT SEARCH text -> not_search
         | _TRUE -> true
         | _FALSE -> false
?term: literal | NAME -> name
?literal: number | text | _TRUE -> true_value | _FALSE -> false_value
number: NUMBER
text: TEXT
COMPARE: "<=" | ">=" | "<>" | "!=" | "=" | "<" | ">"
SEARCH.2: /(contains|startswith|endswith)(?![a-z0-9_$])/i
_OR.2: /or(?![a-z0-9_$])/i
_AND.2: /and(?![a-z0-9_$])/i
_NOT.2: /not(?![a-z0-9_$])/i
_BETWEEN.2: /between(?![a-z0-9_$])/i
_IN.2: /in(?![a-z0-9_$])/i
_IS.2: /is(?![a-z0-9_$])/i
_NULL.2: /null(?![a-z0-9_$])/i
_TRUE.2: /true(?![a-z0-9_$])/i
_FALSE.2: /false(?![a-z0-9_$])/i
NAME: /[a-z_$][a-z0-9_$.-]*/i
NUMBER: /[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?/i
TEXT: /'(''|[^'])*'/
%ignore /\s+/
"""

_COMPARES: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SEARCHES: Final[dict[str, Callable[[str, str], bool]]] = {
    "contains": operator.contains,
    "startswith": str.startswith,
    "endswith": str.endswith,
}


def compare(word: str, left: Value, right: Value) -> bool | None:
    """Compare two values. Returns None if they cannot be compared."""
    if left is None or right is None:
        return None
    if isinstance(left, bool) or isinstance(right, bool):
        left, right = _truth(left), _truth(right)
    elif (
        isinstance(left, int | float)
        or isinstance(right, int | float)
        or word not in ("=", "<>", "!=")
    ):
        left, right = _number(left), _number(right)
    return None if left is None or right is None else _COMPARES[word](left, right)


def _number(value: Value) -> int | float | None:
    return number(value) if isinstance(value, str) else value


def _truth(value: Value) -> bool | None:
    return (
        value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    )


def negated(found: bool | None) -> bool | None:
    """NOT in three-valued logic."""
    return None if found is None else not found


def all_of(parts: list[bool | None]) -> bool | None:
    """AND in three-valued logic."""
    return False if False in parts else None if None in parts else True


def any_of(parts: list[bool | None]) -> bool | None:
    """OR in three-valued logic."""
    return True if True in parts else None if None in parts else False


@lru_cache(maxsize=1_000)
def condition_of(text: str) -> Condition:
    """Parse a filter into a condition on messages. Raises Refused."""
    if len(text) > EXPRESSION_CHARS_MAX:
        raise Refused(
            api.ILLEGAL_FILTER_EXPRESSION,
            f"a filter has at most {EXPRESSION_CHARS_MAX} characters, not {len(text)}",
        )
    try:
        from lark.exceptions import UnexpectedInput

        parser = _parser()
    except ImportError:
        raise Refused(
            api.ILLEGAL_FILTER_EXPRESSION,
            "this gateway has no SQL92 filters: pip install 'qmq[gateway]'",
        ) from None
    try:
        tree = parser.parse(text)
    except UnexpectedInput as failure:
        where = f"line {failure.line}, column {failure.column}" if failure.line > 0 else "its end"
        raise Refused(
            api.ILLEGAL_FILTER_EXPRESSION,
            f"the filter is not a SQL92 condition at {where}: {text[:200]!r}",
        ) from None
    return _condition(tree, 0)


@lru_cache(maxsize=1)
def _parser() -> Any:
    from lark import Lark

    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=False)


def _condition(tree: Any, depth: int) -> Condition:
    """Build the condition of one node of the syntax tree."""
    if depth > DEPTH_MAX:
        raise Refused(
            api.ILLEGAL_FILTER_EXPRESSION,
            f"a filter has at most {DEPTH_MAX} conditions inside each other",
        )
    kind, parts = str(tree.data), tree.children
    if kind in ("disjunction", "conjunction"):
        inner, join = (
            [_condition(each, depth + 1) for each in parts],
            any_of if kind == "disjunction" else all_of,
        )
        return lambda properties: join([each(properties) for each in inner])
    if kind == "negation":
        one = _condition(parts[0], depth + 1)
        return lambda properties: negated(one(properties))
    if kind in ("true", "false"):
        return lambda _: kind == "true"
    if kind.startswith("not_"):
        positive = _predicate(kind.removeprefix("not_"), parts)
        return lambda properties: negated(positive(properties))
    return _predicate(kind, parts)


def _predicate(kind: str, parts: list[Any]) -> Condition:
    if kind == "comparison":
        left, word, right = _term(parts[0]), str(parts[1]), _term(parts[2])
        return lambda properties: compare(word, left(properties), right(properties))
    if kind == "between":
        value, low, high = map(_term, parts)
        return lambda properties: all_of(
            [
                compare(">=", value(properties), low(properties)),
                compare("<=", value(properties), high(properties)),
            ]
        )
    value = _term(parts[0])
    if kind == "within":
        wanted = [_term(each) for each in parts[1:]]
        return lambda properties: any_of(
            [compare("=", value(properties), each(properties)) for each in wanted]
        )
    if kind in ("absent", "present"):
        return lambda properties: (value(properties) is None) == (kind == "absent")
    search, piece = _SEARCHES[str(parts[1]).lower()], _term(parts[2])({})
    return lambda properties: (
        None if (found := value(properties)) is None else search(str(found), str(piece))
    )


def _term(tree: Any) -> Term:
    kind = str(tree.data)
    if kind == "name":
        name = str(tree.children[0])
        return lambda properties: properties.get(name)
    constant: Value
    if kind == "number":
        constant = number(str(tree.children[0]))
    elif kind == "text":
        constant = str(tree.children[0])[1:-1].replace("''", "'")
    else:
        constant = kind == "true_value"
    return lambda _: constant


def tags_of_expression(text: str) -> tuple[str, ...]:
    """The tags of an expression, sorted; empty if it accepts every message. Raises Refused."""
    stripped = text.strip()
    if stripped in ("", "*"):
        return ()
    tags = sorted({each.strip() for each in stripped.split("||")} - {""})
    if not tags or any("|" in each for each in tags):
        raise Refused(
            api.ILLEGAL_FILTER_EXPRESSION,
            f"{text!r} is not a tag expression: write `*`, or tags with `||` between them",
        )
    if any(len(each.encode()) > limits.TAG_BYTES_MAX for each in tags):
        raise Refused(
            api.ILLEGAL_FILTER_EXPRESSION, f"a tag has at most {limits.TAG_BYTES_MAX} bytes"
        )
    return tuple(tags)


TAGS: Final = "TAGS"
"""The name of the message's tag in a condition."""


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A filter by tags or by condition. Empty `tags` accept every tag;
    an empty `sql` is no condition.
    """

    tags: tuple[str, ...] = ()
    sql: str = ""

    def __str__(self) -> str:
        if self.sql:
            return f"messages where {self.sql}"
        return f"messages with the tags {' || '.join(self.tags)}" if self.tags else "all messages"

    def wants(self, message: StoredMessage) -> bool:
        """True if the subscription gets the message."""
        if self.tags and not any(tag in self.tags for tag in message.tags):
            return False
        if not self.sql:
            return True
        properties = {
            name: value.decode(errors="replace") for name, value in message.headers.items()
        }
        if message.tags:
            properties[TAGS] = message.tags[0]
        return condition_of(self.sql)(properties) is True


def filter_of_request(expression: api.FilterExpression) -> MessageFilter:
    """The filter of a request. Raises Refused."""
    if expression.type != api.SQL:
        return MessageFilter(tags=tags_of_expression(expression.expression))
    condition_of(expression.expression)
    return MessageFilter(sql=expression.expression)
