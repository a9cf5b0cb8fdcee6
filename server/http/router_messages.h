#pragma once
/// \file
/// The requests of routers, and their answers: plain values between the HTTP and the RPC thread.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/id128.h"
#include "engine/block_store.h"
#include "server/cache/instance_report.h"
#include "server/chains/prompt_chains.h"
#include "server/http/nodes_report.h"
#include "server/prefetch/prefetch_types.h"

namespace pegaflow::server {

/// The part of each key that a router gets. A part is enough where it is what the engine's events
/// have.
enum class KeyPart : std::uint8_t {
  kAll,
  kLow,    ///< The low 64 bits: vLLM.
  kFirst,  ///< The first 64 bits: SGLang.
};

/// A request of a router, decoded.
struct RouterQuery {
  enum class Kind : std::uint8_t { kJournal, kBlocks, kLinks, kPrefetch, kCancelPrefetch };
  Kind kind = Kind::kJournal;
  std::string space{};  ///< The hash of the namespace, as /instances shows it.
  std::optional<std::size_t> block_kind{};
  /// The generation that the position of the journal belongs to; 0: whatever it is.
  std::uint64_t generation = 0;
  std::uint64_t position = engine::BlockStore::kJournalEnd;
  engine::FrameIndex cursor = 0;
  KeyPart keys = KeyPart::kAll;
  bool wants_chains = false;  ///< With a journal, from `chain_position` on.
  std::uint64_t chain_position = PromptChains::kEnd;
  PrefetchWanted prefetch{};
};

/// The answer to kJournal and kBlocks: changes or blocks of one kind of a namespace.
struct BlocksAnswer {
  Id128 server;  ///< The incarnation.
  std::uint64_t generation = 0;
  std::uint64_t position = 0;  ///< The position of the journal to continue from.
  std::size_t kind = 0;
  std::uint32_t block_tokens = 0;
  bool is_list = false;
  bool has_lost = false;
  bool has_more = false;
  std::uint32_t cursor = 0;  ///< The next part of a list that has more.
  KeyPart keys = KeyPart::kAll;
  std::vector<engine::BlockStore::JournalEntry> entries{};
  bool has_chains = false;  ///< Those of prompts were asked for.
  PromptChains::Part chains{};
};

/// The answer to kLinks.
struct LinksAnswer {
  Id128 server;
  std::optional<NodesReport> nodes{};
  struct Engine {
    InstanceInfo instance;
    std::uint64_t block_bytes = 0;  ///< A block of the first kind, over all shards; 0: unknown.
    std::uint32_t block_tokens = 0;
  };
  std::vector<Engine> engines{};
  bool has_disks = false;  ///< A block that left the pool may be on a disk of this node.
};

/// The answer to prefetches and their cancellation, which tells nothing about blocks.
struct Accepted {};

struct RouterRefusal {
  unsigned status = 400;
  std::string why;
};

}  // namespace pegaflow::server
