#pragma once
/// \file
/// The policy kv-aware.

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "router/kv/kv_routing.h"
#include "router/routing/policy.h"

namespace pegaflow::router {

/// Its name in options.
inline constexpr std::string_view kKvAware = "kv-aware";
/// The policy for requests about whose engines nothing is known.
inline constexpr std::string_view kKvFallback = "least-load";

/// Chooses by cost where an engine announces its blocks, and else by another policy. Thread-bound.
class KvAware final : public Policy {
 public:
  /// `routing` and `clock` outlive the policy.
  KvAware(KvRouting& routing, Role role, const Clock& clock, std::string fallback_name,
          std::unique_ptr<Policy> fallback)
      : routing_(routing),
        role_(role),
        clock_(clock),
        fallback_name_(std::move(fallback_name)),
        fallback_(std::move(fallback)) {}

  std::size_t choose(std::span<const Candidate> candidates, const RequestView& request) override {
    if (request.kv != nullptr && !request.kv->is_prefilled) {
      const auto chosen = routing_.choose(candidates, *request.kv, role_, clock_.now());
      if (chosen) return *chosen;
    }
    const std::size_t other = fallback_->choose(candidates, request);
    if (request.kv != nullptr) {
      routing_.accept(candidates[other], fallback_name_, *request.kv, role_, clock_.now());
    }
    return other;
  }

 private:
  KvRouting& routing_;
  const Role role_;
  const Clock& clock_;
  const std::string fallback_name_;
  std::unique_ptr<Policy> fallback_;
};

}  // namespace pegaflow::router
