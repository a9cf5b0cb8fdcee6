"""A release's interface against the connector's source and the decisions in vllm.toml.

Each problem is a sentence that names the decision or the code to look at.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping

from tools.engine_api.connector import Connector, Subclass
from tools.engine_api.source import ABSENT, Interface, number

HOOKS_OF = "KVConnectorBase_V1"
DECISIONS = "tests/python/engine_api/vllm.toml"


def problems(version: str, found: Interface, connector: Connector, decisions: Mapping) -> list[str]:
    """What does not fit; ``version`` is that of ``found``."""
    check = _Check(version, found, connector, decisions)
    return [
        *check.imports(),
        *check.reads(),
        *check.calls(),
        *check.subclasses(),
        *check.hooks(),
        *check.specs(),
        *check.spec_fields(),
    ]


def stale_decisions(recorded: Mapping[str, Interface], decisions: Mapping) -> list[str]:
    """Decisions that the recorded releases, by version, contradict or do not need."""

    def versions_with(name: str) -> list[str]:
        owner, _, attribute = name.rpartition(".")
        return [
            version
            for version, found in recorded.items()
            if (has(found, owner, attribute) if owner else found.get(name, ABSENT) != ABSENT)
        ]

    stale = []
    for table in ("served", "container", "refused"):
        for name in decisions["specs"][table]:
            if not versions_with(name):
                stale.append(f"[specs.{table}] {name}: no recorded release has this class")
    for name in decisions["hooks"]["inherited"]:
        if not versions_with(f"{HOOKS_OF}.{name}"):
            stale.append(f"[hooks.inherited] {name}: no recorded release has this hook")
    for name, first in decisions["since"].items():
        if any(number(v) < number(first) for v in versions_with(name)):
            stale.append(f"[since] {name}: a release before {first} has it")
    for name, last in decisions["until"].items():
        if any(number(v) > number(last) for v in versions_with(name)):
            stale.append(f"[until] {name}: a release after {last} has it")
    for name in decisions["absent"]:
        if versions_with(name):
            stale.append(f"[absent] {name}: a recorded release has it")
    return stale


# ---- what an interface says


def lookup(found: Interface, name: str, attribute: str) -> str | None:
    """The line of a class's attribute, inherited ones too; None if it has none."""
    if f"{name}.{attribute}" in found:
        return found[f"{name}.{attribute}"]
    for base in bases(found, name):
        if (line := lookup(found, base, attribute)) is not None:
            return line
    return None


def has(found: Interface, owner: str, attribute: str) -> bool:
    """Whether the class has the attribute; KVCacheSpec stands for its whole family."""
    owners = family(found, owner) if owner == "KVCacheSpec" else [owner]
    return any(lookup(found, each, attribute) is not None for each in owners)


def bases(found: Interface, name: str) -> list[str]:
    """The direct bases of a class that are recorded."""
    header = re.match(r"class\((.*?)\) in ", found.get(name, ""))
    names = [text.rpartition(".")[2] for text in re.findall(r"[\w.]+", header[1])] if header else []
    return [base for base in names if base in found and base != name]


def descends(found: Interface, name: str, ancestor: str) -> bool:
    return name == ancestor or any(descends(found, base, ancestor) for base in bases(found, name))


def family(found: Interface, ancestor: str) -> list[str]:
    """The class and all classes below it."""
    return [name for name in found if "." not in name and descends(found, name, ancestor)]


def kind_of(line: str) -> str:
    """The kind in a line: property, classmethod, method, field and so on."""
    return re.sub(r"^(abstract |async )+", "", line).partition(" ")[0]


def signature_of(line: str) -> inspect.Signature | None:
    """The parameters of a recorded method or function; None for others."""
    begin = line.find("(")
    if kind_of(line) not in ("method", "classmethod", "staticmethod", "function") or begin < 0:
        return None
    text = re.sub(r" in [\w.]+$", "", line[begin:])
    arguments = ast.parse(f"def f{text}: pass").body[0].args
    made, default = [], inspect.Parameter.empty
    plain = [*arguments.posonlyargs, *arguments.args]
    without = len(plain) - len(arguments.defaults)
    for i, each in enumerate(plain):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        made.append(inspect.Parameter(each.arg, kind, default=None if i >= without else default))
    if arguments.vararg:
        made.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        kind = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(each.arg, kind, default=default if value is None else None))
    if arguments.kwarg:
        made.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(made)


def mismatch(theirs: str, ours: str) -> str:
    """Why a call that fits the first line does not fit the second; empty if it does."""
    values = ("field", "attribute")
    if kind_of(theirs) != kind_of(ours) and not (
        kind_of(theirs) in values and kind_of(ours) in values
    ):
        return f"vLLM has a {kind_of(theirs)}, the connector a {kind_of(ours)}"
    base, own = signature_of(theirs), signature_of(ours)
    if base is None or own is None:
        return ""
    theirs_all = list(base.parameters.values())
    positional = [p for p in theirs_all if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in theirs_all if p.kind is p.KEYWORD_ONLY]
    required = [p for p in positional if p.default is p.empty]
    # Everything by position; what is required by name; everything by name. Self has a position.
    for args, names in (
        ([p.name for p in positional], [p.name for p in keywords]),
        ([p.name for p in required[:1]], [p.name for p in (*required[1:], *keywords)]),
        ([p.name for p in required[:1]], [p.name for p in (*positional[1:], *keywords)]),
    ):
        try:
            bound = own.bind(*args, **dict.fromkeys(names))
        except TypeError as error:
            return f"the connector's {own} does not accept vLLM's {base}: {error}"
        for name, value in bound.arguments.items():
            is_one = own.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            if is_one and isinstance(value, str) and value != name and value in base.parameters:
                return f"{value} of vLLM's {base} is {name} in the connector's {own}"
    for mark, name in (("VAR_KEYWORD", "**"), ("VAR_POSITIONAL", "*")):
        kind = getattr(inspect.Parameter, mark)
        if any(p.kind is kind for p in theirs_all) > any(
            p.kind is kind for p in own.parameters.values()
        ):
            return f"the connector's {own} lacks the {name} of vLLM's {base}"
    return ""


# ---- the checks


class _Check:
    def __init__(
        self, version: str, found: Interface, connector: Connector, decisions: Mapping
    ) -> None:
        self._version = version
        self._found = found
        self._connector = connector
        self._decisions = decisions

    def _may_be_absent(self, name: str) -> bool:
        since, until = self._decisions["since"].get(name), self._decisions["until"].get(name)
        here = number(self._version)
        if since is not None and here < number(since):
            return True
        if until is not None and here > number(until):
            return True
        return name in self._decisions["absent"]

    def _absent(self, name: str, use: str, optional: bool) -> Iterator[str]:
        owner, _, attribute = name.rpartition(".")
        if owner:
            present = has(self._found, owner, attribute)
        else:
            present = self._found.get(name, ABSENT) != ABSENT
        if present or self._may_be_absent(name):
            return
        effect = "so the code takes its fallback" if optional else "which fails"
        yield (
            f"{use}: vLLM {self._version} has no {name}, {effect}; change the code, or state in "
            f"[since], [until] or [absent] of {DECISIONS} why that is right"
        )

    def imports(self) -> Iterator[str]:
        lists = self._decisions["record"]
        recorded = {name for kind, names in lists.items() if kind != "modules" for name in names}
        for use in self._connector.imports:
            module, _, name = use.name.rpartition(".")
            if use.name in recorded or module in lists["modules"]:
                yield from self._absent(name, f"{use.where} imports", use.optional)
            else:
                yield (
                    f"{use.where} imports {use.name}, which is not recorded: add it to [record] of "
                    f"{DECISIONS} and record all releases again"
                )

    def reads(self) -> Iterator[str]:
        reported: set[str] = set()
        for name, where, optional in used_attributes(self._connector, self._decisions):
            if name not in reported:
                complaints = list(self._absent(name, f"{where} reads", optional))
                reported |= {name} if complaints else set()
                yield from complaints
        for use in self._connector.unknown_reads:
            if use.name not in self._decisions["connector"]["elsewhere"]:
                yield (
                    f"{use.where} reads {use.name} by name: add its variable to "
                    f"[connector.variables] of {DECISIONS}, or to [connector.elsewhere]"
                )

    def calls(self) -> Iterator[str]:
        """Calls of imported functions, and constructors with named fields."""
        for name, call, where in self._connector.calls:
            line = self._found.get(name, ABSENT)
            names = [keyword.arg for keyword in call.keywords if keyword.arg]
            if any(isinstance(arg, ast.Starred) for arg in call.args):
                continue
            if own := signature_of(line):
                try:
                    own.bind(*call.args, **dict.fromkeys(names))
                except TypeError as error:
                    yield f"{where} calls {name} of vLLM {self._version}: {error}"
            elif kind_of(line).startswith("class"):
                for field in names:
                    if lookup(self._found, name, field) is None:
                        yield f"{where}: {name} of vLLM {self._version} has no field {field}"

    def subclasses(self) -> Iterator[str]:
        """Overridden methods accept vLLM's calls; abstract ones exist."""
        for own in self._connector.subclasses:
            for use in own.own_reads:
                if all(lookup(self._found, base, use.name) is None for base in own.bases):
                    yield (
                        f"{use.where} reads self.{use.name}, which the bases "
                        f"{', '.join(own.bases)} of vLLM {self._version} do not set"
                    )
            for base in own.bases:
                yield from self._overrides(own, base)

    def _overrides(self, own: Subclass, base: str) -> Iterator[str]:
        for name, line in self._found.items():
            owner, _, member = name.rpartition(".")
            if not owner or not descends(self._found, base, owner):
                continue
            if member in own.members:
                if reason := mismatch(line, own.members[member]):
                    yield f"{own.name}.{member} ({own.where}), vLLM {self._version}: {reason}"
            elif line.startswith("abstract "):
                yield f"{own.name} lacks {member}, abstract in {owner} of vLLM {self._version}"

    def hooks(self) -> Iterator[str]:
        """Each hook is implemented or inherited on purpose; each public method is a hook."""
        (own,) = (each for each in self._connector.subclasses if HOOKS_OF in each.bases)
        inherited, ours = self._decisions["hooks"]["inherited"], self._decisions["hooks"]["ours"]
        hooks = {
            name.rpartition(".")[2]
            for name, line in self._found.items()
            if name.rpartition(".")[0] in own.bases and kind_of(line) not in ("field", "attribute")
        }
        for hook in sorted(hooks):
            if hook.startswith("_"):
                continue
            if hook not in own.members and hook not in inherited:
                yield (
                    f"unknown hook {hook} of vLLM {self._version}: implement it, or state in "
                    f"[hooks.inherited] of {DECISIONS} why its default is right"
                )
            if hook in own.members and hook in inherited:
                yield f"{hook} is implemented; remove it from [hooks.inherited] of {DECISIONS}"
            if hook in ours:
                yield f"vLLM {self._version} has a hook {hook}, the name of a method of PegaFlow's"
        for member in own.members:
            if member in ours or (member.startswith("_") and member != "_cache_hit_source"):
                continue
            if all(lookup(self._found, base, member) is None for base in own.bases):
                if not self._may_be_absent(f"{HOOKS_OF}.{member}"):
                    yield (
                        f"{own.name}.{member} is no hook of vLLM {self._version}, which never "
                        f"calls it; if another release has it, add it to [since] or [until] of "
                        f"{DECISIONS}"
                    )
        mixins = self._decisions["hooks"]["mixins"]
        for name in self._found:
            if re.fullmatch(r"Supports\w+", name) and name not in own.bases and name not in mixins:
                yield (
                    f"unknown mixin {name} of vLLM {self._version}: inherit from it, or state in "
                    f"[hooks.mixins] of {DECISIONS} why not"
                )

    def specs(self) -> Iterator[str]:
        """Each class of KV cache specs is served or refused on purpose."""
        tables = self._decisions["specs"]
        for name in family(self._found, "KVCacheSpec"):
            count = sum(name in tables[table] for table in ("served", "container", "refused"))
            if count != 1:
                which = "unknown" if count == 0 else "twice in the tables"
                yield (
                    f"spec class {name} of vLLM {self._version} is {which}: list it once, in "
                    f"[specs.served], [specs.container] or [specs.refused] of {DECISIONS}, and "
                    "compare vllm/support.py"
                )

    def spec_fields(self) -> Iterator[str]:
        """Each field of a served spec is in the namespace, or without effect on stored bytes."""
        named = {"block_size", *self._connector.constant("vllm/namespace.py:_SPEC_FIELDS")}
        explained = self._decisions["specs"]["fields"]
        for name in self._decisions["specs"]["served"]:
            for attribute in sorted(self._fields(name)):
                if attribute not in named and attribute not in explained:
                    yield (
                        f"{name} of vLLM {self._version} has a field {attribute}: add it to "
                        "_SPEC_FIELDS of vllm/namespace.py if it changes stored bytes or their "
                        f"meaning, else to [specs.fields] of {DECISIONS} with the reason"
                    )

    def _fields(self, name: str) -> set[str]:
        own = {
            full.rpartition(".")[2]
            for full, line in self._found.items()
            if full.rpartition(".")[0] == name and kind_of(line) == "field"
        }
        return own.union(*(self._fields(base) for base in bases(self._found, name)))


def used_attributes(connector: Connector, decisions: Mapping) -> list[tuple[str, str, bool]]:
    """The attributes of vLLM's classes that the connector reads: name, place, optional."""
    rules = decisions["connector"]
    uses = [(rules["means"].get(u.name, u.name), u.where, u.optional) for u in connector.reads]
    uses += [(name, DECISIONS, True) for name in rules["also"]]
    for place, owner in rules["lists"].items():
        uses += [(f"{owner}.{each}", place, True) for each in connector.constant(place)]
    return uses


# ---- two releases


def relevant(found: Interface, connector: Connector, decisions: Mapping) -> Interface:
    """The lines that matter: of classes under [record] read, only attributes that are used."""
    partial = {name.rpartition(".")[2] for name in decisions["record"]["read"]}
    used = {name for name, _, _ in used_attributes(connector, decisions)}
    return {
        name: line
        for name, line in found.items()
        if name.rpartition(".")[0] not in partial or name in used
    }


def difference(old_name: str, old: Interface, new_name: str, new: Interface) -> str:
    """A unified diff; empty if both are equal."""
    texts = [[f"{name}: {line}" for name, line in each.items()] for each in (old, new)]
    return "\n".join(difflib.unified_diff(*texts, old_name, new_name, n=0, lineterm=""))
