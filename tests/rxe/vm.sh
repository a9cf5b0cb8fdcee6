#!/usr/bin/env bash
# Runs one command in a Linux guest that has RDMA cards in software (Soft-RoCE, rdma_rxe).
#
#   tests/rxe/vm.sh [options] [--] COMMAND [ARG...]
#
# For machines without RDMA in their kernel, and without KVM: the guest is a stock Debian kernel
# under qemu's emulation. Its root is this machine's root, shared read-only with a tmpfs on top: the
# command sees every file of the host and may write anywhere, but its writes are lost, except
# below the directories named with -w. The guest has no network card: no packet leaves it.
#
#   -t SECS   time limit of the command, boot not included (default 120): exit code 124
#   -m MIB    memory of the guest (default 2048; taken from the host as it is touched)
#   -c N      processors (default: those of the host)
#   -w DIR    share DIR read-write, at the same path (repeatable)
#   -C DIR    working directory of the command (default: the present one)
#   -e NAME   pass the environment variable NAME, or set it with NAME=VALUE (repeatable).
#             PEGA_*, UCX_*, PATH, HOME, LANG and LD_LIBRARY_PATH are always passed
#   -n TOPO   pair (default): rxe0 on rv0, 10.77.0.1, and rxe1 on rv1, 10.77.0.2, a veth pair in one
#             network namespace; packets between the two addresses do cross it
#             netns: namespaces "a" (rxe0, rv0) and "b" (rxe1, rv1); needs -K backports
#   -K WHICH  stable (default): this Debian's kernel; backports: that of trixie-backports, whose rxe
#             works in network namespaces
#   -k        print the kernel's messages too
#   -T        print times and memory on standard error at the end
#   --prepare fetch the kernel (70 MB, once) and make the initramfs, and run nothing
#
# Standard output and error of the command both come on standard output. Exit code: the command's;
# 124 time limit; 125 the guest did not boot or died; 77 it cannot be made here, with the reason in
# the last line (no qemu, no x86, a kernel that cannot be downloaded); 126 and 127 as in the shell.
#
# PEGA_RXE_CACHE  where kernels are kept (default build/rxe; 75 MB a kernel)
# PEGA_RXE_DEBS   .deb files of a kernel, in place of the download
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache_root=${PEGA_RXE_CACHE:-$(cd "$here/../.." && pwd)/build/rxe}
limit=120 mem=2048 cpus=$(nproc) cwd=$PWD topo=pair klog=0 timings=0 prepare_only=0 kernel=stable
# The MTU of the wire below the cards; RoCE uses 4096 of it.
mtu=4200
rw=() envs=()
# microvm boots half a second faster than pc.
machine=microvm,rtc=on
accel=tcg,thread=multi,tb-size=256 # MiB of translated code kept
# Without pclmulqdq: emulated it is a loop over bits, and the kernel would use it for the CRC of
# each packet. No 5-level page tables either.
cpu=max,-la57,-pclmulqdq

die() {
    echo "vm: $*" >&2
    exit 125
}
# A requirement that this machine lacks is a skip and not a failure.
skip() {
    echo "skipped: no guest with RDMA here: $*"
    exit 77
}
now() {
    local t=${EPOCHREALTIME/[.,]/}
    echo $((t / 1000))
}

while [ $# -gt 0 ]; do
    case $1 in
        -t) limit=$2; shift 2 ;;
        -m) mem=$2; shift 2 ;;
        -c) cpus=$2; shift 2 ;;
        -w) rw+=("$(realpath -e "$2")") || die "no such directory: $2"; shift 2 ;;
        -C) cwd=$(realpath -e "$2") || die "no such directory: $2"; shift 2 ;;
        -e) envs+=("$2"); shift 2 ;;
        -n) topo=$2; shift 2 ;;
        -K) kernel=$2; shift 2 ;;
        -k) klog=1; shift ;;
        -T) timings=1; shift ;;
        --prepare) prepare_only=1; shift ;;
        --) shift; break ;;
        -*) die "unknown option $1" ;;
        *) break ;;
    esac
done
[ $prepare_only = 1 ] || [ $# -gt 0 ] || die "no command (see the head of $0)"
case $topo in pair | netns) ;; *) die "unknown topology $topo" ;; esac

cache=$cache_root/$kernel
# shellcheck source=tests/rxe/kernel.sh
source "$here/kernel.sh"
[ "$(uname -m)" = x86_64 ] || skip "$(uname -m) is not x86_64"
prepare
[ $prepare_only = 0 ] || exit 0

# ---------------------------------------------------------------- this run
start=$(now)
run=$(mktemp -d /tmp/pega-rxe.XXXXXX) || exit 125
pid=
# shellcheck disable=SC2317 # called by the trap
cleanup() {
    [ -z "$pid" ] || { kill "$pid" 2>/dev/null; wait "$pid" 2>/dev/null; }
    rm -rf "$run"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The guest reads its command from this directory and writes its exit code there.
ctl=$run/ctl; mkdir "$ctl"
{
    # UCX 1.13 takes the type of an incoming UD packet from a field that only
    # mlx5 fills (ud_iface.h, uct_ud_iface_check_grh), and silently drops all of
    # rxe's that came over IPv4: connections that UD helps to set up would hang.
    echo "export UCX_UD_VERBS_ETH_DGID_CHECK=n"
    for v in $(compgen -e); do
        case $v in
            PEGA_* | UCX_* | LD_LIBRARY_PATH | PATH | LANG | HOME)
                printf 'export %s=%q\n' "$v" "${!v}"
                ;;
        esac
    done
    for v in ${envs[@]+"${envs[@]}"}; do
        case $v in
            *=*) printf 'export %s=%q\n' "${v%%=*}" "${v#*=}" ;;
            *) [ -z "${!v+x}" ] || printf 'export %s=%q\n' "$v" "${!v}" ;;
        esac
    done
    printf 'cd %q || exit 125\nexec' "$cwd"
    printf ' %q' "$@"; echo
} > "$ctl/cmd"
printf 'topo=%s\nmtu=%s\nname=%q\nlimit=%s\n' "$topo" "$mtu" "$(hostname)" "$limit" > "$ctl/conf"
# A share of the host's: directory, tag, further options.
shares=()
share() {
    shares+=(-fsdev "local,id=$2,path=$1,security_model=none,multidevs=remap$3"
        -device "virtio-9p-device,fsdev=$2,mount_tag=$2")
}
share / root ,readonly=on
share "$ctl" ctl ''
i=0
: > "$ctl/rw"
for d in ${rw[@]+"${rw[@]}"}; do
    share "$d" rw$i ''
    printf '%s\n' "$d" >> "$ctl/rw"; i=$((i + 1))
done
[ $i -le 6 ] || die "at most 6 directories with -w"     # microvm has 8 virtio slots
# Under emulation the guest's TSC is the host's.  Telling its rate is a must:
# left to calibrate it, about one boot in five on a busy machine took a wrong
# value or none, and hung.
khz=$(awk -F: '/^cpu MHz/ {printf "%d", $2 * 1000; exit}' /proc/cpuinfo)
# Slow under emulation and not needed: self-tests, keys, tracing, page scans.
slow=crypto_kdf108_init,init_blk_tracer,init_kprobe_trace,load_system_certificate_list,init_encrypted
slow+=,init_ima,init_evm,init_zswap,zswap_init
# shellcheck disable=SC2054 # commas of one word
boot=(console=ttyS0 panic=-1 nokaslr mitigations=off rodata=off audit=0 random.trust_cpu=on
    "tsc_early_khz=$khz" "lpj=$((khz * 4))" tsc=reliable no_timer_check rcupdate.rcu_expedited=1
    cryptomgr.notests=1 "initcall_blacklist=$slow")
level=1; [ $klog = 0 ] || level=7
# shellcheck disable=SC2054 # commas of one word
qemu=(qemu-system-x86_64 -M "$machine" -accel "$accel" -cpu "$cpu" -smp "$cpus" -m "$mem"
    -no-user-config -nodefaults -display none -no-reboot -nic none
    -chardev stdio,id=con,signal=off -serial chardev:con
    -device isa-debug-exit,iobase=0xf4,iosize=1
    -kernel "$cache/vmlinux" -initrd "$cache/initrd"
    -append "${boot[*]} loglevel=$level" "${shares[@]}")
usage=()
[ $timings = 0 ] || usage=(/usr/bin/time -q -o "$run/usage"
    -f 'qemu: %e s elapsed, %U s user, %S s system, %M KiB resident at most')
# A boot that does not reach the command is aborted and retried.
for try in 1 2 3; do
    # The guest enforces the command's limit itself and can report what hung; timeout
    # is for a guest that cannot.
    timeout -k 3 $((limit + 120)) ${usage[@]+"${usage[@]}"} "${qemu[@]}" < /dev/null &
    pid=$! until=$((SECONDS + 90))
    while [ ! -e "$ctl/started" ] && [ $SECONDS -lt $until ] && kill -0 $pid 2> /dev/null; do
        sleep 0.2
    done
    if [ ! -e "$ctl/started" ] && kill -0 $pid 2> /dev/null; then
        echo "vm: boot $try hangs; once more" >&2
        kill $pid; wait $pid; qrc=$?; pid=
        continue
    fi
    wait $pid; qrc=$?
    pid=
    break
done
if [ $timings = 1 ]; then
    {
        echo "vm: $(($(now) - start)) ms in all; guest's clock at the end of each stage, s:" \
            "$(head -1 "$ctl/times" 2>/dev/null)"
        sed -n '2,$p' "$ctl/times" 2>/dev/null | tr -s ' \n' ' '
        echo
        cat "$run/usage" 2>/dev/null
    } >&2
fi
if [ -s "$ctl/rc" ]; then exit "$(cat "$ctl/rc")"; fi
case $qrc in 124 | 137) echo "vm: time limit: guest killed" >&2; exit 124 ;; esac
echo "vm: the guest ended (qemu: $qrc) without an exit code; -k shows its kernel's messages" >&2
exit 125
