"""docs/configuration.md has the table that the server prints.

usage: test_configuration.py SERVER DOCS [--write]
"""

import pathlib
import subprocess
import sys

BEGIN = "<!-- table: pegaflow-server --print-options-markdown -->\n"
END = "<!-- end of table -->\n"


def main() -> int:
    server, docs = sys.argv[1], pathlib.Path(sys.argv[2])
    table = subprocess.run(
        [server, "--print-options-markdown"], check=True, capture_output=True, text=True
    ).stdout
    text = docs.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = before + BEGIN + table + END + after
    if "--write" in sys.argv[3:]:
        docs.write_text(wanted)
        return 0
    if text != wanted:
        print(f"{docs} is not what the server prints; write it anew:")
        print(f"  {' '.join(sys.argv)} --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
