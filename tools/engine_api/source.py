"""The interface of an engine's release, read from its sources without importing them.

An interface maps names to one line each: classes, their members, functions. Two releases are
compared line by line, and checks.py compares a release with the connector.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "python" / "engine_api"

#: The line of a name that the release does not have.
ABSENT = "absent"

Interface = dict[str, str]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class SourceError(Exception):
    """The given path has no release of the engine; the text has the reason."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What is recorded of an engine: ENGINE.toml."""

    modules: tuple[str, ...]  #: All classes of these,
    classes: tuple[str, ...]  #: these,
    families: tuple[str, ...]  #: these and all their subclasses,
    read: tuple[str, ...]  #: these, of which single attributes are read,
    functions: tuple[str, ...]  #: and these.


@functools.cache
def document(engine: str) -> dict:
    """ENGINE.toml as a whole."""
    return tomllib.loads((DATA / f"{engine}.toml").read_text())


def parts(engine: str) -> Parts:
    lists = document(engine)["record"]
    return Parts(**{f.name: tuple(lists.get(f.name, ())) for f in dataclasses.fields(Parts)})


# ---- where the sources are


class Tree:
    """An engine's package: installed, unpacked from a wheel, or a source tree."""

    def __init__(self, engine: str, path: Path) -> None:
        """
        Args:
            path: the package, or a directory that contains it.

        Raises:
            SourceError: it is neither.
        """
        self.engine = engine
        for above in (path, path / "python", path / "src", path.parent):
            if (above / engine / "__init__.py").is_file():
                self.above = above
                break
        else:
            raise SourceError(f"{path} contains no Python package {engine}")
        self._modules: dict[str, Module | None] = {}

    def version(self) -> str:
        """The release, without a local label such as +cpu.

        Raises:
            SourceError: the tree does not contain it, as a clone without a build.
        """
        texts = [(self.above / self.engine / "_version.py", r"\b__version__ = .*?'([\w.+]+)'")]
        for name in (f"{self.engine}-*.dist-info/METADATA", "PKG-INFO"):
            texts += [(path, r"(?m)^Version: (\S+)") for path in sorted(self.above.glob(name))]
        for path, pattern in texts:
            if path.is_file() and (found := re.search(pattern, path.read_text())):
                return found[1].partition("+")[0]
        raise SourceError(f"{self.above} does not name the version of its {self.engine}")

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self.above.joinpath(*name.split("."))
            file = next(
                (f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None
            )
            self._modules[name] = Module(self, name, file) if file else None
        return self._modules[name]

    def modules_that_match(self, pattern: str) -> Iterator[Module]:
        """Modules whose text matches; faster than parsing all of them."""
        for file in sorted((self.above / self.engine).rglob("*.py")):
            if re.search(pattern, file.read_text(errors="replace")):
                place = file.relative_to(self.above).with_suffix("")
                names = place.parts[:-1] if place.name == "__init__" else place.parts
                if found := self.module(".".join(names)):
                    yield found

    def files(self) -> list[Path]:
        """The modules parsed so far."""
        return [module.file for module in self._modules.values() if module is not None]

    def find(self, dotted: str, depth: int = 8) -> tuple[Module, ast.AST] | None:
        """The definition of a class or function, also if the module imports it from another."""
        module_name, _, name = dotted.rpartition(".")
        module = self.module(module_name) if module_name else None
        if module is None or depth == 0:
            return None
        if name in module.definitions:
            return module, module.definitions[name]
        origin = module.imports.get(name)
        return self.find(origin, depth - 1) if origin else None


class Module:
    """A parsed file: what it defines and imports at its top level."""

    def __init__(self, tree: Tree, name: str, file: Path) -> None:
        self.name = name
        self.file = file
        self.definitions: dict[str, ast.AST] = {}
        self.imports: dict[str, str] = {}
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node in _flat(ast.parse(file.read_text(errors="replace")).body):
            if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
                self.definitions[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{origin}.{alias.name}"


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, also those inside of `if` and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _flat(getattr(node, inner, []))
        for handler in getattr(node, "handlers", ()):
            yield from _flat(handler.body)


def unpack(archive: Path, into: Path) -> Path:
    """The Python files of a wheel or source archive; returns the directory of its package."""
    kept = re.compile(r"\.py$|\.dist-info/METADATA$|PKG-INFO$")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(into, [name for name in wheel.namelist() if kept.search(name)])
        return into
    with tarfile.open(archive) as tar:
        for member in tar:
            place = Path(member.name)
            if member.isfile() and kept.search(member.name) and ".." not in place.parts:
                file = into.joinpath(*place.parts[place.is_absolute() :])
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(tar.extractfile(member).read())
    (top,) = into.iterdir()
    return top


def read(engine: str, path: Path, version: str = "") -> tuple[str, Interface]:
    """The version and the interface of a release, from a directory or an archive.

    Args:
        version: that of a tree which does not name it.

    Raises:
        SourceError: the path has none.
    """
    if not path.is_file():
        tree = Tree(engine, path)
        return version or tree.version(), interface(tree, parts(engine))
    with tempfile.TemporaryDirectory(prefix="pega-api-") as scratch:
        return read(engine, unpack(path, Path(scratch)), version)


# ---- the interface


def interface(tree: Tree, wanted: Parts) -> Interface:
    made = _Maker(tree)
    for name in wanted.modules:
        module = tree.module(name)
        if module is None:
            made.lines[name] = ABSENT
            continue
        for child, node in module.definitions.items():
            if isinstance(node, ast.ClassDef):
                made.add_class(f"{name}.{child}")
    for name in (*wanted.classes, *wanted.read, *wanted.families):
        made.add_class(name)
    for name in wanted.families:
        made.add_subclasses(name)
    for name in wanted.functions:
        made.add_function(name)
    return dict(sorted(made.lines.items()))


class _Maker:
    def __init__(self, tree: Tree) -> None:
        self.lines: Interface = {}
        self._tree = tree

    def add_class(self, dotted: str) -> None:
        found = self._tree.find(dotted)
        if found is None or not isinstance(found[1], ast.ClassDef):
            self.lines[dotted.rpartition(".")[2]] = ABSENT
            return
        module, node = found
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        header = f"class({bases}) in {module.name}"
        known = self.lines.get(node.name)
        if known == header:
            return
        if known is not None:
            raise SourceError(f"two classes are named {node.name}: {known}, {header}")
        self.lines[node.name] = header
        for name, line in members(node).items():
            self.lines[f"{node.name}.{name}"] = line
        for base in node.bases:  # those of this engine; their members are inherited
            name = base.id if isinstance(base, ast.Name) else ""
            if f"{module.name}.{name}" != dotted and name:
                origin = module.imports.get(name, f"{module.name}.{name}")
                if origin.startswith(f"{self._tree.engine}.") and self._tree.find(origin):
                    self.add_class(origin)

    def add_subclasses(self, dotted: str) -> None:
        """Of the class, in all modules of the engine: those whose names end as its own does."""
        suffix = re.search(r"[A-Z][a-z]*$", dotted)[0]
        known = {dotted.rpartition(".")[2]}
        found = [
            (module.name, node)
            for module in self._tree.modules_that_match(rf"(?m)^\s*class \w+\([^)]*\w*{suffix}s?\b")
            for node in module.definitions.values()
            if isinstance(node, ast.ClassDef)
        ]
        size = 0
        while size != len(known):
            size = len(known)
            for module_name, node in found:
                names = {
                    ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases
                }
                if names & known and node.name not in known:
                    known.add(node.name)
                    self.add_class(f"{module_name}.{node.name}")

    def add_function(self, dotted: str) -> None:
        found = self._tree.find(dotted)
        name = dotted.rpartition(".")[2]
        if found is None or not isinstance(found[1], _FUNCTIONS):
            self.lines[name] = ABSENT
            return
        self.lines[name] = f"function {signature(found[1])} in {found[0].name}"


def members(node: ast.ClassDef) -> Interface:
    """A class's own methods, properties, fields and the attributes that its methods set."""
    found: Interface = {}
    for child in _flat(node.body):
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            default = f" = {ast.unparse(child.value)}" if child.value else ""
            found[child.target.id] = f"field {_type(child.annotation)}{default}"
        elif isinstance(child, ast.Assign):
            for target in child.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = f"field = {ast.unparse(child.value)}"
        elif isinstance(child, _FUNCTIONS):
            if (line := _method(child)) is not None:
                found[child.name] = line
    for child in _flat(node.body):
        if isinstance(child, _FUNCTIONS):
            for name, line in _set_in(child).items():
                found.setdefault(name, line)
    return {name: re.sub(r"\s+", " ", line) for name, line in found.items()}


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    if node.name.startswith("__") and node.name != "__init__":
        return None
    marks = [ast.unparse(d).rpartition(".")[2] for d in node.decorator_list]
    if "overload" in marks or "setter" in marks:
        return None
    abstract = "abstract " if "abstractmethod" in marks else ""
    if "property" in marks or "cached_property" in marks:
        returns = f" -> {_type(node.returns)}" if node.returns else ""
        return f"{abstract}property{returns}"
    kind = next((mark for mark in marks if mark in ("classmethod", "staticmethod")), "method")
    asynchronous = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{abstract}{asynchronous}{kind} {signature(node)}"


def _set_in(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Interface:
    """The attributes of ``self`` that a method sets."""
    found: Interface = {}
    for child in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(child, ast.AnnAssign):
            targets = [child.target]
        elif isinstance(child, ast.Assign):
            for target in child.targets:
                targets += target.elts if isinstance(target, ast.Tuple) else [target]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                kind = _type(child.annotation) if isinstance(child, ast.AnnAssign) else ""
                found[target.attr] = f"attribute {kind}".rstrip()
    return found


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg) and argument.annotation is not None:
            argument.annotation = ast.parse(_type(argument.annotation), mode="eval").body
    returns = f" -> {_type(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


class _Unquoted(ast.NodeTransformer):
    """An annotation means the same with quotes as without."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value).rpartition(".")[2] != "Literal":
            self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            try:
                return ast.parse(node.value.strip(), mode="eval").body
            except SyntaxError:
                return node  # a text inside of an annotation, as in Annotated[int, "a text"]
        return node


def _type(annotation: ast.expr) -> str:
    return ast.unparse(_Unquoted().visit(annotation))


# ---- snapshots


def snapshot_path(engine: str, version: str) -> Path:
    return DATA / f"{engine}-{version}.txt"


def number(version: str) -> tuple[int, ...]:
    """For comparing releases: 0.30, 0.30.0 and 0.30.0rc1 are equal."""
    text = re.match(r"\d+(?:\.\d+)*", version)[0]
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", text).split("."))


def snapshots(engine: str) -> list[str]:
    """The versions that have one, from the oldest to the newest."""
    found = [path.stem.removeprefix(f"{engine}-") for path in DATA.glob(f"{engine}-*.txt")]
    return sorted(found, key=number)


def render(engine: str, version: str, found: Interface) -> str:
    return "".join(
        [
            f"# {engine} {version}: the interfaces that PegaFlow depends on. Written by\n",
            "# `python -m tools.engine_api record`; do not edit.\n",
            *(f"{name}: {line}\n" for name, line in found.items()),
        ]
    )


def parse(text: str) -> Interface:
    """The interface of a snapshot's text."""
    lines = (line.partition(": ") for line in text.splitlines() if line[:1] not in ("", "#"))
    return {name: line for name, _, line in lines}


def load(engine: str, version: str) -> Interface:
    return parse(snapshot_path(engine, version).read_text())
