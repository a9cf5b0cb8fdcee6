"""A finding of the doctor: one line, and its fix."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence

OK = "ok"
#: Nothing is broken, but something could be improved or should be known.
ADVICE = "advice"
#: The cache does not work, or not for every engine, until an operator fixes it.
PROBLEM = "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    check: str  #: "socket", "huge pages", ...
    status: str  #: OK, ADVICE or PROBLEM.
    detail: str
    fix: str = ""  #: A command or a sentence; never empty for a PROBLEM.

    def __post_init__(self) -> None:
        if self.status == PROBLEM and not self.fix:
            raise ValueError(f"a problem without a fix: {self.check}: {self.detail}")


def exit_status(findings: Sequence[Finding]) -> int:
    return 1 if any(finding.status == PROBLEM for finding in findings) else 0


def as_json(version: str, findings: Sequence[Finding]) -> str:
    return json.dumps(
        {
            "version": version,
            "ok": exit_status(findings) == 0,
            "findings": [
                {name: _printable(text) for name, text in dataclasses.asdict(finding).items()}
                for finding in findings
            ],
        },
        indent=2,
    )


def as_text(version: str, findings: Sequence[Finding], width: int = 100) -> str:
    """One line per finding, its fix below it."""
    name_width = max(len(finding.check) for finding in findings)
    lines = [f"pegaflow doctor {version}", ""]
    for finding in findings:
        word = {OK: "ok", ADVICE: "advice", PROBLEM: "PROBLEM"}[finding.status]
        head = f"{word:<8} {finding.check:<{name_width}}  "
        lines += _wrapped(head, finding.detail, width)
        if finding.fix:
            lines += _wrapped(" " * (len(head) - 5) + "fix: ", finding.fix, width)
    counts = {s: sum(f.status == s for f in findings) for s in (OK, ADVICE, PROBLEM)}
    lines += [
        "",
        f"{counts[OK]} ok, {counts[ADVICE]} to consider, {counts[PROBLEM]} to fix",
    ]
    return _printable("\n".join(lines))


def _printable(text: str) -> str:
    """With each byte of a file's name that is not UTF-8 as its number: ``\\xff``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _wrapped(head: str, text: str, width: int) -> list[str]:
    # Commands must stay whole for copying, so long words are never broken.
    return textwrap.wrap(
        text,
        width=max(width, len(head) + 20),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]
