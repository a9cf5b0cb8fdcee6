"""The functions of a C++ or Python source with their lengths, for the rule about long ones.

C++ is read by its braces, not parsed: sources are in the project's format, which puts a blank
before the brace of a body and none before the brace of an initializer.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator

# A raw string, a comment, a string, or a character; a quote after a digit separates digits.
TEXT = re.compile(
    r'R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
# A directive with its continued lines: the body of a macro may hold half a pair of braces.
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
CONTAINER = re.compile(r'\b(?:namespace|class|struct|union|enum)\b|extern ""')
OPERATOR = re.compile(r"operator\s*(?:\(\)|\[\]|[-+*/%^&|~!=<>,]+|\w+)")
LAMBDA = re.compile(r"=\s*\[[^\]]*\]\s*[({]?")
OPENING = re.compile(r"\s*[{,]")
NAME = re.compile(r"(?!(?:requires|decltype|noexcept|alignas|sizeof)\b)(?<!\w)[\w:~]+(?=\s*\()")


@dataclasses.dataclass(frozen=True)
class Function:
    name: str
    line: int  # Its first line, of the return type if that stands above the name.
    lines: int


def blanked(text: str) -> str:
    """The text without comments, strings and directives, with the same lines."""

    def blank(match: re.Match[str]) -> str:
        kept = '""' if match[0].endswith('"') else " "
        return kept + "\n" * match[0].count("\n")

    text = TEXT.sub(blank, text)
    return DIRECTIVE.sub(lambda match: "\n" * match[0].count("\n"), text)


def function_name(head: str) -> str | None:
    """The name of the function whose body follows `head`; None for another kind of brace."""
    plain = OPERATOR.sub("operator_", head)
    before_parameters = plain.partition("(")[0]
    if "=" in before_parameters and not LAMBDA.search(plain):
        return None
    if "(" not in plain or (CONTAINER.search(before_parameters) and "=" not in before_parameters):
        return None
    match = NAME.search(plain)
    return match[0] if match else "lambda"


class BraceReader:
    """Walks over blanked C++ and keeps the braces that are open."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.open: list[tuple[str, int, str | None]] = []  # bracket, line, name of a function
        self.head_from = 0
        self.in_body = 0

    def read(self) -> Iterator[Function]:
        line = 1
        for at, char in enumerate(self.text):
            if char == "\n":
                line += 1
            elif char in "({[":
                self.enter(at, char, line)
            elif char in ")}]":
                if done := self.leave(at, line):
                    yield done
            elif char == ";" and not self.in_parentheses():
                self.head_from = at + 1

    def in_parentheses(self) -> bool:
        return bool(self.open) and self.open[-1][0] != "{"

    def enter(self, at: int, char: str, line: int) -> None:
        name = None
        if char == "{" and not self.in_body and not self.in_parentheses():
            head = self.text[self.head_from : at]
            if head[-1:].isspace():
                name = function_name(head)
                line -= head.lstrip().count("\n")
                self.head_from = at + 1
        self.in_body += name is not None
        self.open.append((char, line, name))

    def leave(self, at: int, line: int) -> Function | None:
        if not self.open:
            return None
        char, first, name = self.open.pop()
        self.in_body -= name is not None
        ends_declaration = not (self.in_body or self.in_parentheses() or self.is_initializer(at))
        if char == "{" and ends_declaration:
            self.head_from = at + 1
        return Function(name, first, line - first + 1) if name else None

    def is_initializer(self, at: int) -> bool:
        """Whether the brace at `at` ends an initializer, so that its declaration goes on."""
        return self.text[at + 1 : at + 2] in (",", ";") or bool(OPENING.match(self.text, at + 1))


def cpp_functions(text: str) -> list[Function]:
    return list(BraceReader(blanked(text)).read())


def python_functions(text: str) -> list[Function]:
    """Empty for a text that Python cannot parse: ruff refuses it."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    return [
        Function(node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]
