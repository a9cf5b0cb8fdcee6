#pragma once
/// \file
/// The record of a pool's shapes and namespaces, for the server after this one.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "capnp/wire/peer_types.h"
#include "engine/block_store.h"
#include "engine/kinds/block_kinds.h"
#include "engine/types/namespace_factors.h"

namespace pegaflow::server {

/// Everything that a later server must know of the names in the rows of a pool. Written as CBOR,
/// whose members a later version may add to.
struct KeptNames {
  struct Kind {
    std::uint32_t shape = 0;  ///< The number of its shape.
    engine::SpaceId space{};  ///< The generation whose blocks may be found.
  };
  struct Namespace {
    std::vector<engine::NamespaceFactor> factors;
    engine::BlockKinds rules{};
    std::vector<Kind> kinds;  ///< One for a namespace without rules.
    std::uint64_t generation = 1;
    Epoch epoch{};  ///< That of its blocks.
  };
  std::vector<engine::BlockStore::FormerShape> shapes;
  std::vector<Namespace> namespaces;  ///< In the order in which they were made.
};

std::vector<std::byte> write_names(const KeptNames& names);
/// Errors: kCorrupt when these bytes are no such record.
Result<KeptNames> read_names(std::span<const std::byte> bytes);

}  // namespace pegaflow::server
