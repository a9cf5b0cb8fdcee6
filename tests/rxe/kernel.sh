# shellcheck shell=bash
# Sourced by vm.sh: the guest's kernel and initramfs, made once and kept in $cache.
# shellcheck disable=SC2154 # here, cache, kernel, die and skip are vm.sh's

# In the order of insertion; their dependencies are added.  One that a kernel
# does not have may be missing if it ends in "?".  crc32_generic is what
# rdma_rxe requests from the crypto layer by name (modules.dep does not list it);
# crc32_pclmul is left out on purpose, see above.
modules="virtio_mmio 9pnet_virtio 9p overlay crc32_generic? rdma_rxe rdma_ucm veth sch_netem"

download() { # into the present directory
    local apt=(-o APT::Sandbox::User=root) img p
    case $kernel in
        stable) ;;
        backports)
            # A list of sources of its own: the machine's apt set-up stays as it is.
            mkdir -p lists/partial
            # From the same mirror as the machine's own list.
            local mirror
            # shellcheck disable=SC2016 # apt's own variable
            mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
                grep -m1 -E '/debian/?$') || {
                echo "vm: apt's sources name no Debian archive"
                return 1
            }
            echo "deb $mirror trixie-backports main" > src.list
            apt+=(-o "Dir::Etc::sourcelist=$PWD/src.list" -o Dir::Etc::sourceparts=-
                -o "Dir::State::lists=$PWD/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
                -o APT::Default-Release=trixie-backports)
            apt-get "${apt[@]}" update -qq || return 1 ;;
        *) die "unknown kernel $kernel" ;;
    esac
    depends() {
        apt-cache "${apt[@]}" depends "$1" 2>/dev/null |
            awk -v w="$2" '$1 == "Depends:" && $2 ~ w {print $2; exit}'
    }
    img=$(depends linux-image-amd64 '^linux-image-')
    if [ -z "$img" ]; then apt-get update -qq; img=$(depends linux-image-amd64 '^linux-image-'); fi
    [ -n "$img" ] || { echo "vm: apt knows no linux-image-amd64"; return 1; }
    local pkgs=("$img")
    # Newer kernels come in parts.
    for p in '^linux-binary-' '^linux-modules-'; do
        p=$(depends "$img" "$p")
        [ -z "$p" ] || pkgs+=("$p")
    done
    apt-get "${apt[@]}" download -qq "${pkgs[@]}" ||
        { apt-get "${apt[@]}" update -qq && apt-get "${apt[@]}" download -qq "${pkgs[@]}"; }
}

prepare() {
    mkdir -p "$cache" || die "cannot make $cache"
    local stamp work kver image f m
    stamp="$modules $(sha256sum < "$here/guest-init.sh")"
    exec 9> "$cache/lock"; flock 9                 # two runs may start at once
    if [ "$(cat "$cache/stamp" 2>/dev/null)" = "$stamp" ] && [ -s "$cache/vmlinux" ] &&
        [ -s "$cache/initrd" ]; then
        exec 9>&-; return
    fi
    for f in qemu-system-x86_64 busybox cpio depmod modprobe strip python3 zstd xz ip rdma; do
        command -v $f > /dev/null || skip "$f is missing: apt-get install -y --no-install-recommends" \
            "qemu-system-x86 busybox-static cpio kmod binutils python3 zstd xz-utils iproute2"
    done
    work=$(mktemp -d "$cache/work.XXXXXX") || exit 125
    if [ "$(cat "$cache/modules" 2>/dev/null)" != "$modules" ] || [ ! -s "$cache/vmlinux" ]; then
        mkdir "$work/deb" "$work/root"
        if [ -n "${PEGA_RXE_DEBS:-}" ]; then
            # shellcheck disable=SC2086 # several
            cp $PEGA_RXE_DEBS "$work/deb/"
        else
            (cd "$work/deb" && download) >&2 || skip "the kernel cannot be downloaded"
        fi
        # Only modules that may be needed: unpacking is quick, writing 4000 modules is not.
        for f in "$work"/deb/*.deb; do
            dpkg --fsys-tarfile "$f" | tar -x -C "$work/root" --wildcards --wildcards-match-slash \
                '*/vmlinuz*' '*/modules.order' '*/modules.builtin*' '*/kernel/drivers/infiniband/*' \
                '*/kernel/drivers/virtio/*' '*/kernel/drivers/net/veth.ko*' '*/kernel/net/*' \
                '*/kernel/fs/*' '*/kernel/crypto/*' '*/kernel/lib/*' '*/kernel/arch/x86/*' \
                2> "$work/tar.err"
        done
        [ -d "$work/root/lib/modules" ] ||
            { mkdir -p "$work/root/lib" && mv "$work/root/usr/lib/modules" "$work/root/lib/"; } ||
            die "no modules in the kernel's packages"
        kver=$(ls "$work/root/lib/modules")
        image=$(find "$work/root" -type f -name 'vmlinuz*' | head -1)
        # qemu starts an uncompressed ELF kernel straight away through its PVH
        # entry; unpacking the bzImage's payload under emulation costs seconds.
        python3 - "$image" "$work/vmlinux" << 'PY' || die "cannot unpack the kernel image"
import lzma, struct, subprocess, sys, zlib
data = open(sys.argv[1], 'rb').read()
start = (data[0x1f1] + 1) * 512 + struct.unpack_from('<I', data, 0x248)[0]
payload = data[start:start + struct.unpack_from('<I', data, 0x24c)[0]]
if payload[:6] == b'\xfd7zXZ\x00':
    elf = lzma.LZMADecompressor().decompress(payload)
elif payload[:4] == b'\x28\xb5\x2f\xfd':                       # its size in 4 bytes follows it
    zstd = subprocess.run(['zstd', '-dcq'], input=payload[:-4], stdout=subprocess.PIPE, check=True)
    elf = zstd.stdout
else:
    elf = zlib.decompressobj(31).decompress(payload)
assert elf[:4] == b'\x7fELF', 'not an ELF kernel'
open(sys.argv[2], 'wb').write(elf)
PY
        depmod -b "$work/root" "$kver" 2> "$work/depmod.err" ||
            die "depmod failed: $(cat "$work/depmod.err")"
        mkdir -p "$work/mods/lib"
        for m in $modules; do
            modprobe -d "$work/root" -S "$kver" --show-depends "${m%\?}" 2> /dev/null ||
                case $m in *\?) ;; *) echo "vm: no module $m" >&2; exit 1 ;; esac
        done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' > "$work/list" || exit 125
        while read -r m; do
            f=$(basename "$m"); f=${f%.xz}; f=${f%.zst}
            case $m in
                *.xz) xz -dc "$m" ;;
                *.zst) zstd -dcq "$m" ;;
                *) cat "$m" ;;
            esac > "$work/mods/lib/$f" || die "cannot unpack $m"
            # Without its signature the kernel need not check it (RSA under emulation).
            strip --strip-debug "$work/mods/lib/$f" || die "cannot strip $f"
            echo "$f" >> "$work/mods/lib/list"
        done < "$work/list"
        (cd "$work/mods" && find . | cpio -o -H newc --quiet -R 0:0) > "$work/mods.cpio" ||
            die "cpio failed"
        mv "$work/vmlinux" "$work/mods.cpio" "$cache/" && echo "$modules" > "$cache/modules"
        echo "vm: kernel $kver prepared in $cache" >&2
    fi
    mkdir -p "$work/fs"/{bin,dev,proc,sys}
    cp "$(command -v busybox)" "$work/fs/bin/busybox"
    ! readelf -lW "$work/fs/bin/busybox" | grep -q INTERP ||
        skip "busybox is not static: apt-get install busybox-static"
    cp "$here/guest-init.sh" "$work/fs/init"; chmod 755 "$work/fs/init"
    # Archives may follow each other.  Left uncompressed: nothing to unpack in the guest.
    (cd "$work/fs" && find . | cpio -o -H newc --quiet -R 0:0) > "$work/init.cpio" ||
        die "cpio failed"
    if ! { cat "$work/init.cpio" "$cache/mods.cpio" > "$work/initrd" &&
        mv "$work/initrd" "$cache/initrd" && echo "$stamp" > "$cache/stamp"; }; then
        die "cannot write to $cache"
    fi
    rm -rf "$work"
    exec 9>&-
}
