#pragma once
/// \file
/// Which of the engines that may be asked is asked.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pegaflow::router {

/// An engine as a policy sees it.
struct Candidate {
  std::uint64_t id = 0;  ///< A hash of its URL: the same in every router and after a restart.
  std::size_t inflight = 0;
};

/// Chooses among candidates. Thread-bound.
class Policy {
 public:
  virtual ~Policy() = default;
  /// The index of one of `candidates`, which are one at least. `key` is what requests that belong
  /// together have in common; 0 when nothing is known.
  virtual std::size_t choose(std::span<const Candidate> candidates, std::uint64_t key) = 0;
};

/// Chance comes from `seed`.
///
/// - `round-robin`: one after the other.
/// - `least-load`: the fewest requests in flight; among equals one after the other.
/// - `power-of-two`: the less loaded of two drawn ones.
/// - `consistent-hash`: highest random weight of (engine, key), so that an engine that comes or
/// goes
///   moves only its own share; an engine with more than 1.25 times the mean load is passed over.
///   Without a key least-load.
///
/// Errors: kInvalidArgument that names the policies.
Result<std::unique_ptr<Policy>> make_policy(std::string_view name, std::uint64_t seed);

/// 64 bits of `text`, the same on every machine; never 0.
std::uint64_t hash_key(std::string_view text);

}  // namespace pegaflow::router
