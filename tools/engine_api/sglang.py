"""A release of SGLang against PegaFlow's classes below its own, and the decisions in sglang.toml.

Each problem is a sentence that names the decision or the code to look at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.engine_api.checks import has, lookup, mismatch
from tools.engine_api.connector import PACKAGE
from tools.engine_api.source import ABSENT, Interface, members

DECISIONS = "tests/python/engine_api/sglang.toml"


def problems(version: str, found: Interface, decisions: Mapping, package: Path = PACKAGE) -> list:
    """What does not fit; ``version`` is that of ``found``."""
    return [
        *_classes(version, found, decisions, package),
        *_reads(version, found, decisions),
    ]


def _classes(version: str, found: Interface, decisions: Mapping, package: Path) -> Iterator[str]:
    for name, rules in decisions["classes"].items():
        base, file = rules["base"], package / "sglang" / rules["file"]
        own = _members_of(name, file)
        where = f"pegaflow/sglang/{rules['file']}"
        if found.get(base, ABSENT) == ABSENT:
            yield f"{where}: sglang {version} has no {base}, the base of {name}"
            continue
        hooks = {
            line.rpartition(".")[2]: found[line]
            for line in found
            if line.startswith(f"{base}.") and "method " in found[line].partition("(")[0]
        }
        for hook, theirs in hooks.items():
            if hook in own:
                if text := mismatch(theirs, own[hook]):
                    text = text.replace("vLLM", "SGLang").replace("the connector", "PegaFlow")
                    yield f"{where}: {name}.{hook}: {text}"
            elif theirs.startswith("abstract "):
                yield f"{where}: {name} lacks {hook}, abstract in {base}"
            elif hook not in rules["inherited"]:
                yield (
                    f"{where}: unknown hook {hook} of {base}: override it, or state in "
                    f"[classes.{name}] inherited of {DECISIONS} why it is inherited"
                )
        for hook in rules["inherited"]:
            if hook not in hooks:
                yield f"{DECISIONS}: [classes.{name}] inherited: {base} has no {hook}"


def _members_of(name: str, file: Path) -> Interface:
    """
    Raises:
        KeyError: the file has no such class.
    """
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return members(node)
    raise KeyError(name)


def _reads(version: str, found: Interface, decisions: Mapping) -> Iterator[str]:
    """Attributes of SGLang's objects, and methods that are wrapped or called."""
    for owner, names in decisions["used"].items():
        if found.get(owner, ABSENT) == ABSENT:
            yield f"sglang {version} has no {owner}, whose {', '.join(names)} PegaFlow uses"
            continue
        for name in names:
            if lookup(found, owner, name) is None and not has(found, owner, name):
                yield f"sglang {version} has no {owner}.{name}, which PegaFlow uses"
