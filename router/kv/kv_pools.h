#pragma once
/// \file
/// The pools of nodes as the index sees them: which blocks a node's pegaflow-server holds, and how
/// fast nodes read from each other.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "index/block_index.h"
#include "index/placement/placement.h"
#include "router/kv/kv_fleet.h"
#include "router/kv/kv_keys.h"
#include "router/kv/kv_lessons.h"
#include "router/kv/pool_page.h"

namespace pegaflow::router {

/// Owns one entry for each server of --servers, and in it one pool for each namespace of its
/// engines. Pure: another class sends the requests. Thread-bound.
class KvPools {
 public:
  /// One namespace in one server's pool.
  struct Pool {
    std::string space;  ///< The namespace's hash.
    index::HolderId holder = 0;
    std::uint32_t block_tokens = 0;
    std::string incarnation{};  ///< The server's when it sent the blocks; empty: none yet.
    std::uint64_t generation = 0;
    std::uint64_t position = 0;
    std::optional<std::uint32_t> cursor{0};  ///< Where the list continues; not set: it is complete.
    bool is_trusted = false;                 ///< The list is complete, and changes follow it.
    bool has_engine = true;                  ///< One of the node has the namespace.
    bool has_first_bits = false;             ///< Its blocks have the names of SGLang's events.
    std::string reason = "the pool's blocks were not listed yet";
    std::uint64_t changes = 0;                      ///< Received.
    std::optional<std::uint64_t> chain_position{};  ///< Where the chains of prompts continue.
    std::uint64_t chains = 0;                       ///< Those received that taught a text.
    bool has_reports = false;  ///< An engine of it reports the chains of prompts.
    std::uint64_t lists = 0;   ///< Begun.
  };
  struct Node {
    std::string url;   ///< The server's.
    std::string host;  ///< The host in it.
    std::string id{};  ///< The incarnation, 32 hexadecimal digits; empty: unknown.
    index::NodeId place = index::kNoNode;
    bool has_disks = false;
    bool has_chains = false;              ///< Its journal offers the chains of prompts.
    std::string error{};                  ///< Why /links is not known; empty: it is.
    std::map<std::string, Pool> pools{};  ///< By namespace.
  };

  /// All of them outlive the object. `keys` receives the full keys of blocks; nullptr: the servers
  /// are asked for 8 bytes of each key.
  KvPools(index::BlockIndex& blocks, index::Placement& placement, KvFleet& fleet,
          KvLessons& lessons, KvKeys* keys = nullptr)
      : blocks_(blocks),
        placement_(placement),
        fleet_(fleet),
        lessons_(lessons),
        full_keys_(keys) {}

  /// The server of an engine, by URLs, where addresses do not tell.
  void assign(const std::string& engine, const std::string& server) { assigned_[engine] = server; }

  /// Replaces the servers. What is known of those that stay is kept.
  void set_servers(const std::vector<EngineUrl>& servers);
  /// The answer of a server to GET /links.
  void set_links(const std::string& server, const LinksPage& page);
  /// The server does not answer: its blocks give no credit until they are listed again.
  void lost(const std::string& server, const std::string& why);
  /// Connects engines to the pools of their nodes; call it after engines or servers have changed.
  void attach_engines();

  /// The path and query of the next request about a pool; empty: there is no such pool.
  [[nodiscard]] std::string next_target(const std::string& server, const std::string& space) const;
  /// Whether the journals of a server have the chains of prompts: next_target() asks for them.
  [[nodiscard]] bool offers_chains(const std::string& server) const;
  /// Whether texts are learned from the chains of prompts that an engine reports to its server.
  [[nodiscard]] bool offers_chains(std::uint64_t engine) const;
  /// The answer to it.
  void answered(const std::string& server, const std::string& space, const PoolPage& page);
  /// The request failed: the pool is listed from its start, or dropped if no engine uses it.
  void failed(const std::string& server, const std::string& space, const std::string& why);

  /// The pool that an engine loads from; nullptr: none is known.
  [[nodiscard]] const Pool* pool_of(std::uint64_t engine) const;
  /// The URL of that pool's server, and the namespace; empty: none is known.
  [[nodiscard]] std::pair<std::string_view, std::string_view> place_of(std::uint64_t engine) const;
  /// Whether a node with the namespace also has disks.
  [[nodiscard]] bool has_disks(const std::string& space) const;
  [[nodiscard]] const std::map<std::string, Node>& nodes() const { return nodes_; }
  /// Appends the pools of the namespace `space` that hold blocks of the chain, for the placement.
  void add_sources(const std::string& space, const index::Match& match,
                   std::vector<index::PullSource>& sources) const;
  /// The incarnation of a node of the placement; empty: unknown.
  [[nodiscard]] std::string_view id_of(index::NodeId place) const;

 private:
  Pool* find(const std::string& server, const std::string& space);
  [[nodiscard]] const Pool* find(const std::string& server, const std::string& space) const;
  void restart(Pool& pool, std::string reason);
  void apply(Pool& pool, const PoolPage& page);
  void learn(Pool& pool, const PoolPage& page);
  void name_blocks(Pool& pool, index::Dialect dialect);
  void remove_pool(Pool& pool) { blocks_.remove(pool.holder); }
  /// The node of an engine; nullptr: not known.
  [[nodiscard]] Node* node_of(const std::string& engine_url, const std::string& engine_host);

  index::BlockIndex& blocks_;
  index::Placement& placement_;
  KvFleet& fleet_;
  KvLessons& lessons_;
  KvKeys* const full_keys_;
  std::map<std::string, Node> nodes_;  // By URL.
  std::map<std::string, std::string> assigned_;
  std::unordered_map<std::uint64_t, std::pair<std::string, std::string>>
      pool_of_;                   // By engine: server and namespace.
  std::vector<index::Key> keys_;  // Kept between answers.
};

}  // namespace pegaflow::router
