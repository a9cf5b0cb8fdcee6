#pragma once
/// \file
/// The answers of pegaflow-servers to a router: their pool's journal, lists of blocks, and links
/// (docs/router_api.md).

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"

namespace pegaflow::router {

/// One answer to GET /journal or GET /blocks, with 8 or 32 bytes of each key.
struct PoolPage {
  std::string server{};  ///< The incarnation: another one after a restart. 16 bytes.
  std::uint64_t generation = 0;
  std::uint64_t position = 0;  ///< Where the journal continues.
  bool has_lost = false;       ///< Changes before this answer are no longer known.
  bool has_more = false;
  bool is_list = false;
  std::uint32_t cursor = 0;  ///< Where a list that has more continues.
  std::uint32_t block_tokens = 0;
  struct Change {
    std::uint64_t hash = 0;  ///< The low 64 bits of the engine's hash.
    bool is_gone = false;
  };
  std::vector<Change> changes{};
  std::vector<BlockKey> keys{};  ///< The full keys of `changes`; empty: 8 bytes were sent.
  /// The blocks of one request's prompt, as its engine has reported them.
  struct Chain {
    std::uint64_t session = 0;  ///< session_name() of the request's session id.
    std::uint32_t block_tokens = 0;
    std::vector<std::uint64_t> hashes{};  ///< The low 64 bits of each, in order.
  };
  std::vector<Chain> chains{};                    ///< Only where they were asked for.
  std::optional<std::uint64_t> chain_position{};  ///< Where they continue.

  /// `has_chains`: they were asked for. Errors: kCorrupt for anything else.
  static Result<PoolPage> read(std::string_view body, bool has_chains = false);
};

/// The answer to GET /links.
struct LinksPage {
  std::string node;         ///< The incarnation: 32 hexadecimal digits.
  bool has_chains = false;  ///< The journal offers the chains of prompts.
  struct Link {
    std::string node;  ///< The peer's.
    double bytes_per_second = 0;
    double start_seconds = 0;
  };
  std::vector<Link> links{};  ///< Those that are ready.
  struct Attached {
    std::string instance;
    std::string space;               ///< The hash of its namespace.
    std::uint64_t block_bytes = 0;   ///< 0: not known.
    std::uint32_t block_tokens = 0;  ///< 0: not known.
    bool reports_chains = false;     ///< It has reported the blocks of a prompt.
    bool is_connected = true;        ///< It may come back otherwise, or be another one now.
  };
  std::vector<Attached> engines{};
  bool has_disks = false;  ///< Blocks that left the pool may be on the node's disks.

  /// Errors: kCorrupt for anything else.
  static Result<LinksPage> read(std::string_view body);
};

}  // namespace pegaflow::router
