#pragma once
/// \file
/// The statistics of fetches, for metrics. A plain value.

#include <cstdint>

namespace pegaflow::server {

/// The statistics of Fetches.
struct FetchStats {
  std::uint64_t claims = 0;         ///< Claims that queried the source.
  std::uint64_t claims_coming = 0;  ///< Those of `claims` that got blocks.
  std::uint64_t lookups = 0;        ///< Lookups that queried the source.
  std::uint64_t blocks = 0;         ///< Blocks that arrived.
  std::uint64_t bytes = 0;          ///< Bytes of `blocks`.
  std::uint64_t given_up = 0;       ///< Blocks.
  std::uint64_t declined = 0;       ///< Blocks not fetched because computing is faster.
  std::uint64_t unwanted = 0;       ///< Blocks not read because their claims had ended.
  std::uint64_t retried = 0;        ///< Blocks requested from another owner.
  /// Blocks given up while a device could still write to their frames, which waited for it.
  std::uint64_t unquiesced = 0;
};

}  // namespace pegaflow::server
