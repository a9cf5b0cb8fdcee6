#pragma once
/// \file
/// The account of a request at one engine, for the policy kv-aware.

#include <string_view>

#include "router/routing/policy.h"

namespace pegaflow::router {

struct Engine;
struct Shared;

/// Counts a request as sent to an engine for its lifetime. Thread-bound.
class KvLeg {
 public:
  /// `request` is nullptr when the policy does not know it.
  KvLeg(Shared& shared, KvRequest* request, const Engine& engine);
  ~KvLeg();
  KvLeg(const KvLeg&) = delete;
  KvLeg& operator=(const KvLeg&) = delete;

  /// The hint for the engine's connector; empty: none.
  [[nodiscard]] std::string_view hint() const;

 private:
  Shared& shared_;
  KvRequest* const request_;
};

}  // namespace pegaflow::router
