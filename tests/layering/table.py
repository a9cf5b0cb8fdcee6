"""Who may use what: the module table of docs/architecture.md as data.

A pattern names a file (`transport/region.h`), a folder with all below it (`transport/host/`), or
the files directly in a folder (`transport/*`).
"""

# ---- our modules

MODULES: dict[str, tuple[str, ...]] = {
    "base": ("base/",),
    "capnp": ("base/", "capnp/", "transport/region.h"),
    "transport": ("base/", "transport/"),
    "engine": ("base/", "engine/"),
    "cluster": (
        "base/",
        "capnp/",
        "cluster/",
        "engine/ssd/proof.h",
        "engine/types/namespace_factors.h",
        "transport/",
    ),
    "directory": ("base/", "capnp/wire/peer_types.h", "directory/"),
    "client": (
        "base/",
        "capnp/",
        "client/",
        "transport/checksum.h",
        "transport/device.h",
        "transport/pool_peer.h",
        "transport/region.h",
        "transport/host/",
        "transport/cuda/",
    ),
    "server": ("base/", "capnp/", "cluster/", "directory/", "engine/", "server/", "transport/"),
    "index": ("base/", "index/"),
    "router": ("base/", "cluster/peer_proof.h", "index/", "router/"),
    # The native module is where the engine's side is put together, so it names concrete devices.
    "pyclient": (
        "base/",
        "client/",
        "pyclient/",
        "transport/device.h",
        "transport/host/host_device.h",
        "transport/cuda/cuda_device.h",
        "transport/cuda/gpu.h",
        "transport/network_check.h",
        "transport/network_device.h",
        "transport/ucx/nic.h",
        "transport/ucx/ucx_fabric.h",
    ),
    "harness": (
        "base/",
        "capnp/",
        "client/",
        "cluster/",
        "directory/",
        "engine/",
        "harness/",
        "server/",
        "transport/",
    ),
}
MODULES["perf"] = (*MODULES["harness"], "index/", "perf/", "pyclient/", "router/")
# Tests may use everything, and nothing uses them.
MODULES["tests"] = (*MODULES["perf"], "tests/")

# A backend knows the seams of its module and itself, not its siblings.
SUBFOLDERS: dict[str, tuple[str, ...]] = {
    f"transport/{name}/": ("base/", "transport/*", f"transport/{name}/")
    for name in ("host", "cuda", "tcp", "ucx", "sim", "disk")
}

# The folders of a module, from the lowest to the highest: a file uses its own folder and those
# before it. "*" stands for the files directly in the module.
FLOORS: dict[str, tuple[str, ...]] = {
    "base": ("*", "os", "program"),
    # The contract, block_store.h, stands between what it is made of and what implements it.
    "engine": (
        "types",
        "kinds",
        "tables",
        "kept",
        "eviction",
        "demand",
        "frames",
        "pool",
        "ssd",
        "rights",
        "*",
        "store",
    ),
    "cluster": ("*", "found"),
    "directory": ("redis", "*"),
    "index": ("memory", "*", "token_keys", "events", "placement"),
    "router": (
        "http",
        "body",
        "routing",
        "kv",
        "replicas",
        "upstream",
        "page",
        "config",
        "state",
        "watch",
        "request",
        "score",
        "exchange",
        "*",
    ),
    "server": (
        "pool",
        "chains",
        "cache",
        "fetches",
        "prefetch",
        "direct",
        "ssd",
        "rpc",
        "http",
        "*",
    ),
    "perf": (
        "lib",
        "disk",
        "events",
        "gpu",
        "index",
        "net",
        "replay",
        "placement",
        "server",
        "store",
        "fabric",
        "router",
        "*",
    ),
}

# Modules in which no part uses one that is built upon it.
WITHOUT_CIRCLES = (
    "base",
    "capnp",
    "client",
    "cluster",
    "directory",
    "engine",
    "harness",
    "index",
    "perf",
    "pyclient",
    "router",
    "server",
)

# Made by the build, so not found in the tree.
GENERATED = {"version.h": "base"}

# ---- foreign libraries: include prefix -> (name, where it may be named)

EVERYWHERE = ("",)
TESTS_AND_PERF = ("harness/", "perf/", "tests/")
KJ_HOMES = ("capnp/", "cluster/", "server/", "client/", *TESTS_AND_PERF)

LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fmt/": ("fmt", EVERYWHERE),
    "tl/expected.hpp": ("tl::expected", ("base/error.h",)),
    "spdlog/": ("spdlog", ("base/log.cpp",)),
    "CLI/": ("CLI11", ("base/program/options.cpp",)),
    "prometheus/": ("prometheus-cpp", ("base/",)),
    "xxhash.h": (
        "xxHash",
        (
            "base/session_name.cpp",
            "engine/kept/row_proof.cpp",
            "engine/types/hash.cpp",
            "engine/types/namespace_factors.cpp",
            "transport/checksum.cpp",
            "index/key.cpp",
            "index/text.cpp",
            "index/text_index.cpp",
            "index/token_keys/",
            "router/config/access.cpp",
            "router/routing/policy.cpp",
            *TESTS_AND_PERF,
        ),
    ),
    "xxh_x86dispatch.h": ("xxHash", ("transport/checksum.cpp",)),
    "sodium.h": (
        "libsodium",
        ("cluster/peer_proof.cpp", "directory/anchor.cpp", "router/body/cache_salt.cpp"),
    ),
    "openssl/": ("OpenSSL", ("directory/redis/redis_stream.cpp", "index/token_keys/sha256.cpp")),
    "kj/compat/http.h": ("kj-http", ("server/", *TESTS_AND_PERF)),
    "kj/": ("KJ", KJ_HOMES),
    "capnp/": ("Cap'n Proto", KJ_HOMES),
    "nlohmann/": (
        "nlohmann-json",
        ("server/", "index/events/kv_event_sources.cpp", *TESTS_AND_PERF),
    ),
    "pybind11/": ("pybind11", ("pyclient/",)),
    "Python.h": ("the Python C API", ("pyclient/",)),
    "doctest/": ("doctest", ("tests/",)),
    "ucp/": ("UCX", ("transport/ucx/",)),
    "uct/": ("UCX", ("transport/ucx/",)),
    "ucs/": ("UCX", ("transport/ucx/",)),
    "infiniband/": ("rdma-core", ("transport/ucx/",)),
    # The test compares it with our own declarations.
    "cuda.h": ("CUDA", ("transport/cuda/", "tests/unit/transport/")),
    "cuda_runtime": ("CUDA", ("transport/cuda/",)),
    "liburing.h": ("liburing", ("transport/disk/",)),
    "zmq.h": (
        "ZeroMQ",
        ("index/events/event_socket.cpp", "router/replicas/replica_socket.cpp", *TESTS_AND_PERF),
    ),
    "boost/": ("Boost", ("router/", *TESTS_AND_PERF)),
}

# The C library and the kernel; everything without a folder that is not named above is, too.
SYSTEM_FOLDERS = ("sys/", "linux/", "netinet/", "arpa/", "net/", "asm/", "sanitizer/")

# ---- headers that other modules see, and what may not be named in them

# What pyclient and router include of client/ is found by itself; these two are public by design.
PUBLIC_CLIENT_HEADERS = ("client/cache_session.h", "client/mover.h")
HIDDEN_NAMESPACES = ("kj", "capnp")

LINES_WARNED = 700

# ---- Python packages, and what they may not import: they serve every engine.

PYTHON_WITHOUT: dict[str, tuple[str, ...]] = {
    f"pyclient/pegaflow/{name}/": ("vllm", "sglang", "torch", "pegaflow.vllm", "pegaflow.connector")
    for name in ("api", "engine", "weights")
} | {"pyclient/pegaflow/sglang/": ("vllm", "pegaflow.vllm", "pegaflow.connector")}
MOST_FILES = 25  # Sources and headers directly in one folder.
MOST_DEPTH = 9  # Includes of ours in one chain.

# ---- functions

MOST_LINES = 60  # Of a function, from its first line to its last brace. Tests may be longer.
SOURCE_FOLDERS = (*(name for name in MODULES if name != "tests"), "demo", "examples", "tools")
# Functions that are tables: one statement an option, without a branch.
TABLE_FUNCTIONS = {
    "server/options.cpp": ("ServerOptions::declare",),
    "router/config/options.cpp": ("RouterOptions::declare",),
    "router/config/index_options.cpp": ("RouterOptions::declare_index",),
}
