#pragma once
/// \file
/// The models that an engine lists in its /v1/models.

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace pegaflow::router {

/// Whether an engine serves a model, in the order of preference.
enum class Serves : unsigned char {
  kNo,
  kUnknown,  ///< The engine has not listed its models yet, or does not list them.
  kYes,
};

/// The models of one engine. Thread-bound.
class ModelList {
 public:
  /// Replaces the list, and returns whether it changed. `ids` is in the engine's order: its own
  /// model first, then adapters.
  bool set(const std::vector<std::string>& ids) {
    std::set<std::string, std::less<>> now(ids.begin(), ids.end());
    const bool changes = !is_known_ || now != ids_;
    first_ = ids.empty() ? std::string() : ids.front();
    ids_ = std::move(now);
    is_known_ = true;
    return changes;
  }

  [[nodiscard]] Serves serves(std::string_view model) const {
    if (!is_known_) return Serves::kUnknown;
    return ids_.contains(model) ? Serves::kYes : Serves::kNo;
  }
  /// Replaces the models that are adapters of others: their blocks have other hashes.
  void set_adapters(const std::vector<std::string>& ids) {
    adapters_ = std::set<std::string, std::less<>>(ids.begin(), ids.end());
  }
  [[nodiscard]] bool is_adapter(std::string_view model) const { return adapters_.contains(model); }

  [[nodiscard]] bool is_known() const noexcept { return is_known_; }
  /// The engine's model for a request that names none; empty when it is not known.
  [[nodiscard]] const std::string& first() const noexcept { return first_; }
  [[nodiscard]] std::size_t size() const noexcept { return ids_.size(); }

  bool is_asked = false;              ///< A request for the list is in flight.
  std::optional<TimePoint> asked_at;  ///< The time of the last request for the list.

 private:
  bool is_known_ = false;
  std::string first_;
  std::set<std::string, std::less<>> ids_;
  std::set<std::string, std::less<>> adapters_;
};

}  // namespace pegaflow::router
