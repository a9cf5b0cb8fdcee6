#pragma once
/// \file
/// The names under which blocks and nodes are in the directory, made with the secret of the nodes.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/block_key.h"
#include "base/id128.h"
#include "capnp/wire/peer_types.h"

namespace pegaflow::directory {

/// A block of which the directory tells the owners: its name among all blocks, epochs and
/// namespaces. Only a node with the secret can tell which block it is, or make the one of a block.
using Anchor = std::uint64_t;

/// One block in so many is an anchor, and among the first kHeadBlocks of a prompt one in kHeadStep,
/// so that short prompts have some, too. Which ones follows from their keys alone: a node that
/// saves the middle of a prompt announces the same blocks as one that saves all of it.
inline constexpr std::uint64_t kStep = 32;
inline constexpr std::uint64_t kHeadStep = 8;
inline constexpr std::size_t kHeadBlocks = 63;

/// Whether a block with that key is announced. `is_head`: it is one of the first kHeadBlocks of its
/// prompt.
[[nodiscard]] bool is_anchor(const BlockKey& key, bool is_head) noexcept;

/// The secrets of the directory, derived from those of the nodes. A value.
struct Keys {
  Bytes32 anchors{};           ///< For anchors, and for the seals of this node.
  std::vector<Bytes32> all{};  ///< Seals of other nodes may be made with any of them.
  bool operator==(const Keys&) const = default;
};

/// `space` has the namespace and the kind in it. Thread-safe, as all functions here.
[[nodiscard]] Anchor anchor_of(const Bytes32& key, const Bytes32& space, const Epoch& epoch,
                               const BlockKey& block);

/// The number of a node in members; unique among the nodes that are alive.
using NodeNumber = std::uint16_t;

/// An anchor and a node that has its block: one member of a sorted set, 12 bytes.
struct Member {
  Anchor anchor = 0;
  NodeNumber node = 0;
  std::uint16_t life = 0;  ///< Part of the incarnation of that node.
  bool operator==(const Member&) const = default;
};
inline constexpr std::size_t kMemberBytes = 12;

/// Members of one anchor are beside each other. Their order is another one for each anchor, so that
/// a reader that asks for the first few does not always meet the same nodes.
[[nodiscard]] std::string to_text(const Member& member);
/// No value for bytes of another length.
[[nodiscard]] std::optional<Member> member_of(std::string_view text);
/// The bounds of ZRANGEBYLEX for all members of an anchor.
struct Range {
  std::string first;
  std::string end;
};
[[nodiscard]] Range range_of(Anchor anchor);

/// The key of the sorted set of an anchor, of 2^bucket_bits ones; bucket_bits is 8 to 32.
[[nodiscard]] std::string bucket_of(Anchor anchor, unsigned bucket_bits);
inline constexpr unsigned kLeastBucketBits = 8;
inline constexpr unsigned kMostBucketBits = 32;

/// The part of an incarnation that is in members.
[[nodiscard]] std::uint16_t life_of(const Id128& node) noexcept;

/// The bytes with a keyed digest of them and of `purpose` at their end.
[[nodiscard]] std::string seal(const Bytes32& key, std::string_view purpose,
                               std::string_view bytes);
/// The bytes without the digest; no value if it was made without one of the keys.
[[nodiscard]] std::optional<std::string> unseal(std::span<const Bytes32> keys,
                                                std::string_view purpose, std::string_view sealed);

}  // namespace pegaflow::directory
