#include "client/status_board.h"

#include <utility>

namespace pegaflow {

bool StatusBoard::set(LinkState state, std::string detail) {
  const std::lock_guard lock(mutex_);
  if (status_.state == state && status_.detail == detail) return false;
  // After an open breaker the link becomes ready again without a new connection.
  if (state == LinkState::kReady && status_.state != LinkState::kBroken) ++status_.connections;
  status_.state = state;
  status_.detail = std::move(detail);
  state_.store(state, std::memory_order_release);
  changed_.notify_all();
  return true;
}

void StatusBoard::set_server(const Id128& server, std::string build) {
  const std::lock_guard lock(mutex_);
  status_.server = server;
  status_.server_build = std::move(build);
}

void StatusBoard::set_namespace(std::string hash) {
  const std::lock_guard lock(mutex_);
  status_.namespace_hash = std::move(hash);
}

LinkStatus StatusBoard::get() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

bool StatusBoard::wait_for(LinkState state, Duration patience) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return status_.state == state; });
}

}  // namespace pegaflow
