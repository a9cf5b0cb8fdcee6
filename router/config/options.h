#pragma once
/// \file
/// The options of pegaflow-router.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/program/options.h"
#include "cluster/peer_proof.h"
#include "router/body/cache_salt.h"
#include "router/body/split.h"
#include "router/config/access.h"
#include "router/routing/fleet.h"

namespace pegaflow::router {

class EventEndpoints;

/// The options of one router, with their defaults. declare() gives each its name and description.
struct RouterOptions {
  std::vector<std::string> prefill;
  std::vector<std::string> decode;
  std::string engines_file;
  std::vector<std::string> servers;
  std::vector<std::string> instances;
  std::vector<std::string> engine_servers;
  std::string peer_secret_file;
  std::vector<std::string> replicas;
  std::string replica_listen;
  std::string listen = "127.0.0.1:8080";
  std::string own_listen;
  bool reuse_port = false;
  std::string ready_file;
  std::string flow = "store";
  std::string prefill_policy = "kv-aware";
  std::string decode_policy = "kv-aware";
  std::int64_t index_blocks = 16 << 20;
  std::uint64_t text_index_bytes = std::uint64_t{256} << 20;
  std::uint64_t prefetch_key_bytes = std::uint64_t{256} << 20;
  std::vector<std::string> hash_seeds;
  Duration event_sources_interval = std::chrono::seconds(60);
  std::vector<std::string> kv_events;
  Duration engine_load_interval = std::chrono::seconds(4);
  std::int64_t hash_prefix_bytes = 4096;
  std::int64_t min_prefill_tokens = 256;
  bool pd_first_token = false;
  std::vector<std::string> pass;
  std::vector<std::string> cors_origins = {"*"};

  std::string api_keys_file;
  std::string engine_api_key_file;
  std::string cache_salt_key_file;
  bool share_cache_among_tenants = false;
  std::int64_t rate_limit = 0;

  std::int64_t max_connections = 20'000;
  std::int64_t max_connections_per_address = 0;
  std::uint64_t max_header_bytes = 64 * 1024;
  std::uint64_t max_body_bytes = std::uint64_t{32} << 20;
  std::uint64_t body_memory_bytes = std::uint64_t{1} << 30;
  std::int64_t max_prefill_inflight = 64;
  std::int64_t max_decode_inflight = 1024;
  std::int64_t queue = 1024;
  Duration queue_timeout = std::chrono::seconds(30);
  Duration engine_queue_time = std::chrono::milliseconds(500);

  Duration connect_timeout = std::chrono::seconds(1);
  Duration prefill_timeout = std::chrono::seconds(30);
  std::int64_t min_prefill_rate = 1000;
  Duration answer_timeout = std::chrono::minutes(10);
  Duration event_timeout = std::chrono::minutes(2);
  Duration client_timeout = std::chrono::seconds(60);
  Duration body_timeout = std::chrono::minutes(5);
  std::uint64_t min_body_rate = 16 * 1024;
  Duration engine_idle_time = std::chrono::seconds(4);
  Duration drain_delay = Duration::zero();
  Duration shutdown_timeout = std::chrono::seconds(60);

  Duration health_interval = std::chrono::seconds(2);
  Duration health_timeout = std::chrono::seconds(2);
  std::int64_t health_failures = 2;
  Duration models_interval = std::chrono::seconds(10);
  bool pass_unknown_models = false;
  std::int64_t breaker_failures = 5;
  Duration breaker_time = std::chrono::seconds(2);
  std::int64_t retries = 2;
  Duration retry_delay = std::chrono::milliseconds(20);

  std::vector<std::string> render;  ///< Servers that make token ids of texts.
  Duration render_timeout = std::chrono::milliseconds(30);
  std::int64_t render_inflight = 2;
  std::uint64_t render_min_bytes = std::uint64_t{16} << 10;

  bool is_index = false;  ///< The program is pegaflow-index: it proxies nothing.

  bool access_log = true;
  std::string log_level = "info";

  /// Enters every option into `table`, which refers to this struct from then on.
  void declare(OptionTable& table);
  /// Enters those of pegaflow-index, and sets is_index.
  void declare_index(OptionTable& table);
  /// Checks what pegaflow-index needs beyond other checks.
  /// Errors: kInvalidArgument for an address that others reach without a file of keys or a secret.
  [[nodiscard]] Result<void> check_index() const;
  /// The servers of --render. Errors: kInvalidArgument for an invalid URL.
  [[nodiscard]] Result<std::vector<EngineUrl>> render_urls() const;

  /// The engines of --prefill and --decode, or of --engines-file.
  /// Errors: kInvalidArgument for an invalid URL, a file that cannot be read, both sources at once,
  /// or no decode engine.
  [[nodiscard]] Result<EngineList> engines() const;
  /// The servers of --servers.
  /// Errors: kInvalidArgument for an invalid URL, and for --instances without --servers.
  [[nodiscard]] Result<std::vector<EngineUrl>> server_urls() const;
  /// The pairs of --engine-servers: URLs of an engine and of its server.
  /// Errors: kInvalidArgument for anything but ENGINE=SERVER, and without --servers.
  [[nodiscard]] Result<std::vector<std::pair<std::string, std::string>>> server_of_engines() const;
  /// The addresses of --replicas as `http://HOST:PORT` and `dns://NAME:PORT`.
  /// Errors: kInvalidArgument for another form; without --replica-listen, or that without
  /// --replicas; where no policy is kv-aware; and without a secret unless all of them are loopback
  /// addresses.
  [[nodiscard]] Result<std::vector<EngineUrl>> replica_urls() const;
  /// The event streams of --kv-events; `list` are the engines at the start.
  /// Errors: those of EventEndpoints::parse(); kInvalidArgument where no policy is kv-aware, and
  /// for an engine that is not in `list`, unless --engines-file may list it later.
  [[nodiscard]] Result<EventEndpoints> event_endpoints(const EngineList& list) const;
  /// The secrets of --peer-secret-file; none without it.
  /// Errors: those of cluster::PeerSecrets::read(), with the option.
  [[nodiscard]] Result<std::optional<cluster::PeerSecrets>> secrets() const;
  /// Memory for full keys: 0 without prefetches, or without servers that allow them.
  [[nodiscard]] std::size_t full_key_bytes() const;
  /// Checks the paths of --pass.
  /// Errors: kInvalidArgument for an invalid path, or one that the router serves itself.
  [[nodiscard]] Result<void> check_passed() const;
  /// Checks --cors-origins.
  /// Errors: kInvalidArgument for "none" together with other values.
  [[nodiscard]] Result<void> check_cors_origins() const;
  /// The keys of --api-keys-file; none without it.
  /// Errors: kInvalidArgument for a file that cannot be read or is not a list of keys.
  [[nodiscard]] Result<std::optional<AccessList>> access() const;
  /// The key of --engine-api-key-file; empty without it.
  /// Errors: kInvalidArgument for a file that cannot be read or does not have exactly one line.
  [[nodiscard]] Result<std::string> engine_key() const;
  /// The salts for the prompts of tenants: none without API keys, or when tenants share the cache.
  /// Errors: kInvalidArgument for a --cache-salt-key-file that cannot be read, is too short, or has
  /// no effect.
  [[nodiscard]] Result<std::optional<CacheSalts>> cache_salts() const;
};

}  // namespace pegaflow::router
