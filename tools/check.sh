#!/usr/bin/env bash
# The stages of `./dev check`, which has set up the tools. Every stage runs, also after one failed.
#   usage: check.sh [--fast | --without-tests]
#     --fast leaves clang-tidy out, --without-tests its files of tests and benchmarks
set -euo pipefail
cd "$(dirname "$0")/.."
failed=()

# stage NAME COMMAND...
stage() {
    local name=$1 started=$SECONDS
    shift
    if "$@"; then
        printf 'ok    %-10s %4d s\n' "$name" $((SECONDS - started))
    else
        printf 'BAD   %-10s %4d s\n' "$name" $((SECONDS - started))
        failed+=("$name")
    fi
}

shell_scripts() {
    git ls-files --cached --others --exclude-standard -- dev .ci/run tools/bin '*.sh' | sort -u
}

stage format tools/format.sh check
stage layering python3 tests/layering/check.py .
stage text python3 tools/check_text.py
stage language python3 tools/check_language.py
if command -v shellcheck >/dev/null; then
    # shellcheck disable=SC2046 # no name of ours holds a blank
    stage shell shellcheck -x $(shell_scripts)
else
    echo 'note  shell scripts are not checked: shellcheck is not installed'
fi
if [ "${1:-}" != --fast ]; then
    builds=(build/check)
    [ ! -f tests/fuzz/meson.build ] || builds+=(build/fuzz)
    stage tidy python3 tools/tidy.py "$@" "${builds[@]}"
fi

[ "${#failed[@]}" = 0 ] || {
    printf 'check: failed: %s\n' "${failed[*]}" >&2
    exit 1
}
echo 'check: all good'
