#!/usr/bin/env python3
"""Reject phrases that read like a translation, in the Markdown files that git tracks.

usage: check_language.py [ROOT]

The phrases, and what to write for each, are in language.tsv beside this file. Code spans, code
blocks, link targets and HTML comments are not text. Prints FILE:LINE: the phrase, and what to
write; exits with 1 if there is one.
"""

import functools
import pathlib
import re
import sys

import check_text

RULES_FILE = pathlib.Path(__file__).with_name("language.tsv")
FENCE = re.compile(r"\s*(```|~~~)")
NOT_TEXT = re.compile(r"`[^`]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+")


@functools.cache
def rules() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Each pattern with what to write.

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
        try:
            found.append((re.compile(pattern, re.IGNORECASE), advice))
        except re.error as why:
            raise ValueError(f"{RULES_FILE.name}:{number}: {why}") from why
    return tuple(found)


def problems_of(name: str, text: str) -> list[str]:
    """One line for each rejected phrase."""
    found = []
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE.match(line):
            in_code = not in_code
            continue
        if in_code:
            continue
        prose = NOT_TEXT.sub(" ", line)
        for pattern, advice in rules():
            for hit in pattern.finditer(prose):
                phrase = hit.group().strip(" .:;")
                found.append(f'{name}:{number}: "{phrase}": write: {advice}')
    return found


def main(argv: list[str]) -> int:
    root = pathlib.Path(argv[0] if argv else ".")
    problems = []
    for name in check_text.tracked(root):
        path = root / name
        if name.endswith(".md") and path.is_file():
            problems += problems_of(name, path.read_text())
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
