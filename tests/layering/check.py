#!/usr/bin/env python3
"""Read the include lines of the tree, and the length of its functions, against the module table.

usage: check.py [ROOT]      prints what is wrong, one line each; exit 1 if something is
       check.py --graph [ROOT]      prints which folder uses which
"""

import collections
import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

import functions
import imports
import table

SOURCES = (".h", ".cpp", ".cu", ".cuh")
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')
PYTHON_IMPORT = re.compile(r"\s*(?:import|from)\s+([\w.]+)")
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Include:
    name: str
    quoted: bool
    line: int


@dataclasses.dataclass
class Tree:
    """The source files of ours, by their path from the root."""

    root: pathlib.Path
    includes: dict[str, list[Include]]

    def exists(self, name: str) -> bool:
        """Whether an include names a file of ours; a schema stands for its header."""
        if name in table.GENERATED or name in self.includes:
            return True
        path = self.root / name
        return path.is_file() or (name.endswith(".capnp.h") and path.with_suffix("").is_file())


def read_tree(root: pathlib.Path) -> Tree:
    includes: dict[str, list[Include]] = {}
    for module in table.MODULES:
        for path in sorted((root / module).rglob("*")):
            if path.suffix not in SOURCES or not path.is_file():
                continue
            found = []
            text = path.read_text(errors="replace")
            for number, line in enumerate(text.splitlines(), start=1):
                if match := INCLUDE.match(line):
                    quoted, angled = match.groups()
                    found.append(Include(quoted or angled, quoted is not None, number))
            includes[path.relative_to(root).as_posix()] = found
    return Tree(root, includes)


def matches(name: str, patterns: Iterable[str]) -> bool:
    for pattern in patterns:
        if pattern.endswith("/*"):
            folder = pattern[:-1]
            if name.startswith(folder) and "/" not in name[len(folder) :]:
                return True
        elif (
            name == pattern or (pattern == "" or pattern.endswith("/")) and name.startswith(pattern)
        ):
            return True
    return False


def module_of(name: str) -> str | None:
    module = table.GENERATED.get(name) or name.split("/")[0]
    return module if module in table.MODULES and ("/" in name or name in table.GENERATED) else None


def library_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The library behind <name>; None for the standard library, C and the kernel."""
    for prefix, entry in table.LIBRARIES.items():
        if name == prefix or name.startswith(prefix) and prefix[-1] in "/e":
            return entry
    if "/" not in name or name.startswith(table.SYSTEM_FOLDERS):
        return None
    return (f"the unknown library of <{name}>", ())


def allowed_for(user: str) -> tuple[str, ...]:
    for folder, patterns in table.SUBFOLDERS.items():
        if user.startswith(folder):
            return patterns
    return table.MODULES[user.split("/")[0]]


def check_ours(tree: Tree, user: str, include: Include) -> Iterator[str]:
    module = module_of(include.name)
    if module is None:
        yield f'"{include.name}" does not begin with a module: write "module/file.h", or use <>'
        return
    if not tree.exists(include.name):
        yield f'"{include.name}" is not in the tree'
    name = f"{module}/{include.name}" if include.name in table.GENERATED else include.name
    if not matches(name, allowed_for(user)):
        yield f'{user.split("/")[0]} may not use "{include.name}"'


def check_foreign(tree: Tree, user: str, include: Include) -> Iterator[str]:
    if module_of(include.name) and tree.exists(include.name):
        yield f'<{include.name}> is ours: write "{include.name}"'
        return
    library = library_of(include.name)
    if library and not matches(user, library[1]):
        homes = " ".join(library[1]) or "no file; add it to tests/layering/table.py"
        yield f"{library[0]} may be named in {homes}"


def check_includes(tree: Tree) -> Iterator[str]:
    for user, includes in tree.includes.items():
        for include in includes:
            check = check_ours if include.quoted else check_foreign
            for problem in check(tree, user, include):
                yield f"{user}:{include.line}: {problem}"


def reached_from(tree: Tree, roots: Iterable[str]) -> list[str]:
    seen = {name for name in roots if name in tree.includes}
    todo = list(seen)
    while todo:
        for include in tree.includes[todo.pop()]:
            if include.quoted and include.name in tree.includes and include.name not in seen:
                seen.add(include.name)
                todo.append(include.name)
    return sorted(seen)


def check_public_headers(tree: Tree) -> Iterator[str]:
    """No KJ in what pyclient or router see of the client, directly or below it."""
    roots = set(table.PUBLIC_CLIENT_HEADERS)
    for user, includes in tree.includes.items():
        if user.split("/")[0] in ("pyclient", "router"):
            roots |= {include.name for include in includes if include.quoted}
    for name in reached_from(tree, roots):
        for include in tree.includes[name]:
            foreign = not include.quoted and include.name.startswith(("kj/", "capnp/"))
            if foreign or include.name.endswith(".capnp.h"):
                yield f"{name}:{include.line}: a public header of the client names {include.name}"
        code = COMMENT_OR_TEXT.sub(
            lambda match: "\n" * match.group().count("\n"),
            (tree.root / name).read_text(errors="replace"),
        )
        for number, line in enumerate(code.splitlines(), start=1):
            for hidden in table.HIDDEN_NAMESPACES:
                if re.search(rf"\b{hidden}::", line):
                    yield f"{name}:{number}: a public header of the client names {hidden}::"


def part_of(name: str) -> str:
    """A header and its source are one part; a class has its private side in NAME_impl.h."""
    return name.rpartition(".")[0].removesuffix("_impl")


def find_circle(uses: dict[str, set[str]]) -> list[str]:
    """Some parts of which each uses the next one and the last one the first; empty if none do."""
    done: set[str] = set()

    def walk(part: str, above: list[str]) -> list[str]:
        if part in above:
            return [*above[above.index(part) :], part]
        if part in done:
            return []
        for used in sorted(uses.get(part, ())):
            if circle := walk(used, [*above, part]):
                return circle
        done.add(part)
        return []

    for part in sorted(uses):
        if circle := walk(part, []):
            return circle
    return []


def check_circles(tree: Tree) -> Iterator[str]:
    """Inside a module of table.WITHOUT_CIRCLES no part uses one that is built upon it."""
    for module in table.WITHOUT_CIRCLES:
        uses: dict[str, set[str]] = {}
        for user, includes in tree.includes.items():
            if not user.startswith(f"{module}/"):
                continue
            part = part_of(user)
            for include in includes:
                if include.quoted and include.name.startswith(f"{module}/"):
                    uses.setdefault(part, set()).add(part_of(include.name))
            uses.get(part, set()).discard(part)
        if circle := find_circle(uses):
            yield f"{module}: a circle of includes: {' -> '.join(circle)}"


def floor_of(name: str) -> tuple[str, str]:
    """The module and the folder in it of a file; "*" for one directly in its module."""
    module, _, rest = name.partition("/")
    return module, rest.split("/")[0] if "/" in rest else "*"


def check_floors(tree: Tree) -> Iterator[str]:
    """Inside a module of table.FLOORS no folder uses one that is built upon it."""
    for user, includes in tree.includes.items():
        module, folder = floor_of(user)
        floors = table.FLOORS.get(module)
        if floors is None:
            continue
        if folder not in floors:
            yield f"{user}: {module}/{folder}/ is missing in FLOORS of tests/layering/table.py"
            continue
        for include in includes:
            used_module, used = floor_of(include.name)
            if not include.quoted or used_module != module or include.name not in tree.includes:
                continue
            if used in floors and floors.index(used) > floors.index(folder):
                yield f'{user}:{include.line}: {module}/{folder} may not use "{include.name}"'


def check_python(root: pathlib.Path) -> Iterator[str]:
    """No package that serves every engine imports one of them."""
    for package, forbidden in table.PYTHON_WITHOUT.items():
        for path in sorted((root / package).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                match = PYTHON_IMPORT.match(line)
                name = match[1] if match else ""
                if any(name == each or name.startswith(f"{each}.") for each in forbidden):
                    yield f"{path.relative_to(root)}:{number}: {package} may not import {name}"


def check_folders(tree: Tree) -> Iterator[str]:
    """No folder of the modules, tests left out, has more source files than one can look over."""
    counts = collections.Counter(name.rpartition("/")[0] for name in tree.includes)
    for folder, count in sorted(counts.items()):
        if not folder.startswith("tests/") and count > table.MOST_FILES:
            yield f"{folder}/: {count} source files, more than {table.MOST_FILES}"


def deepest_chain(tree: Tree) -> list[str]:
    """The longest chain of includes of ours, tests left out; each names the next one."""

    @functools.cache
    def below(name: str) -> tuple[str, ...]:
        used = (each.name for each in tree.includes[name] if each.quoted)
        chains = (below(each) for each in used if each in tree.includes and each != name)
        return (name, *max(chains, key=len, default=()))

    sources = (name for name in tree.includes if not name.startswith("tests/"))
    return list(max((below(name) for name in sources), key=len, default=()))


def check_depth(tree: Tree) -> Iterator[str]:
    chain = deepest_chain(tree)
    if len(chain) - 1 > table.MOST_DEPTH:
        yield f"a chain of more than {table.MOST_DEPTH} includes: {' -> '.join(chain)}"


def functions_of(path: pathlib.Path) -> list[functions.Function]:
    if path.suffix in SOURCES:
        return functions.cpp_functions(path.read_text(errors="replace"))
    return functions.python_functions(path.read_text()) if path.suffix == ".py" else []


def check_functions(root: pathlib.Path) -> Iterator[str]:
    """Each function fits on a page, so that it has one idea; tests and option tables left out."""
    for folder in table.SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            for each in functions_of(path) if path.is_file() else ():
                is_table = each.name in table.TABLE_FUNCTIONS.get(name, ())
                if each.lines > table.MOST_LINES and not is_table:
                    yield (
                        f"{name}:{each.line}: {each.name} has {each.lines} lines, more than "
                        f"{table.MOST_LINES}"
                    )


def print_graph(tree: Tree) -> None:
    """One line for each folder: those that its files include."""
    uses: dict[str, set[str]] = {}
    for user, includes in tree.includes.items():
        if user.startswith("tests/"):
            continue
        folder = user.rpartition("/")[0]
        used = {each.name.rpartition("/")[0] for each in includes if each.name in tree.includes}
        uses.setdefault(folder, set()).update(used - {folder})
    for folder, used in sorted(uses.items()):
        print(f"{folder}: {' '.join(sorted(used))}")


def long_files(root: pathlib.Path) -> Iterator[str]:
    for folder in (*table.MODULES, "demo", "tools"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (*SOURCES, ".py", ".capnp") and path.is_file():
                lines = path.read_text(errors="replace").count("\n")
                if lines > table.LINES_WARNED:
                    name = path.relative_to(root).as_posix()
                    yield f"{name}: {lines} lines: which second idea hides in it?"


def problems_in(root: pathlib.Path) -> list[str]:
    tree = read_tree(root)
    return [
        *check_includes(tree),
        *check_public_headers(tree),
        *check_circles(tree),
        *check_floors(tree),
        *check_python(root),
        *imports.check_imports(root),
        *check_folders(tree),
        *check_depth(tree),
        *check_functions(root),
    ]


def main(argv: list[str]) -> int:
    names = [each for each in argv if each != "--graph"]
    root = pathlib.Path(names[0] if names else ".").resolve()
    tree = read_tree(root)
    files = tree.includes
    if not files:
        print(f"layering: no source of ours under {root}", file=sys.stderr)
        return 1
    if "--graph" in argv:
        print_graph(tree)
        return 0
    for warning in long_files(root):
        print(f"warning: {warning}")
    problems = problems_in(root)
    for problem in problems:
        print(problem)
    lines = sum(len(includes) for includes in files.values())
    depth = len(deepest_chain(tree)) - 1
    print(
        f"layering: {len(files)} files, {lines} includes, chains of at most {depth}, "
        f"{len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
