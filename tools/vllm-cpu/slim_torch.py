#!/usr/bin/env python3
"""Turn the CUDA build of torch from PyPI into a CPU-only one, in place.

The PyPI wheel of torch for Linux x86-64 is a CUDA build: its libraries name
libcudart, libcudnn, libnccl, ... as dependencies, about 2.5 GB of packages that
a CPU-only run never calls.  This script replaces every CUDA library that the
CPU part of torch is linked to by a stub of a few kilobytes, and removes the
CUDA half of torch itself.  In the stubs each CUDA C function returns 100
(cudaErrorNoDevice), so torch.cuda.is_available() is False; a C++ function of
the removed half prints its name and aborts.

usage: slim_torch.py SITE_PACKAGES      (needs readelf, nm and gcc on PATH)
"""

import os
import pathlib
import subprocess
import sys
import tempfile

SYSTEM = (
    "libc.so",
    "libm.so",
    "libdl.so",
    "librt.so",
    "libpthread.so",
    "libgcc_s.so",
    "libstdc++.so",
    "ld-linux",
    "libgomp.so",
)
DROP = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
# functions that the load of torch calls, and that return a reference to a static object
STATIC_REF = ("_ZN4c10d15get_gil_checkerEv",)
# constructors that the load of torch calls (for a default argument) -> type_info of the class
CTOR = {"_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": "_ZTIN4c10d16ProcessGroupNCCL7OptionsE"}
KEEP_C10 = "libc10_cuda.so"

Symbol = tuple[str, bool, int]  # version (or ''), is it an object, its size


def sh(*cmd: str) -> str:
    return subprocess.run(cmd, check=True, text=True, capture_output=True).stdout


def needed(lib: pathlib.Path) -> list[str]:
    """The libraries that LIB names as dependencies."""
    return [
        ln.split("[")[1].rstrip("]\n")
        for ln in sh("readelf", "-d", str(lib)).splitlines()
        if "(NEEDED)" in ln
    ]


def undefined(lib: pathlib.Path) -> dict[str, str]:
    """name -> version (or '') of every undefined symbol of LIB."""
    out = {}
    for ln in sh("nm", "-D", "--undefined-only", str(lib)).splitlines():
        name, _, ver = ln.split()[-1].partition("@")
        out[name] = ver.lstrip("@")
    return out


def defined(lib: pathlib.Path) -> dict[str, tuple[bool, int]]:
    """name -> (is_object, size) of every symbol that LIB defines."""
    out = {}
    for ln in sh("readelf", "--dyn-syms", "-W", str(lib)).splitlines():
        f = ln.split()
        if len(f) >= 8 and f[6] != "UND" and f[4] in ("GLOBAL", "WEAK", "UNIQUE"):
            size = int(f[2], 0)
            out[f[7].split("@")[0]] = (f[3] in ("OBJECT", "TLS"), size)
    return out


def emit(path: pathlib.Path, soname: str, symbols: dict[str, Symbol], die: bool) -> None:
    """Write a stub library; with DIE its functions abort instead of returning an error."""
    asm = [".text"]
    versions = {}
    for i, (name, (ver, is_obj, size)) in enumerate(sorted(symbols.items())):
        versions.setdefault(ver, []).append(name)
        q = f'"{name}"'
        if name.startswith("_ZTI"):  # pybind11 reads the name in a type_info
            asm += [
                '.section .data.rel,"aw"',
                ".balign 16",
                f".globl {q}",
                f".type {q},@object",
                f".size {q},{max(size, 16)}",
                f"{q}:",
                ".quad _ZTVN10__cxxabiv117__class_type_infoE+16",
                f".quad .Ln{i}",
                f".skip {max(size, 16) - 16}",
                ".section .rodata",
                f'.Ln{i}: .asciz "{name[4:]}"',
                ".text",
            ]
        elif is_obj:
            asm += [
                ".bss",
                ".balign 16",
                f".globl {q}",
                f".type {q},@object",
                f".size {q},{max(size, 8)}",
                f"{q}:",
                f".skip {max(size, 8)}",
                ".text",
            ]
        elif name in STATIC_REF:
            asm += [
                f".globl {q}",
                f".type {q},@function",
                f"{q}:",
                f"leaq .Lb{i}(%rip),%rax",
                "ret",
                f".local .Lb{i}",
                f".comm .Lb{i},4096,16",
            ]
        elif name in CTOR:  # an object with nothing but a vtable
            asm += (
                [
                    f".globl {q}",
                    f".type {q},@function",
                    f"{q}:",
                    f"leaq .Lv{i}+16(%rip),%rax",
                    "movq %rax,(%rdi)",
                    "movq $0,8(%rdi)",
                    "ret",
                    '.section .data.rel,"aw"',
                    ".balign 16",
                    f".Lv{i}: .quad 0",
                    f'.quad "{CTOR[name]}"',
                ]
                + [f".quad .Lf{i}"] * 16
                + [".text", f".Lf{i}: xorl %eax,%eax", "ret"]
            )
        elif die:
            asm += [
                f".globl {q}",
                f".type {q},@function",
                f"{q}:",
                f"leaq .Ln{i}(%rip),%rdi",
                "jmp stub_die",
                ".section .rodata",
                f'.Ln{i}: .asciz "{name}"',
                ".text",
            ]
        elif name.endswith(("GetErrorString", "GetErrorName")):
            asm += [
                f".globl {q}",
                f".type {q},@function",
                f"{q}:",
                f"leaq .Ln{i}(%rip),%rax",
                "ret",
                ".section .rodata",
                f'.Ln{i}: .asciz "no CUDA: stub library"',
                ".text",
            ]
        else:
            asm += [f".globl {q}", f".type {q},@function", f"{q}:", "movl $100,%eax", "ret"]
    asm.append('.section .note.GNU-stack,"",@progbits')
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        (d / "s.s").write_text("\n".join(asm) + "\n")
        (d / "d.c").write_text(
            "#include <stdio.h>\n#include <stdlib.h>\n"
            '__attribute__((visibility("hidden"))) void stub_die(const char *n)\n'
            '{ fprintf(stderr, "CUDA stub called: %s\\n", n); abort(); }\n'
        )
        cmd = [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-o",
            str(path),
            str(d / "s.s"),
            str(d / "d.c"),
            f"-Wl,-soname,{soname}",
            "-lstdc++",
        ]
        script = "".join(
            f"{v} {{ global: {' '.join(chr(34) + n + chr(34) + ';' for n in ns)} }};\n"
            for v, ns in versions.items()
            if v
        )
        if script:
            (d / "v.map").write_text(script)
            cmd.append(f"-Wl,--version-script={d / 'v.map'}")
        subprocess.run(cmd, check=True)


def main() -> None:
    lib = pathlib.Path(sys.argv[1]) / "torch" / "lib"
    mark = lib / ".slim"
    if mark.exists():
        print("torch is slim already")
        return
    users = [
        lib / n
        for n in (
            "libtorch_global_deps.so",
            "libtorch_cpu.so",
            "libtorch.so",
            "libtorch_python.so",
            "libshm.so",
            KEEP_C10,
        )
    ]
    have = {p.name for p in lib.iterdir()}
    before = sum(p.stat().st_size for p in lib.rglob("*") if p.is_file())
    cuda_defs = {}
    for n in reversed(DROP):
        if (lib / n).exists():
            cuda_defs.update(defined(lib / n))
    real = set()
    for p in users + [lib / "libc10.so"]:
        real |= set(defined(p))
    want = {}  # soname -> names of CUDA libraries that are to be stubs
    for u in users:
        for n in needed(u):
            if not n.startswith(SYSTEM) and (n in DROP or n not in have):
                want.setdefault(n, {})
    for u in users:
        for name, ver in undefined(u).items():
            if name in real:
                continue
            if ver in want:  # libcudart.so.13, libcupti.so.13, ...
                want[ver][name] = (ver, False, 0)
            elif not ver and name in cuda_defs and "libtorch_cuda.so" in want:
                want["libtorch_cuda.so"][name] = ("",) + cuda_defs[name]
            elif not ver:
                for so, prefix in (
                    ("libnccl.so.2", "nccl"),
                    ("libcufile.so.0", "cuFile"),
                    ("libcudnn.so.9", "cudnn"),
                ):
                    if name.startswith(prefix) and so in want:
                        want[so][name] = ("", False, 0)
    for so, syms in want.items():
        tmp = lib / (so + ".stub")
        emit(tmp, so, syms, die=so == "libtorch_cuda.so")
        os.replace(tmp, lib / so)
        print(f"stub {so}: {len(syms)} symbols")
    for n in DROP[1:]:
        (lib / n).unlink(missing_ok=True)
    mark.write_text("CUDA libraries replaced by stubs\n")
    after = sum(p.stat().st_size for p in lib.rglob("*") if p.is_file())
    print(f"torch/lib: {before >> 20} MiB -> {after >> 20} MiB")


if __name__ == "__main__":
    main()
