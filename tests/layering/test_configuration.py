"""A page of docs/ has the table of options that a program prints.

usage: test_configuration.py PROGRAM PAGE [--write]
"""

import pathlib
import subprocess
import sys

BEGIN = "<!-- table: {} --print-options-markdown -->\n"
END = "<!-- end of table -->\n"


def main() -> int:
    program, docs = sys.argv[1], pathlib.Path(sys.argv[2])
    begin = BEGIN.format(pathlib.Path(program).name)
    table = subprocess.run(
        [program, "--print-options-markdown"], check=True, capture_output=True, text=True
    ).stdout
    text = docs.read_text()
    before, rest = text.split(begin)
    _, after = rest.split(END)
    wanted = before + begin + table + END + after
    if "--write" in sys.argv[3:]:
        docs.write_text(wanted)
        return 0
    if text != wanted:
        print(f"{docs} is not what the program prints; write it anew:")
        print(f"  {' '.join(sys.argv)} --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
