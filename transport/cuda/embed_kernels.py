#!/usr/bin/env python3
"""Write a C++ file that holds a fat binary.

usage: embed_kernels.py FATBIN OUTPUT.cpp
"""

import pathlib
import sys


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    image = pathlib.Path(argv[0]).read_bytes()
    if not image:
        print(f"{argv[0]} is empty", file=sys.stderr)
        return 1
    numbers = ",".join(map(str, image))
    pathlib.Path(argv[1]).write_text(
        '#include "transport/cuda/kernel_image.h"\n'
        "namespace pegaflow::cuda {\n"
        f"alignas(64) static constexpr unsigned char kImage[] = {{{numbers}}};\n"
        "std::span<const std::byte> kernel_image() noexcept {\n"
        "  return std::as_bytes(std::span(kImage));\n"
        "}\n"
        "}  // namespace pegaflow::cuda\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
