#!/usr/bin/env python3
"""Turn the CUDA build of torch from PyPI into a CPU-only one, in place.

usage: slim_torch.py SITE_PACKAGES      (needs readelf, nm and gcc on PATH)

PyPI's wheel of torch for Linux x86-64 is a CUDA build: its libraries name libcudart, libcudnn,
libnccl and so on as dependencies, 2.5 GB of packages that a CPU-only run never calls. Every CUDA
library that the CPU part of torch is linked to becomes a stub of a few kilobytes here, and the CUDA
half of torch itself is removed. In the stubs each C function returns 100 (cudaErrorNoDevice), so
torch.cuda.is_available() is False; a C++ function of the removed half prints its name and aborts.

All symbols are read from the installed files, so another version of torch works as long as loading
it needs no more special cases than those below; a new one shows as "CUDA stub called: <symbol>".
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable

# Libraries that every machine has.
SYSTEM = (
    *("libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux"),
    *("libgcc_s.so", "libstdc++.so", "libgomp.so"),
)
# The CUDA half of torch: the first is linked to and becomes a stub, the others are removed.
CUDA_HALF = (
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_nvshmem.so",
    "libcaffe2_nvrtc.so",
)
CPU_HALF = (
    *("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"),
    *("libshm.so", "libc10_cuda.so"),
)
# Symbols of these libraries have no version, so their name determines the library.
PREFIXES = {"nccl": "libnccl.so.2", "cuFile": "libcufile.so.0", "cudnn": "libcudnn.so.9"}

# Loading torch calls this; it returns a reference to a static object.
RETURNS_REFERENCE = ("_ZN4c10d15get_gil_checkerEv",)
# Loading torch constructs a default argument of this class: constructor -> its type_info.
CONSTRUCTORS = {"_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": "_ZTIN4c10d16ProcessGroupNCCL7OptionsE"}


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A name that a stub has to define."""

    version: str = ""
    is_object: bool = False
    size_bytes: int = 0


FUNCTION = """
.globl "{name}"
.type "{name}",@function
"{name}":
"""
OBJECT = """
.balign 16
.globl "{name}"
.type "{name}",@object
.size "{name}",{size}
"{name}":
"""
RETURN_NO_DEVICE = "movl $100,%eax\nret\n"
RETURN_TEXT = """
leaq .Ltext{n}(%rip),%rax
ret
.section .rodata
.Ltext{n}: .asciz "no CUDA: stub library"
.text
"""
DIE = """
leaq .Ltext{n}(%rip),%rdi
jmp stub_die
.section .rodata
.Ltext{n}: .asciz "{name}"
.text
"""
RETURN_REFERENCE = """
leaq .Lbytes{n}(%rip),%rax
ret
.local .Lbytes{n}
.comm .Lbytes{n},4096,16
"""
# An object with nothing but a table of 16 virtual functions that return 0.
CONSTRUCT = """
leaq .Ltable{n}+16(%rip),%rax
movq %rax,(%rdi)
movq $0,8(%rdi)
ret
.section .data.rel,"aw"
.balign 16
.Ltable{n}: .quad 0
.quad "{type_info}"
.rept 16
.quad .Lvirtual{n}
.endr
.text
.Lvirtual{n}: xorl %eax,%eax
ret
"""
# pybind11 reads the name in a type_info.
TYPE_INFO = """
.quad _ZTVN10__cxxabiv117__class_type_infoE+16
.quad .Ltext{n}
.skip {rest}
.section .rodata
.Ltext{n}: .asciz "{type_name}"
.text
"""
STUB_DIE = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((visibility("hidden"))) void stub_die(const char *name) {
  fprintf(stderr, "CUDA stub called: %s\\n", name);
  abort();
}
"""


def output_of(*command: str) -> list[str]:
    done = subprocess.run(command, check=True, text=True, capture_output=True)
    return done.stdout.splitlines()


def needed(library: pathlib.Path) -> list[str]:
    """The libraries that this one names as dependencies."""
    lines = output_of("readelf", "-d", str(library))
    return [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]


def undefined(library: pathlib.Path) -> dict[str, str]:
    """name -> version (or '') of every symbol that the library expects of others."""
    found = {}
    for line in output_of("nm", "-D", "--undefined-only", str(library)):
        name, _, version = line.split()[-1].partition("@")
        found[name] = version.lstrip("@")
    return found


def defined(library: pathlib.Path) -> dict[str, Symbol]:
    """Every symbol that the library exports."""
    found = {}
    for line in output_of("readelf", "--dyn-syms", "-W", str(library)):
        # number, value, size, type, binding, visibility, section, name
        words = line.split()
        if len(words) >= 8 and words[6] != "UND" and words[4] in ("GLOBAL", "WEAK", "UNIQUE"):
            found[words[7].split("@")[0]] = Symbol(
                is_object=words[3] in ("OBJECT", "TLS"), size_bytes=int(words[2], 0)
            )
    return found


def assembly_of(n: int, name: str, symbol: Symbol, *, die: bool) -> str:
    if name.startswith("_ZTI"):
        size = max(symbol.size_bytes, 16)
        return (
            '.section .data.rel,"aw"'
            + OBJECT.format(name=name, size=size)
            + TYPE_INFO.format(n=n, rest=size - 16, type_name=name[4:])
        )
    if symbol.is_object:
        size = max(symbol.size_bytes, 8)
        return f".bss{OBJECT.format(name=name, size=size)}.skip {size}\n.text\n"
    if name in RETURNS_REFERENCE:
        body = RETURN_REFERENCE.format(n=n)
    elif name in CONSTRUCTORS:
        body = CONSTRUCT.format(n=n, type_info=CONSTRUCTORS[name])
    elif die:
        body = DIE.format(n=n, name=name)
    elif name.endswith(("GetErrorString", "GetErrorName")):
        body = RETURN_TEXT.format(n=n)
    else:
        body = RETURN_NO_DEVICE
    return FUNCTION.format(name=name) + body


def version_script(symbols: dict[str, Symbol]) -> str:
    """The version of each symbol, for the linker."""
    by_version: dict[str, list[str]] = {}
    for name, symbol in symbols.items():
        if symbol.version:
            by_version.setdefault(symbol.version, []).append(f'"{name}";')
    return "".join(
        f"{version} {{ global: {' '.join(names)} }};\n" for version, names in by_version.items()
    )


def write_stub(path: pathlib.Path, soname: str, symbols: dict[str, Symbol], *, die: bool) -> None:
    """Write a library of that name; with ``die`` its functions abort instead of returning 100."""
    parts = [
        assembly_of(n, name, symbol, die=die)
        for n, (name, symbol) in enumerate(sorted(symbols.items()))
    ]
    with tempfile.TemporaryDirectory() as folder:
        assembly = pathlib.Path(folder, "stub.s")
        assembly.write_text(".text\n" + "".join(parts) + '.section .note.GNU-stack,"",@progbits\n')
        c_code = pathlib.Path(folder, "die.c")
        c_code.write_text(STUB_DIE)
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(assembly), str(c_code)]
        command += [f"-Wl,-soname,{soname}", "-lstdc++"]
        if script := version_script(symbols):
            versions = pathlib.Path(folder, "versions.map")
            versions.write_text(script)
            command.append(f"-Wl,--version-script={versions}")
        subprocess.run(command, check=True)


def wanted_stubs(lib: pathlib.Path) -> dict[str, dict[str, Symbol]]:
    """Library name -> the symbols that the CPU half of torch expects of it."""
    users = [lib / name for name in CPU_HALF]
    present = {path.name for path in lib.iterdir()}
    cuda_half: dict[str, Symbol] = {}
    for name in reversed(CUDA_HALF):
        if name in present:
            cuda_half |= defined(lib / name)
    real = {name for path in (*users, lib / "libc10.so") for name in defined(path)}

    stubs: dict[str, dict[str, Symbol]] = {
        name: {}
        for user in users
        for name in needed(user)
        if not name.startswith(SYSTEM) and (name in CUDA_HALF or name not in present)
    }
    for user in users:
        for name, version in undefined(user).items():
            if name in real:
                continue
            if version in stubs:  # its version is the library's name: libcudart.so.13
                stubs[version][name] = Symbol(version=version)
            elif not version and name in cuda_half and CUDA_HALF[0] in stubs:
                stubs[CUDA_HALF[0]][name] = cuda_half[name]
            elif not version:
                for prefix, library in PREFIXES.items():
                    if name.startswith(prefix) and library in stubs:
                        stubs[library][name] = Symbol()
    return stubs


def mebibytes(paths: Iterable[pathlib.Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file()) >> 20


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: slim_torch.py SITE_PACKAGES", file=sys.stderr)
        return 2
    lib = pathlib.Path(argv[0]) / "torch" / "lib"
    mark = lib / ".slim"
    if mark.exists():
        return 0
    before = mebibytes(lib.rglob("*"))
    for soname, symbols in wanted_stubs(lib).items():
        made = lib / (soname + ".stub")
        write_stub(made, soname, symbols, die=soname == CUDA_HALF[0])
        os.replace(made, lib / soname)
    for name in CUDA_HALF[1:]:
        (lib / name).unlink(missing_ok=True)
    mark.write_text("CUDA libraries replaced by stubs\n")
    print(f"setup: torch without CUDA: {before} MiB -> {mebibytes(lib.rglob('*'))} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
