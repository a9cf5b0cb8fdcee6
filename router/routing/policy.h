#pragma once
/// \file
/// The policies that choose one of several engines.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace pegaflow::router {

struct KvRequest;

/// An engine as a policy sees it.
struct Candidate {
  std::uint64_t id = 0;  ///< A hash of its URL: the same in every router and after a restart.
  std::size_t inflight = 0;
};

/// A request as a policy sees it: all that a choice may depend on.
struct RequestView {
  /// A hash that related requests share: of their session, or of the beginning of their prompt.
  /// 0: unknown.
  std::uint64_t affinity = 0;
  /// Its prompt, for the policy kv-aware, which notes its choice there; nullptr: unknown.
  KvRequest* kv = nullptr;
  bool has_waited = false;  ///< It waited for its time in the queue; see Policy::should_wait().
};

/// Chooses among candidates. Thread-bound.
class Policy {
 public:
  virtual ~Policy() = default;
  /// The index of one of `candidates`, of which there is at least one.
  virtual std::size_t choose(std::span<const Candidate> candidates, const RequestView& request) = 0;
  /// Whether should_wait() may be true for the request. Requests of one model that do not differ in
  /// this wait for the same.
  [[nodiscard]] virtual bool may_wait(const RequestView& request) const {
    (void)request;
    return false;
  }
  /// Whether the request should wait in the router, since each candidate has enough to do. False
  /// for one that has waited: what is predicted may delay a request, and fails none.
  [[nodiscard]] virtual bool should_wait(std::span<const Candidate> candidates,
                                         const RequestView& request) const {
    (void)candidates, (void)request;
    return false;
  }
};

/// The policy named `name`, with `seed` for its random numbers:
///
/// `round-robin`: the candidates in turn.
///
/// `least-load`: the fewest requests in flight; equals in turn.
///
/// `power-of-two`: the less loaded of two random candidates.
///
/// `consistent-hash`: the highest random weight of (engine, affinity), so that an engine that is
/// added or removed moves only its own share. Engines above 1.25 times the mean load are passed
/// over. Without an affinity: least-load.
///
/// Errors: kInvalidArgument that names the policies.
Result<std::unique_ptr<Policy>> make_policy(std::string_view name, std::uint64_t seed);

/// A 64-bit hash of `text`, the same on every machine; never 0.
std::uint64_t hash_key(std::string_view text);

}  // namespace pegaflow::router
