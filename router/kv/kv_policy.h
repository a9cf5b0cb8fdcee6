#pragma once
/// \file
/// The policy kv-aware.

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "router/kv/kv_routing.h"
#include "router/routing/policy.h"

namespace pegaflow::router {

/// The policy for requests about whose engines nothing is known.
inline constexpr std::string_view kKvFallback = "least-load";

/// Chooses by cost where an engine announces its blocks, and else by another policy. Thread-bound.
class KvAware final : public Policy {
 public:
  /// `routing` and `clock` outlive the policy. With `queue_time` above 0 requests for decode
  /// engines wait in the router while each engine has more than that to compute.
  KvAware(KvRouting& routing, Role role, const Clock& clock, Duration queue_time,
          std::string fallback_name, std::unique_ptr<Policy> fallback)
      : routing_(routing),
        role_(role),
        clock_(clock),
        queue_seconds_(std::chrono::duration<double>(queue_time).count()),
        fallback_name_(std::move(fallback_name)),
        fallback_(std::move(fallback)) {}

  std::size_t choose(std::span<const Candidate> candidates, const RequestView& request) override {
    if (request.kv != nullptr && !request.kv->is_prefilled) {
      const auto chosen = routing_.choose(candidates, *request.kv, role_, clock_.now());
      if (chosen) return *chosen;
    }
    if (request.kv != nullptr && request.kv->is_prefilled) {
      const auto chosen = routing_.choose_after_prefill(candidates, *request.kv, clock_.now());
      if (chosen) return *chosen;
    }
    const std::size_t other = fallback_->choose(candidates, request);
    if (request.kv != nullptr) {
      routing_.accept(candidates[other], fallback_name_, *request.kv, role_, clock_.now());
    }
    return other;
  }

  bool may_wait(const RequestView& request) const override {
    // A prefill engine with a long queue is still the place for a long prompt, and a prompt that
    // was prefilled elsewhere is not computed here.
    return queue_seconds_ > 0 && role_ == Role::kDecode && !request.has_waited &&
           request.kv != nullptr && !request.kv->is_prefilled;
  }

  bool should_wait(std::span<const Candidate> candidates,
                   const RequestView& request) const override {
    if (!may_wait(request)) return false;
    const KvRouting::Outlook outlook = routing_.outlook(candidates, clock_.now());
    return outlook.is_known && outlook.least_queue > queue_seconds_;
  }

 private:
  KvRouting& routing_;
  const Role role_;
  const Clock& clock_;
  const double queue_seconds_;
  const std::string fallback_name_;
  std::unique_ptr<Policy> fallback_;
};

}  // namespace pegaflow::router
