#pragma once
/// \file
/// The account of a request at one engine, for the policy kv-aware.

#include <cstdint>
#include <optional>
#include <string_view>

#include "router/kv/kv_request.h"
#include "router/routing/policy.h"

namespace pegaflow::router {

struct Engine;
struct Shared;

/// Counts a request as sent to an engine for its lifetime. Before that it lets the engine's server
/// fetch what the engine will load; a leg that ends without an answer cancels that. Thread-bound.
class KvLeg {
 public:
  /// `request` is nullptr when the policy does not know it.
  KvLeg(Shared& shared, KvRequest* request, const Engine& engine);
  ~KvLeg();
  KvLeg(const KvLeg&) = delete;
  KvLeg& operator=(const KvLeg&) = delete;

  /// Keeps the account of this leg while the request is sent to another engine, too. Afterwards the
  /// request says nothing of this leg: take the hint and the session id before.
  void detach();
  /// Records that the engine has answered at once, after it has computed the prompt.
  void answered();

  /// The hint for the engine's connector; empty: none.
  [[nodiscard]] std::string_view hint() const;
  /// The session id for the body of the request; empty: the engine reads it elsewhere.
  [[nodiscard]] std::string_view body_session() const;

 private:
  Shared& shared_;
  KvRequest* const request_;
  std::uint64_t prefetch_ = 0;           ///< Number in Prefetches; 0: none.
  std::optional<KvLegAccount> account_;  ///< That of a detached leg.
  bool is_detached_ = false;
  bool has_answer_ = false;
};

}  // namespace pegaflow::router
