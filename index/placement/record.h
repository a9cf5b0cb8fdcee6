#pragma once
/// \file
/// The messages by which routers share their placements, as plain values.

#include <cstdint>

namespace pegaflow::index {

/// A router's name among its siblings, below Placement::Options::max_routers; 0 is the router
/// itself.
using RouterId = std::uint16_t;
/// An engine in a Placement: an index, reused after removal.
using EngineId = std::uint32_t;
/// A node in a Placement: an index, reused after removal.
using NodeId = std::uint32_t;
inline constexpr std::uint32_t kNoNode = 0xFFFFFFFF;
inline constexpr std::uint32_t kNoEngine = 0xFFFFFFFF;

/// The stages of a request that was placed.
enum class Stage : std::uint8_t {
  kPlaced,
  kFirstToken,  ///< Its prefill ended; it decodes.
  kDone,        ///< It ended: finished, failed or cancelled.
};

/// One message about one request. The exchange may lose, repeat or reorder them: a message about an
/// unknown request is ignored, a lost one ends by its time limit, and heartbeats heal the sums.
///
/// Engines are named by the receiver's EngineId: the transport translates from their URLs.
struct PlacementRecord {
  Stage stage = Stage::kPlaced;
  RouterId router = 0;
  std::uint64_t request = 0;  ///< Unique for this router.
  EngineId engine = kNoEngine;
  // The rest describes a placement; unused in later stages.
  std::uint32_t prompt_tokens = 0;
  std::uint32_t uncached_tokens = 0;
  NodeId source = kNoNode;       ///< The node that blocks are pulled from.
  std::uint64_t pull_bytes = 0;  ///< 0: none.
  double ready_seconds = 0;      ///< Predicted time until its blocks are at the engine.
};

/// The sums of one router for one engine, sent each second. They replace what the receiver adds up
/// for this router, so a lost record is an error of a second at most.
struct EngineSums {
  RouterId router = 0;
  EngineId engine = kNoEngine;
  std::uint32_t prefills = 0;        ///< Requests placed, without a first token.
  std::uint32_t decodes = 0;         ///< Requests that decode.
  std::uint64_t prefill_tokens = 0;  ///< Uncached tokens of `prefills`.
};

}  // namespace pegaflow::index
