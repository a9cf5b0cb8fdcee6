#!/bin/busybox sh
# shellcheck shell=dash disable=SC2154,SC1091 # topo, mtu, name and limit are in /ctl/conf
# Process 1 of the guest that vm.sh boots (see there). It lives in the initramfs with a static
# busybox and the kernel's modules, and nothing else: all other files are in the host's root,
# which it mounts over 9p.
bb=/bin/busybox
t() { read -r up _ < /proc/uptime; times="$times $1=$up"; }
# The isa-debug-exit device ends qemu at once, without a message of the kernel.
off() {
    $bb printf '\0' | $bb dd of=/dev/port bs=1 seek=244 2>/dev/null
    echo b > /proc/sysrq-trigger
    while :; do $bb sleep 1; done
}
fail() {
    echo "vm guest: $*"
    [ ! -e /ctl/conf ] || echo 125 > /ctl/rc
    off
}

$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
times=; t kernel
cd /lib || fail "no modules"
while read -r m; do
    $bb insmod "$m" || fail "insmod $m failed"
done < list
t modules

$bb mkdir -p /ctl /lower /up /new
p9=trans=virtio,version=9p2000.L,msize=512000
$bb mount -t 9p -o $p9,cache=none ctl /ctl || fail "cannot mount ctl"
. /ctl/conf
# The files of the host that matter do not change during a run: cache them.
$bb mount -t 9p -o $p9,cache=loose,ro root /lower || fail "cannot mount the host's root"
$bb mount -t tmpfs -o size=80%,mode=755 up /up
$bb mkdir /up/u /up/w
$bb mount -t overlay -o lowerdir=/lower,upperdir=/up/u,workdir=/up/w root /new ||
    fail "cannot mount the overlay"
cd /new || fail "no new root"
$bb mount -t proc proc proc
$bb mount -t sysfs sys sys
$bb mount -t devtmpfs dev dev
$bb mkdir -p dev/pts dev/shm
$bb mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts dev/pts
$bb mount -t tmpfs -o mode=1777 shm dev/shm
$bb mount -t tmpfs -o mode=755 run run
$bb ln -s /proc/self/fd dev/fd
$bb ln -s fd/0 dev/stdin
$bb ln -s fd/1 dev/stdout
$bb ln -s fd/2 dev/stderr
i=0
while read -r d; do
    $bb mkdir -p ".$d"
    $bb mount -t 9p -o $p9,cache=mmap,access=any "rw$i" ".$d" || fail "cannot share $d"
    i=$((i + 1))
done < /ctl/rw
# Make it the root of the mount tree (not just a chroot), so that namespaces
# can be made below it.  This shell itself stays in the initramfs; its working
# directory is the new root.
$bb mount --move . /
t root

$bb hostname "$name"
sysctl() { echo "$2" > "./proc/sys/$1" 2>/dev/null; }
sysctl net/ipv6/conf/default/accept_dad 0
sysctl net/ipv6/conf/default/router_solicitations 0
# Soft-RoCE sends UDP packets; one that a full queue drops costs a whole
# retransmission time-out.
sysctl net/core/netdev_max_backlog 100000
sysctl net/core/rmem_default 8388608
sysctl net/core/rmem_max 33554432
sysctl net/core/wmem_max 33554432
sysctl net/ipv4/conf/all/rp_filter 0
sysctl net/ipv4/conf/default/rp_filter 0
sysctl net/ipv4/conf/default/accept_local 1
sysctl kernel/core_pattern core
ip() { $bb chroot . /usr/sbin/ip "$@"; }
rdma() { $bb chroot . /usr/bin/rdma "$@"; }
a=02:00:0a:4d:00:01 b=02:00:0a:4d:00:02
case $topo in
pair)
    # Two devices in one network namespace with a real wire between them: left
    # alone, a packet to one's own other address goes through lo, and Soft-RoCE
    # hands it back to the sending device.  So packets from one address to the
    # other get routing rules ahead of the local table.
    ip -batch - << END || fail "ip failed"
link set lo up
link add rv0 mtu $mtu address $a type veth peer name rv1 mtu $mtu address $b
addr add 10.77.0.1/24 dev rv0
addr add 10.77.0.2/24 dev rv1
link set rv0 up
link set rv1 up
neigh replace 10.77.0.2 lladdr $b dev rv0 nud permanent
neigh replace 10.77.0.1 lladdr $a dev rv1 nud permanent
route add 10.77.0.2 dev rv0 src 10.77.0.1 table 101
route add 10.77.0.1 dev rv1 src 10.77.0.2 table 102
rule add pref 101 iif lo from 10.77.0.1 to 10.77.0.2 lookup 101
rule add pref 102 iif lo from 10.77.0.2 to 10.77.0.1 lookup 102
rule add pref 200 lookup local
rule del pref 0
END
    rdma -b - << END || fail "rdma link add failed"
link add rxe0 type rxe netdev rv0
link add rxe1 type rxe netdev rv1
END
    ;;
netns)
    # The neighbors are entered: with an unknown one the first rdma_resolve_addr
    # in a namespace never returned (7.2).  Left in rdma's "shared" mode: under
    # "exclusive" the devices stay with the initial namespace, out of sight.
    ip -batch - << END || fail "ip failed"
link set lo up
netns add a
netns add b
link add rv0 mtu $mtu address $a netns a type veth peer name rv1 mtu $mtu address $b netns b
END
    ip -n a -batch - << END || fail "ip failed"
link set lo up
addr add 10.77.0.1/24 dev rv0
link set rv0 up
neigh replace 10.77.0.2 lladdr $b dev rv0 nud permanent
END
    ip -n b -batch - << END || fail "ip failed"
link set lo up
addr add 10.77.0.2/24 dev rv1
link set rv1 up
neigh replace 10.77.0.1 lladdr $a dev rv1 nud permanent
END
    ip netns exec a rdma link add rxe0 type rxe netdev rv0 || fail "rdma link add failed"
    ip netns exec b rdma link add rxe1 type rxe netdev rv1 || fail "rdma link add failed" ;;
esac
t net

ulimit -l unlimited; ulimit -c 0
$bb stty -F /dev/console -opost 2>/dev/null
$bb mkdir -p run/pega-rxe && $bb cp /ctl/cmd run/pega-rxe/cmd
: > /ctl/started
# At the time limit: print what each process waits for.
( $bb sleep "$limit"
    echo; echo "vm guest: time limit of $limit s; processes:"
    $bb chroot . /bin/ps -eLo pid,tid,stat,wchan:28,time,args --sort=pid 2>/dev/null |
        $bb grep -v '\[.*\]$'
    echo 124 > /ctl/rc; off ) &
$bb setsid $bb chroot . /bin/bash /run/pega-rxe/cmd < /dev/null
rc=$?
t command
while read -r d; do $bb umount ".$d" 2>/dev/null; done < /ctl/rw
{ echo "$times"; $bb grep -E 'MemTotal|MemAvailable' ./proc/meminfo; } > /ctl/times
echo $rc > /ctl/rc
off
