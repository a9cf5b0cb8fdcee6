"""Parses enough of PromQL to list the metrics and labels that an expression names."""

from __future__ import annotations

import dataclasses
import re

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<number>[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)
      | (?P<word>[A-Za-z_:][\w:]*)
      | (?P<range>\[(?:\$__rate_interval|(?:[0-9]+[smhdw])+)\])
      | (?P<mark>==|!=|>=|<=|=~|!~|[-+*/%^<>=(){},])""",
    re.VERBOSE,
)
_AGGREGATES = {"sum", "min", "max", "avg", "count", "topk", "bottomk", "stddev", "quantile"}
#: A function and whether its argument is a range.
_FUNCTIONS = {
    "rate": True,
    "increase": True,
    "delta": True,
    "histogram_quantile": False,
    "clamp_min": False,
    "abs": False,
}
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_OPERATORS = {"and", "or", "unless", "bool"}


class NotPromQL(ValueError):
    """The expression is invalid; the text names the position."""


@dataclasses.dataclass
class Selector:
    metric: str
    matchers: dict[str, tuple[str, str]]  # The operator and the value, by label.
    is_range: bool
    function: str | None  # The function whose argument it is.
    grouped_by: set[str]  #: Labels of ``by`` around it.


class Reader:
    """Recursive descent over one expression; ``selectors`` are the results."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise NotPromQL(f"at {text[at:]!r} of {text!r}")
            if match.lastgroup != "space":
                self._tokens.append((match.lastgroup or "", match[0]))
            at = match.end()
        self._at = 0
        self.selectors: list[Selector] = []
        self._expression(None, set())
        if self._at != len(self._tokens):
            self._fail("an operator or the end")

    def _fail(self, wanted: str) -> None:
        raise NotPromQL(f"{wanted} expected before {self._tokens[self._at :]!r} of {self._text!r}")

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> tuple[str, str]:
        if self._at == len(self._tokens) or (wanted and self._peek() != wanted):
            self._fail(wanted or "more")
        self._at += 1
        return self._tokens[self._at - 1]

    def _labels(self) -> set[str]:
        self._take("(")
        names = set()
        while self._peek() != ")":
            kind, name = self._take()
            if kind != "word":
                self._fail("a label")
            names.add(name)
            if self._peek() == ",":
                self._take()
        self._take(")")
        return names

    def _expression(self, function: str | None, grouped_by: set[str]) -> None:
        self._operand(function, grouped_by)
        while self._peek() in {"+", "-", "*", "/", "%", "^", "==", "!=", "<", ">", "<=", ">="} or (
            self._peek() in _OPERATORS
        ):
            self._take()
            while self._peek() in _GROUPING | {"bool"}:
                if self._take()[1] != "bool":
                    self._labels()
            self._operand(function, grouped_by)

    def _operand(self, function: str | None, grouped_by: set[str]) -> None:
        kind, text = self._take()
        if kind == "number":
            return
        if text == "(":
            self._expression(function, grouped_by)
            self._take(")")
        elif kind != "word" or text in _GROUPING | _OPERATORS:
            self._fail("a metric, a function or a number")
        elif text in _AGGREGATES:
            groups = set()
            if self._peek() in ("by", "without"):
                is_by = self._take()[1] == "by"
                groups = self._labels() if is_by else set()
            self._take("(")
            self._expression(None, groups | grouped_by)
            self._take(")")
        elif self._peek() == "(":
            if text not in _FUNCTIONS:
                raise NotPromQL(f"{text} is not a known function, in {self._text!r}")
            self._take("(")
            self._expression(text, grouped_by)
            while self._peek() == ",":
                self._take()
                self._expression(text, grouped_by)
            self._take(")")
        else:
            self._selector(text, function, grouped_by)

    def _selector(self, metric: str, function: str | None, grouped_by: set[str]) -> None:
        matchers = {}
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                kind, label = self._take()
                operator = self._take()[1]
                value_kind, value = self._take()
                if kind != "word" or operator not in ("=", "!=", "=~", "!~"):
                    self._fail("a matcher")
                if value_kind != "string":
                    self._fail("a string")
                matchers[label] = (operator, value[1:-1])
                if self._peek() == ",":
                    self._take()
            self._take("}")
        is_range = self._at < len(self._tokens) and self._tokens[self._at][0] == "range"
        if is_range:
            self._take()
        if is_range != _FUNCTIONS.get(function or "", False):
            raise NotPromQL(f"{metric} has or lacks a range by mistake, in {self._text!r}")
        self.selectors.append(Selector(metric, matchers, is_range, function, grouped_by))


def selectors(expression: str) -> list[Selector]:
    """Every selector of ``expression``.

    Raises:
        NotPromQL: it is invalid, or uses a function that is not in the list above.
    """
    return Reader(expression).selectors
