#pragma once
/// \file
/// Decides whether decode engines may receive a request together with its prefill.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "router/body/early_params.h"

namespace pegaflow::router {

/// The place of one prefill engine's saves, as its answers report it. A decode engine that did not
/// respond in time after such a prefill would have been served sooner one leg after the other: then
/// the prefill engine's next requests are sent that way, for kPause.
///
/// An engine with several data-parallel ranks has a scheduler for each, and any of them may get the
/// next request. So an engine has no place once a scheduler answers again after another one; the
/// last kSchedulers are remembered until the engine restarts.
///
/// Thread-bound.
class EarlyWatch {
 public:
  static constexpr std::chrono::seconds kPause{60};
  static constexpr std::size_t kSchedulers = 16;

  /// Records the report of an answer; empty: the engine makes none.
  void learn(std::optional<PrefillPlace> place) {
    if (place && !seen_.empty() && seen_.back() == place->incarnation) {
      if (place_) place->job = std::max(place->job, place_->job);
    } else if (place) {
      has_ranks_ =
          has_ranks_ || std::find(seen_.begin(), seen_.end(), place->incarnation) != seen_.end();
      seen_.push_back(place->incarnation);
      if (seen_.size() > kSchedulers) seen_.pop_front();
    }
    place_ = std::move(place);
  }
  /// The engine may be another one when it answers again.
  void forget() noexcept { place_.reset(); }
  /// The engine was down and is up: nothing that it reported before counts.
  void restarted() noexcept {
    place_.reset();
    seen_.clear();
    has_ranks_ = false;
  }
  void was_late(TimePoint now) noexcept { resumes_ = now + kPause; }
  /// nullptr: one leg has to follow the other.
  [[nodiscard]] const PrefillPlace* place(TimePoint now) const noexcept {
    return place_ && !has_ranks_ && now >= resumes_ ? &*place_ : nullptr;
  }

 private:
  std::optional<PrefillPlace> place_;
  std::deque<std::string> seen_;  // Schedulers, the one that answered last at the end.
  bool has_ranks_ = false;
  TimePoint resumes_{};
};

}  // namespace pegaflow::router
