"""The names that Python files import from one another, read without running anything.

A function that moves leaves imports of its old place behind, which show only when that file runs.
"""

import ast
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator

# Where imports are looked up, after the own folder of a script.
PATHS = ("", "pyclient", "tests/support", "tests/integration")
SKIPPED = {".git", ".venv", ".venv-gpu", "build", "node_modules"}


@dataclasses.dataclass
class Module:
    path: pathlib.Path
    nodes: list[ast.AST]
    names: set[str]
    is_open: bool  # Has names that only running it tells.
    error: SyntaxError | None = None

    def has(self, name: str) -> bool:
        if self.is_open or name in self.names:
            return True
        if self.path.name != "__init__.py":
            return False
        below = self.path.parent / name
        return is_package(below) or any(
            below.with_suffix(suffix).is_file() for suffix in (".py", ".pyi")
        )


def is_package(folder: pathlib.Path) -> bool:
    return (folder / "__init__.py").is_file()


def stored(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds, in whatever blocks it has, but not inside of functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from stored(child)


def read_module(path: pathlib.Path) -> Module:
    try:
        tree = ast.parse(path.read_text(), str(path))
    except SyntaxError as error:
        return Module(path, [], set(), True, error)
    names = {name for statement in tree.body for name in stored(statement)}
    is_open = "__getattr__" in names or "*" in names
    return Module(
        path, list(ast.walk(tree)), names | {"__doc__", "__file__", "__name__", "__path__"}, is_open
    )


class Imports:
    """The modules of a tree, each read once."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._read: dict[pathlib.Path, Module] = {}

    def files(self) -> list[pathlib.Path]:
        return sorted(
            pathlib.Path(folder, name)
            for top in self._root.iterdir()
            if top.is_dir() and top.name not in SKIPPED
            for folder, _, names in os.walk(top)
            for name in names
            if name.endswith(".py")
        )

    def module(self, path: pathlib.Path) -> Module:
        if path not in self._read:
            self._read[path] = read_module(path)
        return self._read[path]

    def find(self, name: str, user: pathlib.Path) -> Module | None:
        """Our module that ``name`` means in the file ``user``, or None for a foreign one."""
        own = () if is_package(user.parent) else (user.parent,)
        folders = (*own, *(self._root / path for path in PATHS))
        first = name.split(".")[0]
        for folder in folders:
            if not self._has(folder, first):
                continue
            place = folder.joinpath(*name.split("."))
            for path in (place / "__init__.py", place.with_suffix(".py")):
                if path.is_file() and path != user:
                    return self.module(path)
        return None

    @functools.cache  # noqa: B019 # lives as long as the one check
    def _has(self, folder: pathlib.Path, first: str) -> bool:
        return (folder / first).is_dir() or (folder / f"{first}.py").is_file()

    def source(self, node: ast.ImportFrom, user: pathlib.Path) -> str:
        """The whole name of the module of a ``from`` line; "" where it cannot be told."""
        if node.level == 0:
            return node.module or ""
        folder = user.parents[node.level - 1]
        for path in ("pyclient", ""):
            if folder.is_relative_to(self._root / path):
                parts = folder.relative_to(self._root / path).parts
                return ".".join((*parts, *((node.module or "").split(".") if node.module else ())))
        return ""

    def imported(self, user: Module) -> Iterator[tuple[int, str, Module, str]]:
        """Line, module and name of each name that a file imports from one of ours."""
        for node in user.nodes:
            if isinstance(node, ast.ImportFrom):
                name = self.source(node, user.path)
                module = self.find(name, user.path) if name else None
                for alias in node.names if module else ():
                    if alias.name != "*":
                        yield node.lineno, name, module, alias.name

    def attributes(self, user: Module) -> Iterator[tuple[int, str, Module, str]]:
        """The same for ``module.name``, where ``module`` means nothing else in the file."""
        modules = dict(self._modules_of(user))
        bound = {node.id for node in user.nodes if is_binding(node)}
        bound |= {node.arg for node in user.nodes if isinstance(node, ast.arg)}
        for node in user.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value
                if isinstance(base, ast.Name) and base.id in modules and base.id not in bound:
                    yield node.lineno, base.id, modules[base.id], node.attr

    def _modules_of(self, user: Module) -> Iterator[tuple[str, Module]]:
        for node in user.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname or "." not in alias.name:
                        module = self.find(alias.name, user.path)
                        if module:
                            yield alias.asname or alias.name, module
            elif isinstance(node, ast.ImportFrom):
                name = self.source(node, user.path)
                package = self.find(name, user.path) if name else None
                for alias in node.names:
                    # A name of the package itself may be anything; a file below it is a module.
                    if package is None or alias.name not in package.names:
                        module = self.find(f"{name}.{alias.name}", user.path) if name else None
                        if module:
                            yield alias.asname or alias.name, module


def is_binding(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def check_imports(root: pathlib.Path) -> Iterator[str]:
    """Each name that a file uses of another one of ours, and that is not there."""
    imports = Imports(root)
    for path in imports.files():
        user = imports.module(path)
        if user.error:
            yield f"{path.relative_to(root)}:{user.error.lineno}: not Python: {user.error.msg}"
        for line, name, module, wanted in (*imports.imported(user), *imports.attributes(user)):
            if not module.has(wanted):
                yield f"{path.relative_to(root)}:{line}: {name} has no name {wanted}"
