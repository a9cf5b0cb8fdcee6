#!/usr/bin/env bash
# Boots a Debian 12 with systemd as its first process, installs PegaFlow in it as docs/deploy.md says,
# and checks the unit's behavior: start, permissions, kill, stop. Not part of CI: it fetches about
# 60 Debian packages. usage: boot_unit.sh [--system DIR]
#   --system DIR   where the Debian tree is kept, made if it is not there; else in a temporary folder
# Needs root and: debootstrap systemd-container
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=tools/setup.sh
source tools/setup.sh

system=''
case ${1:-} in
    '') ;;
    --system) system=$(realpath -m "${2:?--system needs a folder}") ;;
    *) die "usage: tools/deploy/boot_unit.sh [--system DIR]" ;;
esac
[ "$(id -u)" = 0 ] || die "only root can boot a system"
for program in debootstrap systemd-nspawn; do
    command -v "$program" >/dev/null ||
        die "$program is missing: apt-get install debootstrap systemd-container"
done

work=$(mktemp -d /var/tmp/pegaflow-boot.XXXXXX)
root=$work/root
clean() {
    ! mountpoint -q "$root" || umount "$root"
    rm -rf --one-file-system "$work"
}
trap clean EXIT
[ -n "$system" ] || system=$work/system

if [ ! -x "$system/usr/bin/systemctl" ]; then
    say "deploy: a Debian 12 in $system"
    debootstrap --variant=minbase \
        --include=systemd,systemd-sysv,dbus,python3,libstdc++6,curl,procps,util-linux \
        bookworm "$system" >"$work/debootstrap.log" 2>&1 || {
        tail -n 20 "$work/debootstrap.log" >&2
        die "debootstrap failed"
    }
fi
mkdir "$root" "$work/upper" "$work/workdir"
mount -t overlay -o "lowerdir=$system,upperdir=$work/upper,workdir=$work/workdir" overlay "$root"

# ---- the steps of docs/deploy.md under "systemd", in this order
./dev bundle "$root/opt/pegaflow"
install -m 644 -D docs/deploy.md "$root/opt/pegaflow/docs/deploy.md"
install -m 644 deploy/systemd/pegaflow.sysusers "$root/usr/lib/sysusers.d/pegaflow.conf"
chroot "$root" systemd-sysusers
install -m 644 -D deploy/systemd/server.conf "$root/etc/pegaflow/server.conf"
install -m 644 deploy/systemd/pegaflow-server.service "$root/etc/systemd/system/"
install -m 644 deploy/systemd/pegaflow-keeper.service "$root/etc/systemd/system/"
install -m 644 -D deploy/systemd/keep.conf \
    "$root/etc/systemd/system/pegaflow-server.service.d/keep.conf"
# The only addition: a pool that fits anywhere.
sed -i 's/^pool-size = .*/pool-size = 256mb/' "$root/etc/pegaflow/server.conf"
chroot "$root" systemctl --quiet enable pegaflow-server

for unit in pegaflow-server pegaflow-keeper; do
    systemd-analyze verify --man=no --root="$root" "$unit.service"
    exposure=$(systemd-analyze security --offline=true --root="$root" --no-pager --json=off \
        "$unit.service" | sed -n 's/.*Overall exposure level.*: \([0-9.]*\) .*/\1/p')
    say "deploy: systemd-analyze security $unit: exposure $exposure (0 is best, 10 worst)"
    awk -v level="${exposure:-10}" 'BEGIN { exit !(level <= 2) }' ||
        die "$unit is exposed: $exposure"
done

# ---- boot; the machine checks itself and turns itself off
install -m 755 tools/deploy/look_at_unit.sh "$root/opt/look_at_unit.sh"
cat >"$root/etc/systemd/system/look.service" <<'END'
[Unit]
After=pegaflow-server.service
[Service]
Type=exec
ExecStart=/opt/look_at_unit.sh
ExecStopPost=/usr/bin/systemctl --no-block poweroff
StandardOutput=file:/var/report
StandardError=inherit
TimeoutStartSec=120
[Install]
WantedBy=multi-user.target
END
chroot "$root" systemctl --quiet enable look
say "deploy: booting it"
timeout 180 systemd-nspawn --quiet --boot --directory="$root" --machine="pegaflow-boot-$$" \
    --register=no --keep-unit --private-network </dev/null >"$work/boot.log" 2>&1 || {
    tail -n 20 "$work/boot.log" >&2
    die "the system did not boot and turn itself off"
}
cat "$root/var/report"
grep -qx 'all good' "$root/var/report" || die "the unit does not behave as docs/deploy.md describes"
