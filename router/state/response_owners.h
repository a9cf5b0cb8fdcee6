#pragma once
/// \file
/// The engines that created responses of /v1/responses.

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "router/routing/fleet.h"

namespace pegaflow::router {

/// Maps the id of a response to its engine, for requests that name the response. Forgets the oldest
/// entries beyond kLimit. Thread-bound.
class ResponseOwners {
 public:
  static constexpr std::size_t kLimit = 65'536;

  void learn(const std::string& response, const std::shared_ptr<Engine>& engine) {
    if (!owners_.emplace(response, engine).second) return;
    order_.push_back(response);
    if (order_.size() > kLimit) {
      owners_.erase(order_.front());
      order_.pop_front();
    }
  }
  /// nullptr when the response is unknown, or its engine is gone.
  [[nodiscard]] std::shared_ptr<Engine> find(const std::string& response) const {
    const auto found = owners_.find(response);
    return found == owners_.end() ? nullptr : found->second.lock();
  }

 private:
  std::unordered_map<std::string, std::weak_ptr<Engine>> owners_;
  std::deque<std::string> order_;
};

}  // namespace pegaflow::router
