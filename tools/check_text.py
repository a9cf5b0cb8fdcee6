#!/usr/bin/env python3
"""Reject traces of one machine in the files of the repository.

usage: check_text.py [ROOT]

Looks at every text file that git tracks, or would: no absolute path into a home or a work
directory, no host of a private package registry, no conflict mark, no blank at a line's end, and
in Markdown no link to a missing file or heading, and no table whose lines were joined.
"""

import pathlib
import re
import subprocess
import sys

# Written in pieces, so that this file does not find itself.
RULES = (
    # /home/a or /home/user is an example, and {tmp}/work a path below another.
    (
        re.compile(r"(?<![\w.~}-])/(?:wo" r"rk|ro" r"ot|ho" r"me/(?!user\b)\w{2,})/"),
        "a path of one machine",
    ),
    (re.compile(r"/tm" r"p/w/|\.py" r"env/"), "a path of one machine"),
    (
        re.compile(
            r"(?:--(?:extra-)?index" r"-url|--find" r"-links|https?://[\w.-]*(?:artifactory|nexus))"
        ),
        "a package registry of its own",
    ),
    (re.compile(r"https?://[\w.-]+\.(?:internal|corp|lan|intranet)\b"), "a private host"),
    (re.compile(r"^(?:<{7}|>{7}) "), "a conflict mark"),
    (re.compile(r"[ \t]+$"), "a blank at the end of the line"),
)


MARKDOWN_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
INDENTED_CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
JOINED_TABLE = re.compile(r"\| \|[ :-]*-{3}")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown file: its headings in GitHub's form."""
    found: set[str] = set()
    for heading in HEADING.findall(CODE_BLOCK.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (one := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(one)
    return found


def dead_links(root: pathlib.Path, name: str, text: str) -> list[str]:
    """Relative links of a Markdown file without a target."""
    found = []
    for target, anchor in MARKDOWN_LINK.findall(CODE_BLOCK.sub("", text)):
        if "://" in target or not (target or anchor):
            continue
        path = (root / name).parent.joinpath(target) if target else root / name
        if target and not path.exists():
            found.append(f"{name}: a link to the missing file {target}")
        elif anchor and path.suffix == ".md":
            there = text if not target else path.read_text(errors="replace")
            if anchor not in anchors(there):
                found.append(f"{name}: a link to the missing heading {target}#{anchor}")
    return found


def joined_tables(name: str, text: str) -> list[str]:
    """Tables of a Markdown file whose lines were joined, so that they are shown as text."""

    def blank(block: re.Match[str]) -> str:
        return "\n" * block[0].count("\n")

    lines = INDENTED_CODE_BLOCK.sub(blank, text).splitlines()
    return [
        f"{name}:{number}: the lines of a table are joined: {line.strip()[:100]}"
        for number, line in enumerate(lines, start=1)
        if JOINED_TABLE.search(line)
    ]


def problems_of(name: str, text: str) -> list[str]:
    found = [
        f"{name}:{number}: {what}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for rule, what in RULES
        if rule.search(line)
    ]
    if text and not text.endswith("\n"):
        found.append(f"{name}: the last line has no newline")
    return found


def tracked(root: pathlib.Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name)


def main(argv: list[str]) -> int:
    root = pathlib.Path(argv[0] if argv else ".")
    problems = []
    for name in tracked(root):
        path = root / name
        if path.is_symlink() or not path.is_file() or name == "LICENSE":
            continue
        data = path.read_bytes()
        if b"\0" not in data and not name.startswith("tests/fuzz/corpus/"):
            text = data.decode(errors="replace")
            problems += problems_of(name, text)
            if name.endswith(".md"):
                problems += dead_links(root, name, text) + joined_tables(name, text)
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
