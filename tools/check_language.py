#!/usr/bin/env python3
"""Reject phrases that read like a translation, in every text of the files that git tracks.

usage: check_language.py [ROOT]

Texts are Markdown, comments and string literals of C++, Python and Cap'n Proto, the names of
Python tests, comments of meson.build, and all of ./dev and of deploy/. Code spans, code blocks,
link targets and HTML comments are not text. A phrase may be wrapped over two lines. The phrases,
and what to write for each, are in language.tsv beside this file. Prints FILE:LINE: the phrase, and
what to write; exits with 1 if there is one.
"""

import functools
import io
import itertools
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterator

import check_text

RULES_FILE = pathlib.Path(__file__).with_name("language.tsv")
# Its data are the phrases.
EXEMPT = ("tests/layering/test_check_language.py", "tools/language.tsv")
DOC_RULE = "///: "

CODE_BLOCK = re.compile(
    r"^\s*(```|~~~).*?^\s*\1[^\n]*$|^\s*(```|~~~).*\Z", re.MULTILINE | re.DOTALL
)
NOT_TEXT = re.compile(r"`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)
# A paragraph, an item or a row ends the text before it.
PARAGRAPH = re.compile(r"\n\s*(?=[-*|#>]|\d+\.|\n)")
CPP = re.compile(
    r"(?P<comment>//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/)"
    r'|R"\((?P<raw>.*?)\)"'
    r'|(?P<string>"(?:\\.|[^"\\\n])*"(?:\s*"(?:\\.|[^"\\\n])*")*)'
    r"|'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
INCLUDE = re.compile(r"^\s*#\s*include[^\n]*", re.MULTILINE)
HASH_COMMENT = re.compile(r"(?<![\w$\"'{&(])#(?!!)[^\n]*(?:\n[ \t]*#[^\n]*)*")
COMMENT_MARK = re.compile(r"(?m)^[ \t]*(?:///?<?|/\*+|\*/|#+:?)|\\file")
TEST_NAME = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)

# A text and the offset at which it begins, and whether it is a comment.
Piece = tuple[int, str, bool]


@functools.cache
def rules() -> tuple[tuple[re.Pattern[str], str, bool], ...]:
    """Each pattern, what to write, and whether it is about the beginning of doc comments alone.

    Raises:
        ValueError: a line without a tab, or with a pattern that re does not understand.
    """
    found = []
    for number, line in enumerate(RULES_FILE.read_text().splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        pattern, tab, advice = line.partition("\t")
        if not tab:
            raise ValueError(f"{RULES_FILE.name}:{number}: no tab between pattern and advice")
        for_docs = pattern.startswith(DOC_RULE)
        # A line may end between two words.
        pattern = pattern.removeprefix(DOC_RULE).replace(" ", r"\s+")
        try:
            found.append((re.compile(pattern, re.IGNORECASE), advice, for_docs))
        except re.error as why:
            raise ValueError(f"{RULES_FILE.name}:{number}: {why}") from why
    return tuple(found)


def blank(match: re.Match[str]) -> str:
    """As many blanks, with the ends of lines where they were."""
    return re.sub(r"[^\n]", " ", match.group())


def markdown_pieces(text: str) -> Iterator[Piece]:
    text = CODE_BLOCK.sub(blank, text)
    begin = 0
    for end in itertools.chain((each.start() for each in PARAGRAPH.finditer(text)), [len(text)]):
        yield begin, text[begin:end], False
        begin = end


def cpp_pieces(text: str) -> Iterator[Piece]:
    text = INCLUDE.sub(blank, text)
    for each in CPP.finditer(text):
        if each["comment"]:
            yield each.start(), each["comment"], True
        elif each["string"]:
            # Adjacent literals are one text.
            yield each.start(), re.sub(r'"\s*"', blank, each["string"]), False
        elif each["raw"]:
            yield each.start("raw"), each["raw"], False


def python_pieces(text: str) -> Iterator[Piece]:
    starts = list(itertools.accumulate((len(line) for line in text.splitlines(True)), initial=0))
    strings = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in strings:
            yield starts[token.start[0] - 1] + token.start[1], token.string, False
    for each in HASH_COMMENT.finditer(text):
        yield each.start(), each.group(), True
    for each in TEST_NAME.finditer(text):
        yield each.start(1), each[1].replace("_", " "), False


def hash_pieces(text: str) -> Iterator[Piece]:
    for each in HASH_COMMENT.finditer(text):
        yield each.start(), each.group(), True


def whole(text: str) -> Iterator[Piece]:
    yield 0, text, False


def reader_of(name: str) -> Callable[[str], Iterator[Piece]] | None:
    """What finds the texts of a file; None for a kind of file that has none."""
    path = pathlib.PurePosixPath(name)
    if name in EXEMPT:
        return None
    if path.suffix == ".md":
        return markdown_pieces
    if path.suffix in (".h", ".cpp", ".cu"):
        return cpp_pieces
    if path.suffix in (".py", ".pyi"):
        return python_pieces
    if path.suffix == ".capnp" or path.name == "meson.build":
        return hash_pieces
    return whole if name == "dev" or name.startswith("deploy/") else None


def problems_of(name: str, text: str) -> list[str]:
    """One line for each phrase that is refused, in the order of the text."""
    found = []
    reader = reader_of(name)
    for begin, piece, is_comment in reader(text) if reader else ():
        prose = NOT_TEXT.sub(blank, piece)
        if is_comment:
            prose = COMMENT_MARK.sub(blank, prose)
        for pattern, advice, for_docs in rules():
            if for_docs and not piece.startswith("///"):
                continue
            hits = [pattern.match(prose.lstrip())] if for_docs else pattern.finditer(prose)
            for hit in filter(None, hits):
                place = begin + (0 if for_docs else hit.start())
                number = text.count("\n", 0, place) + 1
                phrase = " ".join(hit.group().split()).strip(" .:;")
                found.append((number, f'{name}:{number}: "{phrase}": write: {advice}'))
    return [line for _, line in sorted(found)]


def main(argv: list[str]) -> int:
    root = pathlib.Path(argv[0] if argv else ".")
    problems = []
    for name in check_text.tracked(root):
        path = root / name
        if reader_of(name) and path.is_file() and not path.is_symlink():
            problems += problems_of(name, path.read_text())
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
