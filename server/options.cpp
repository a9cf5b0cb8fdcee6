#include "server/options.h"

#include <charconv>

#include "base/units.h"

namespace pegaflow::server {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

void ServerOptions::declare(OptionTable& table) {
  table.text("addr", addr,
             "Where engines find this server: HOST:PORT names the Unix socket PORT.sock in "
             "$PEGAFLOW_RUNTIME_DIR (else /run/pegaflow, else $XDG_RUNTIME_DIR/pegaflow), "
             "unix:/path/x.sock names it directly. Nothing listens on TCP.");
  table.text("http-addr", http_addr,
             "HOST:PORT of /health, /metrics, /instances and POST /cache/memory/cleanup; port 0 "
             "picks one and logs it.");
  table.text("http-token-file", http_token_file,
             "A file with a token that POST requests over TCP must carry as `Authorization: Bearer "
             "TOKEN`, also from this machine. Without it they are rejected; the Unix socket beside "
             "that of --addr (PORT.http) needs no token.");
  table.bytes("pool-size", pool_size_bytes, std::uint64_t{1} << 20, std::uint64_t{1} << 46,
              "Memory for cached blocks. The default is 30gb or half of the free memory, whichever "
              "is less.");
  table.flag("use-hugepages", use_hugepages,
             "Refuse to start without huge pages for the whole pool. They are used anyway where "
             "enough are reserved.");
  table.text("numa", numa,
             "Where the pool lies on a machine with several NUMA nodes. auto: a part on each, and "
             "pages near the engine's worker that writes them; interleave: page by page over all "
             "of them; off: where the kernel puts it. With one NUMA node they are the same.");
  table.duration("pool-wait", pool_wait, Duration::zero(), minutes(60),
                 "How long to wait for memory that clients of a previous server still hold: they "
                 "unmap it within a second, but a stopped client has to be ended by hand.");
  table.text("keep", keep,
             "Whether the pool outlives this server, so that the next one at this --addr continues "
             "with its blocks and engines keep their mapping. no: its memory is freed. yes: a "
             "small process, pegaflow-keeper, holds it, also after a stop, until "
             "`pegaflow-server --release`. external: the same with a keeper that something else "
             "starts, such as systemd or Kubernetes; see docs/keep.md.");
  table.flag("release", release,
             "End the keeper at --addr and free the memory that it holds, and start no server.");
  table.text("socket-group", socket_group,
             "Group of the socket and of a directory made for it, so that engines of other users "
             "can reach it; their uids go into --allow-uid.");
  table.list("allow-uid", allow_uid,
             "Users whose processes may connect, beside root and the server's own user. All of "
             "them share the pool, so they have to trust each other.");
  table.text("ready-file", ready_file,
             "A file that is written once the server is ready: JSON with socket, http, pid and, if "
             "other nodes are configured, peer_listen.");
  table.text("log-level", log_level, "trace, debug, info, warn, error or off.");

  table.integer("max-connections", max_connections, 1, 65536,
                "Limit of open connections. Beyond it, connections without a hello are closed, "
                "oldest first, and then new ones. An engine needs two.");
  table.duration("hello-timeout", hello_timeout, milliseconds(10), minutes(10),
                 "A connection without a hello by then is closed. A client sends it at once.");
  table.integer("instance-share-percent", instance_share_percent, 1, 100,
                "The share of the pool that the claims and pins of one engine may hold, so that "
                "two engines can always load at once.");
  table.integer("node-share-percent", node_share_percent, 1, 100,
                "The share of the pool that all claims and pins together may hold. The rest stays "
                "evictable, so that saves continue.");
  table.duration("reservation-timeout", reservation_timeout, milliseconds(100), minutes(60),
                 "A save that is not published by then is dropped. A copy takes milliseconds; this "
                 "limit is for an engine that hangs.");
  table.text("eviction", eviction,
             "Which block is evicted when the pool is full: " + engine::eviction_names() +
                 ". The default is the one with the most hits over many sizes and workloads; see "
                 "docs/operations.md.");
  table.flag("enable-lfu-admission", enable_lfu_admission,
             "The same as --eviction weighted-lru: how often a block was used counts.");
  table.flag("disable-lfu-admission", disable_lfu_admission,
             "The same as --eviction lru: only how long ago a block was used counts.");
  table.list("metric-hll-windows", metric_windows,
             "Windows, from 1m to 7d and eight at most, over which /metrics reports hit rates, "
             "their ceilings and working sets; see docs/operations.md.");

  table.list("peers", peers,
             "HOST:PORT of the --peer-listen of each other node, 64 at most. Blocks that are "
             "missing here are requested from all of them. The list may contain this node, so that "
             "all nodes can use the same list.");
  table.text("peer-listen", peer_listen,
             "HOST:PORT where other nodes request blocks from this one; port 0 picks one and logs "
             "it. Without it no other node can read from this one.");
  table.text("peer-fabric-listen", peer_fabric_listen,
             "IP:PORT from which other nodes read the bytes. By default the host of --peer-listen "
             "and any port; needed where that is 0.0.0.0, since this address is sent to peers.");
  table.text(
      "peer-secret-file", peer_secret_file,
      "A file with a secret of 16 bytes or more, the same on all nodes and not readable by other "
      "users, or with two secrets and a blank line between them while one replaces the other. It "
      "is read again when it changes. Nodes prove to each other that they have the secret and "
      "never send it. Without it any host that reaches --peer-listen may read the cache. Routers "
      "need it for /journal, /blocks, /links and /prefetch, which are off without it.");
  table.duration(
      "peer-deadline", peer_deadline, milliseconds(1), seconds(10),
      "How long a lookup or a claim waits for a peer's response: below the 20 ms that the "
      "connector waits for a claim. A peer that misses it receives no further requests until it "
      "responds, and counts as lost after three times this long, at least 500 ms.");
  table.bytes(
      "prefetch-bytes", prefetch_bytes, 0, std::uint64_t{1} << 46,
      "Bytes of the pool that a router may have filled with blocks of other nodes and disks "
      "before an engine requests them; they evict only other copies of that sort. 0: an "
      "eighth of the pool.");
  table.duration("fetch-deadline", fetch_deadline, milliseconds(10), seconds(8),
                 "How long a fetch from other nodes may take, from the claim on; blocks that have "
                 "not arrived by then are computed. At most 8 s, because peers lend for 10 s.");
  table.list(
      "nics", nics,
      "RDMA cards for reading from other nodes: mlx5_0, mlx5_0:1 for one port, mlx5_* for all "
      "whose names begin so; none: sockets only. The default is every card whose link is up.");
  table.list("deny-nics", deny_nics,
             "RDMA cards that are not used, in the syntax of --nics: for example those of a "
             "storage network.");
  table.flag("require-rdma", require_rdma,
             "Refuse to start without RDMA, and use no TCP sockets for blocks, neither to read "
             "from other nodes nor to serve them.");
  table.text("direct-pool", direct_pool,
             "Which blocks of other nodes' pools a worker with pegaflow.direct_nics reads into its "
             "engine's memory itself, past the pool of this node: auto: blocks that no other "
             "request needed lately, if their pieces have 32 KiB or more; force: all, for tests; "
             "off: none.");
  table.text("ucx-library", ucx_library,
             "The file libucp.so.0 of the UCX that drives RDMA cards, 1.13 or newer, with UCX's "
             "other libraries beside it: a vendor's, conda's or your own build. The default is the "
             "one that the system finds.");

  table.list(
      "directory", directory,
      "redis[s]://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE] of each Redis or Valkey server of "
      "the directory, which tells this node whom to ask in a cluster of more than some 16 "
      "nodes; the same list on all nodes. It needs --peer-secret-file and --peer-networks; "
      "see docs/directory.md.");
  table.text("directory-secret-file", directory_secret_file,
             "A file with the password for the servers of --directory that have none in their "
             "address, or with a user and a password on two lines; other users may not read it.");
  table.text("directory-ca-file", directory_ca_file,
             "The certificates that rediss:// servers are trusted by, as PEM; by default those of "
             "the system.");
  table.integer("directory-buckets", directory_buckets, 1 << 8, std::int64_t{1} << 32,
                "Sorted sets at each server of --directory, a power of two; it counts when the "
                "server is empty. Memory is least at 64 anchors each: see docs/directory.md.");
  table.list("peer-networks", peer_networks,
             "ADDRESS/BITS of the networks of the nodes. A node that --directory names is dialed "
             "only if its address is in one of them.");

  table.list("ssd-cache-path", ssd_cache_path,
             "Files, or directories for a file each, that keep blocks which leave the pool; one on "
             "each disk. They outlive the server: see docs/ssd.md. Without it there is no SSD "
             "tier.");
  table.bytes("ssd-cache-capacity", ssd_cache_capacity_bytes, std::uint64_t{16} << 20,
              std::uint64_t{1} << 50,
              "Bytes of all --ssd-cache-path together, allocated at the first start. Another value "
              "at a later start resizes the files; blocks behind a new end are lost.");
  table.bytes("ssd-segment-size", ssd_segment_bytes, std::uint64_t{1} << 20, std::uint64_t{1} << 30,
              "The unit in which a new file is divided and its oldest blocks are dropped. A block "
              "of more than a quarter of it is not stored.");
  table.bytes(
      "ssd-index-memory", ssd_index_bytes, 0, std::uint64_t{1} << 50,
      "The memory of the indexes of all disks together, 46 bytes for each block; 0: as much "
      "as the disks need. If it is not enough, the oldest blocks are dropped before the "
      "disks are full.");
  table.bytes("ssd-write-budget", ssd_write_budget_bytes, 0, std::uint64_t{1} << 60,
              "Bytes of blocks that may be written a day, to spare the disks; 0: no limit. Blocks "
              "that were used since they were saved go first, then those that are saved again, "
              "then those near the start of a prompt.");
  table.bytes("ssd-write-ahead", ssd_write_ahead_bytes, 0, std::uint64_t{1} << 60,
              "Blocks are written to a disk when so many bytes of saves would evict them. More "
              "than what an engine saves at once, so that no block is evicted unwritten; the size "
              "of the pool: at once, so that a killed server loses least. 0: the larger of 64mb "
              "and a 20th of the pool, and at most half of it.");
  table.text("ssd-io", ssd_io,
             "How the disks are driven: uring, threads, or auto, which takes threads where a "
             "container forbids io_uring.");
  table.duration("ssd-drain", ssd_drain, milliseconds(0), minutes(60),
                 "How long a server that is stopped goes on writing the blocks of its pool to the "
                 "disks, the last used first.");
  table.flag("ssd-format", ssd_format,
             "Overwrite files of --ssd-cache-path that are damaged or belong to another program, "
             "which are refused otherwise.");
  table.flag(
      "ssd-serve-before-peers", ssd_serve_before_peers,
      "Serve blocks of an earlier process, on disks and in a kept pool, at once, although a peer "
      "that is not connected may have reset their namespace meanwhile. Without it they wait for "
      "all peers.");

  const char* const no_device = "the server uses no GPU; each engine drives its own copies.";
  table.ignored("devices", true, no_device);
  table.ignored("device", true, no_device);
  table.ignored("hint-value-size", true, "each engine reports the size of its pages.");
  table.ignored("metric-hll-bucket-bits", true,
                "sketches have 4,096 registers, for a standard error below 2 %.");
  table.ignored("metrics-addr", true, "metrics are served at --http-addr.");
  const char* const no_queue =
      "reads and writes of the SSD tier are limited by bytes; see docs/ssd.md.";
  for (const char* const name :
       {"ssd-cache-shards", "ssd-write-queue-depth", "ssd-prefetch-queue-depth",
        "ssd-write-inflight", "ssd-prefetch-inflight", "max-prefetch-blocks"}) {
    table.ignored(name, true, no_queue);
  }
}

Result<std::vector<std::uint32_t>> ServerOptions::allowed_uids() const {
  std::vector<std::uint32_t> uids;
  for (const std::string& text : allow_uid) {
    std::uint32_t uid = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, status] = std::from_chars(text.data(), end, uid);
    if (status != std::errc() || rest != end) {
      return fail(Errc::kInvalidArgument, "--allow-uid: \"{}\" is not a user id", text);
    }
    uids.push_back(uid);
  }
  return uids;
}

Result<engine::NumaPolicy> ServerOptions::numa_policy() const {
  const auto named = pegaflow::engine::numa_policy(numa);
  if (!named) return fail(Errc::kInvalidArgument, "--numa: {}", named.error().detail);
  return *named;
}

Result<PoolPreparation::Keep> ServerOptions::keep_mode() const {
  if (keep == "no") return PoolPreparation::Keep::kNo;
  if (keep == "yes") return PoolPreparation::Keep::kYes;
  if (keep == "external") return PoolPreparation::Keep::kExternal;
  return fail(Errc::kInvalidArgument, "--keep: \"{}\" is none of no, yes and external", keep);
}

Result<engine::EvictionKind> ServerOptions::eviction_policy() const {
  const auto named = engine::eviction_kind(eviction);
  if (!named) return fail(Errc::kInvalidArgument, "--eviction: {}", named.error().detail);
  if (!enable_lfu_admission && !disable_lfu_admission) return *named;
  const engine::EvictionKind meant =
      disable_lfu_admission ? engine::EvictionKind::kLru : engine::EvictionKind::kWeightedLru;
  const bool is_other = *named != meant && *named != engine::kDefaultEviction;
  if ((enable_lfu_admission && disable_lfu_admission) || is_other) {
    return fail(Errc::kInvalidArgument,
                "--enable-lfu-admission, --disable-lfu-admission and --eviction {} contradict each "
                "other; give --eviction alone",
                eviction);
  }
  return meant;
}

Result<DiskBackend> ServerOptions::ssd_backend() const {
  const auto named = parse_disk_backend(ssd_io);
  if (!named) return fail(Errc::kInvalidArgument, "--ssd-io: {}", named.error().detail);
  return *named;
}

Result<std::vector<seconds>> ServerOptions::window_lengths() const {
  std::vector<seconds> lengths;
  for (const std::string& text : metric_windows) {
    // Days are for windows only: all other times are short.
    const bool is_days = !text.empty() && (text.back() == 'd' || text.back() == 'D');
    const std::string in_hours = is_days ? text.substr(0, text.size() - 1) + "h" : text;
    const auto parsed = parse_duration(in_hours);
    const Duration length = parsed ? *parsed * (is_days ? 24 : 1) : Duration::zero();
    if (length <= Duration::zero() || length % seconds(1) != Duration::zero()) {
      return fail(
          Errc::kInvalidArgument,
          "--metric-hll-windows: \"{}\" is not a whole number of seconds; write for example "
          "5m, 1h or 1d",
          text);
    }
    lengths.push_back(std::chrono::duration_cast<seconds>(length));
  }
  return lengths;
}

}  // namespace pegaflow::server
