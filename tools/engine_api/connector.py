"""What the connector's source uses of vLLM: imports, overridden hooks, attributes, calls."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.engine_api.source import ROOT, members

PACKAGE = ROOT / "pyclient" / "pegaflow"
#: Calls whose second argument is the name of an attribute that may be absent.
_BY_NAME = ("getattr", "hasattr", "_wrap")


@dataclasses.dataclass(frozen=True)
class Use:
    """A use of one of vLLM's names."""

    name: str  #: As in a snapshot; of an import with its module before it.
    where: str
    optional: bool = False  #: The connector has a way without it.


@dataclasses.dataclass(frozen=True)
class Subclass:
    """A class of the connector below one of vLLM's."""

    name: str
    bases: tuple[str, ...]
    members: Mapping[str, str]
    own_reads: tuple[Use, ...]  #: Attributes of ``self`` that only a base can have.
    where: str


class Connector:
    """The parsed files that handle vLLM's objects."""

    def __init__(self, decisions: Mapping, package: Path = PACKAGE) -> None:
        """``decisions``: vllm.toml."""
        rules = decisions["connector"]
        variables = rules["variables"]
        self.modules = frozenset(rules["imported_modules"])
        self._variables = {k: v for k, v in variables.items() if isinstance(v, str)}
        self._by_file = {k: v for k, v in variables.items() if not isinstance(v, str)}
        files = [
            *sorted((package / "vllm").glob("*.py")),
            *sorted((package / "engine").glob("*.py")),
        ]
        self._files = {
            path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in files
        }
        self.imports: list[Use] = []
        self.calls: list[tuple[str, ast.Call, str]] = []  #: Of imported names.
        self.reads: list[Use] = []
        self.unknown_reads: list[Use] = []  #: By name, from objects that vllm.toml does not list.
        self.subclasses: list[Subclass] = []
        for name, tree in self._files.items():
            self._read_file(name, tree)

    def constant(self, place: str) -> list[str]:
        """The names in a tuple of the source, as ``vllm/namespace.py:_SPEC_FIELDS``.

        Raises:
            KeyError: there is none.
        """
        file, _, wanted = place.partition(":")
        for node in self._files[file].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == wanted:
                return [e if isinstance(e, str) else e[0] for e in ast.literal_eval(node.value)]
        raise KeyError(place)

    def _read_file(self, name: str, tree: ast.Module) -> None:
        variables = {**self._variables, **self._by_file.get(name, {})}
        imported: set[str] = set()
        for node, optional in _with_attempts(tree):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "vllm":
                continue
            for alias in node.names:
                if alias.name in self.modules:
                    continue  # its attributes count
                where = f"pegaflow/{name}:{node.lineno}"
                self.imports.append(Use(f"{node.module}.{alias.name}", where, optional))
                imported.add(alias.asname or alias.name)
        for node in ast.walk(tree):
            where = f"pegaflow/{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute):
                if not node.attr.startswith("__"):
                    self._note_read(node.value, node.attr, where, False, variables, imported)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in _BY_NAME and len(node.args) > 1:
                    self._note_by_name(node, where, variables, imported)
                elif node.func.id in imported:
                    self.calls.append((node.func.id, node, where))
            elif isinstance(node, ast.ClassDef):
                bases = tuple(b.id for b in node.bases if isinstance(b, ast.Name))
                if below := tuple(b for b in bases if b in imported):
                    self.subclasses.append(_subclass(node, below, where))

    def _note_by_name(self, node: ast.Call, where: str, variables: Mapping, imported: set) -> None:
        holder, name = node.args[0], node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            required = node.func.id == "getattr" and len(node.args) == 2
            if not self._note_read(holder, name.value, where, not required, variables, imported):
                text = f"{ast.unparse(holder)}.{name.value}"
                self.unknown_reads.append(Use(text, where, True))
        else:
            text = f"{ast.unparse(holder)}[{ast.unparse(name)}]"
            self.unknown_reads.append(Use(text, where, True))

    def _note_read(
        self,
        holder: ast.expr,
        attribute: str,
        where: str,
        optional: bool,
        variables: Mapping,
        imported: set,
    ) -> bool:
        """Whether the holder is one of vLLM's objects, or known not to be."""
        if isinstance(holder, ast.Attribute):
            name = holder.attr.lstrip("_")
        elif isinstance(holder, ast.Name):
            name = holder.id
        else:
            return False
        if name in self.modules:
            self.reads.append(Use(attribute, where, optional))
            return True
        owner = name if name in imported else variables.get(name)
        if owner:
            self.reads.append(Use(f"{owner}.{attribute}", where, optional))
        return owner is not None


def _with_attempts(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes, and whether a handler of ImportError is around them."""
    attempts = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any("ImportError" in ast.unparse(h.type) for h in node.handlers if h.type)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        yield node, id(node) in attempts


def _subclass(node: ast.ClassDef, bases: tuple[str, ...], where: str) -> Subclass:
    own = members(node)
    reads = {
        child.attr: Use(child.attr, f"{where.partition(':')[0]}:{child.lineno}")
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Load)
        and ast.unparse(child.value) == "self"
        and child.attr not in own
    }
    return Subclass(node.name, bases, own, tuple(reads.values()), where)
