#pragma once
/// \file
/// The options of pegaflow-server.

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/program/options.h"
#include "engine/eviction/eviction.h"
#include "engine/pool/placement.h"
#include "server/pool/pool_preparation.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::server {

/// The options of one server, with their defaults. `declare` gives each its name and its reason.
struct ServerOptions {
  std::string addr = "127.0.0.1:50055";
  std::string http_addr = "127.0.0.1:9091";
  std::string http_token_file;
  std::uint64_t pool_size_bytes = std::uint64_t{30} << 30;
  bool use_hugepages = false;
  std::string numa{to_string(engine::NumaPolicy::kAuto)};
  bool pool_size_is_chosen = true;  ///< False: any size of a kept pool will do.
  Duration pool_wait = std::chrono::seconds(30);
  std::string keep = "no";
  bool release = false;
  std::string socket_group;
  std::vector<std::string> allow_uid;
  std::string ready_file;
  std::string log_level = "info";

  std::int64_t max_connections = 1024;
  Duration hello_timeout = std::chrono::seconds(10);
  std::int64_t instance_share_percent = 50;
  std::int64_t node_share_percent = 80;
  Duration reservation_timeout = std::chrono::seconds(30);
  std::string eviction{to_string(engine::kDefaultEviction)};
  bool enable_lfu_admission = false;
  bool disable_lfu_admission = false;
  // Other nodes.
  std::vector<std::string> peers;
  std::string peer_listen;
  std::string peer_fabric_listen;
  std::string peer_secret_file;
  std::uint64_t prefetch_bytes = 0;  ///< 0: an eighth of the pool.
  Duration peer_deadline = std::chrono::milliseconds(15);
  Duration fetch_deadline = std::chrono::seconds(2);
  std::vector<std::string> nics;
  std::vector<std::string> deny_nics;
  bool require_rdma = false;
  std::string direct_pool = "auto";
  std::string ucx_library;
  std::vector<std::string> directory;
  std::string directory_secret_file;
  std::string directory_ca_file;
  std::int64_t directory_buckets = std::int64_t{1} << 18;
  std::vector<std::string> peer_networks;
  // The SSD tier.
  std::vector<std::string> ssd_cache_path;
  std::uint64_t ssd_cache_capacity_bytes = std::uint64_t{512} << 30;
  std::uint64_t ssd_segment_bytes = std::uint64_t{128} << 20;
  std::uint64_t ssd_index_bytes = 0;  ///< 0: no limit.
  std::uint64_t ssd_write_budget_bytes = 0;
  std::uint64_t ssd_write_ahead_bytes = 0;  ///< 0: SsdWriter chooses.
  std::string ssd_io = "auto";
  Duration ssd_drain = std::chrono::seconds(20);
  bool ssd_format = false;
  bool ssd_serve_before_peers = false;
  std::vector<std::string> metric_windows = {"5m", "1h", "1d"};

  /// Enters every option into `table`, which refers to this struct from then on.
  void declare(OptionTable& table);

  /// The uids of `allow_uid`.
  /// Errors: kInvalidArgument for a text that is not a number.
  [[nodiscard]] Result<std::vector<std::uint32_t>> allowed_uids() const;
  /// The policy that `numa` names.
  /// Errors: kInvalidArgument for an unknown name.
  [[nodiscard]] Result<engine::NumaPolicy> numa_policy() const;
  /// The mode that `keep` names.
  /// Errors: kInvalidArgument for an unknown name.
  [[nodiscard]] Result<PoolPreparation::Keep> keep_mode() const;
  /// The policy that `eviction` names, or one of the two flags that stand for a name.
  /// Errors: kInvalidArgument for an unknown name, and for flags that contradict it or each other.
  [[nodiscard]] Result<engine::EvictionKind> eviction_policy() const;
  /// The backend that `ssd_io` names.
  /// Errors: kInvalidArgument for an unknown name.
  [[nodiscard]] Result<DiskBackend> ssd_backend() const;
  /// The lengths of `metric_windows`.
  /// Errors: kInvalidArgument for a window that is not a whole number of seconds.
  [[nodiscard]] Result<std::vector<std::chrono::seconds>> window_lengths() const;
};

}  // namespace pegaflow::server
