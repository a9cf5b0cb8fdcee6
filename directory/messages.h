#pragma once
/// \file
/// The messages to the directory and from it: plain values.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "base/id128.h"
#include "directory/anchor.h"
#include "directory/probes.h"

namespace pegaflow::directory {

/// Changes of the anchors of this node.
struct Announcement {
  enum class Kind : std::uint8_t {
    kChanges,    ///< Blocks became findable, or ceased to be.
    kSpaceOver,  ///< No block of that space is findable any longer.
    kStartOver,  ///< Changes are lost: all blocks that are findable are listed from here on.
    kListed,     ///< All are listed: others are not findable.
  };
  Kind kind = Kind::kChanges;
  std::uint32_t space = 0;  ///< The caller's number of a namespace and its epoch.
  Bytes32 name{};           ///< The namespace and kind, by their name among nodes.
  Epoch epoch{};
  std::vector<std::pair<BlockKey, bool>> blocks{};  ///< True: it is findable. All are anchors.
};

/// The most owners of an answer.
inline constexpr std::size_t kMostFound = 3;

/// A question about a prompt.
struct Question {
  std::uint64_t ticket = 0;
  Bytes32 space{};  ///< The namespace and kind, by their name among nodes.
  Epoch epoch{};
  std::vector<Candidate> candidates{};  ///< See candidates_of().
  TimePoint deadline{};                 ///< The second round does not begin after it.
};

/// The answer: hints, which only the nodes themselves confirm.
struct Found {
  enum class Result : std::uint8_t {
    kFound,
    kNone,  ///< No other node has announced any of the blocks.
    kDown,  ///< No server could be asked, or none answered: nothing is known.
  };
  struct Owner {
    Id128 node;               ///< Its incarnation.
    std::string address;      ///< As the node wrote it: IP:PORT.
    std::uint32_t place = 0;  ///< The place of the last block that is known to be there.
  };
  std::uint64_t ticket = 0;
  Result result = Result::kDown;
  std::vector<Owner> owners{};  ///< At most kMostFound, the one with most blocks first.
  bool is_alone = false;        ///< No other node has a lease: others may not be able to take one.
};

}  // namespace pegaflow::directory
