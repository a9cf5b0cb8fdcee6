#!/usr/bin/env bash
# Puts files into the project's format, or lists those that are not in it.
# usage: format.sh write|check [FILE...]      without a FILE: all files that git does not ignore
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:?usage: format.sh write|check [FILE...]}
shift

clang_format=$(command -v clang-format-16 || command -v clang-format-18) || {
    echo 'format: clang-format-16 is missing; ./dev check installs it' >&2
    exit 1
}

all_files() {
    git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.py' '*.pyi'
}

cpp=() python=()
while IFS= read -r file; do
    [ -f "$file" ] || continue # deleted, and not yet committed
    case $file in
        *.h | *.cpp) cpp+=("$file") ;;
        *.py | *.pyi) python+=("$file") ;;
    esac
done < <(if [ $# -gt 0 ]; then printf '%s\n' "$@"; else all_files; fi)

status=0
if [ "$mode" = write ]; then
    [ "${#cpp[@]}" = 0 ] || "$clang_format" -i "${cpp[@]}"
    [ "${#python[@]}" = 0 ] || .venv/bin/ruff format --quiet "${python[@]}"
    # Import order is a lint rule in ruff, but a matter of format here.
    [ "${#python[@]}" = 0 ] || .venv/bin/ruff check --quiet --select I --fix "${python[@]}"
else
    [ "${#cpp[@]}" = 0 ] || "$clang_format" --dry-run -Werror --ferror-limit=3 "${cpp[@]}" || status=1
    [ "${#python[@]}" = 0 ] || .venv/bin/ruff format --quiet --diff "${python[@]}" || status=1
    [ "${#python[@]}" = 0 ] || .venv/bin/ruff check --quiet "${python[@]}" || status=1
    [ "$status" = 0 ] || echo "format: './dev fmt' fixes the formatting" >&2
fi
exit "$status"
