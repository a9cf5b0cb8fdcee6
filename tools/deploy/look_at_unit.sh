#!/usr/bin/env bash
# Runs in the system that boot_unit.sh boots: a line for each check, then `all good`.
set -uo pipefail
bad=0

# check TEXT COMMAND...: whether the command succeeds
check() {
    local text=$1
    shift
    if "$@"; then
        echo "ok    $text"
    else
        echo "BAD   $text"
        bad=1
    fi
}

of_unit() { systemctl show --value -p "$1" pegaflow-server; }

# The server needs a second; the limit is for a busy machine.
serves() {
    local tries
    for ((tries = 0; tries < 600; tries++)); do
        [ "$(curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:9091/health)" != 200 ] || return 0
        read -rt 0.1 <> <(:)
    done
    return 1
}

# status_has PATTERN: whether a line of the server's /proc status matches
status_has() { grep -qP "$1" "/proc/$(of_unit MainPID)/status"; }

has_nothing() {
    status_has '^CapBnd:\t0+$' && status_has '^NoNewPrivs:\t1$' && status_has '^Seccomp:\t2$'
}

# doctor_says PATTERN USER [GROUP]: whether a line of `pegaflow doctor`, run by that user, matches
doctor_says() {
    local said
    said=$(setpriv --reuid "$2" --regid "${3:-$2}" --clear-groups /opt/pegaflow/bin/pegaflow doctor 2>&1)
    grep -qE "$1" <<<"$said"
}

keeper() { systemctl show --value -p MainPID pegaflow-keeper; }

# A server that ends for good takes its keeper with it, a moment later.
keeper_ends() {
    local tries
    for ((tries = 0; tries < 100; tries++)); do
        [ "$(keeper)" != 0 ] || return 0
        read -rt 0.1 <> <(:)
    done
    return 1
}

is_served() { doctor_says '^ok +versions' "$@"; }
is_refused() { doctor_says '^PROBLEM +(socket|versions)' "$@"; }
modes_are() { [ "$(stat -c '%a %U %G' "$1")" = "$2" ]; }

check 'it serves after the boot' serves
check 'active' test "$(of_unit ActiveState)" = active
check 'the directory of the socket is 0750' modes_are /run/pegaflow '750 pegaflow pegaflow'
check 'the socket is 0660' modes_are /run/pegaflow/50055.sock '660 pegaflow pegaflow'
check 'no capability, no new privileges, a filter of system calls' has_nothing
check 'it goes first when memory is short' \
    test "$(cat "/proc/$(of_unit MainPID)/oom_score_adj")" = 500
check 'memory may be locked' test "$(of_unit LimitMEMLOCK)" = infinity
pegaflow=$(getent group pegaflow | cut -d: -f3)
check 'root is served' is_served 0
check 'a user of the list and the group is served' is_served 1000 "$pegaflow"
check 'a user of the group who is not in the list is refused' is_refused 1001 "$pegaflow"
check 'a user of the list who is not in the group is refused' is_refused 1000 1000

check 'the socket of the keeper is 0600' modes_are /run/pegaflow/50055.keeper '600 pegaflow pegaflow'
check 'the keeper holds the pool' doctor_says '^ok +keeper +holds the pool' 0
check 'the keeper goes first when memory is short' \
    test "$(cat "/proc/$(keeper)/oom_score_adj")" = 1000

kept_by=$(keeper)
directory=$(stat -c %i /run/pegaflow)
kill -KILL "$(of_unit MainPID)"
check 'after SIGKILL it serves again' serves
check 'restarted once by systemd' test "$(of_unit NRestarts)" = 1
check 'in the same directory' test "$(stat -c %i /run/pegaflow)" = "$directory"
check 'and its clients are served' is_served 1000 "$pegaflow"
check 'with the same keeper' test "$(keeper)" = "$kept_by"
check 'which holds the pool' doctor_says '^ok +keeper +holds the pool' 0
systemctl restart pegaflow-server
check 'after a restart it serves' serves
check 'with the same keeper again' test "$(keeper)" = "$kept_by"

started=$EPOCHSECONDS
systemctl stop pegaflow-server
check 'it stops within 10 s' test $((EPOCHSECONDS - started)) -le 10
check 'with exit status 0' test "$(of_unit Result) $(of_unit ExecMainStatus)" = 'success 0'
check 'the keeper ends with it, which frees the memory' keeper_ends
check 'the directory stays, the socket does not' test -d /run/pegaflow -a ! -e /run/pegaflow/50055.sock
systemctl start pegaflow-server
check 'started again it serves' serves

[ "$bad" = 0 ] || {
    journalctl --no-pager -n 60 -u pegaflow-server -u pegaflow-keeper
    exit 1
}
echo 'all good'
