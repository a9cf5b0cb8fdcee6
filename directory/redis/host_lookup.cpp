#include "directory/redis/host_lookup.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include <netdb.h>

#include "base/os/event_fd.h"
#include "base/os/thread.h"

namespace pegaflow::directory {
namespace {

using Addresses = std::vector<HostAddress>;

Result<Addresses> look_up(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int problem = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (problem != 0) {
    return fail(Errc::kPeerLost, "look up {}: {}", host, ::gai_strerror(problem));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(list, &::freeaddrinfo);
  Addresses found;
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    HostAddress& address = found.emplace_back();
    address.size = std::min<socklen_t>(each->ai_addrlen, sizeof address.bytes);
    std::memcpy(&address.bytes, each->ai_addr, address.size);
  }
  return found;
}

}  // namespace

/// State that the thread and the owner of the lookup share: either may end first.
struct HostLookup::Shared {
  enum class State : std::uint8_t { kIdle, kRunning, kDone };
  EventFd done;
  std::atomic<State> state{State::kIdle};
  Result<Addresses> result = Addresses();
};

HostLookup::HostLookup(std::string host, std::uint16_t port)
    : host_(std::move(host)), port_(port), shared_(std::make_shared<Shared>()) {}

Result<void> HostLookup::begin() {
  // Pairs with the store of the thread.
  if (shared_->state.load(std::memory_order_acquire) != Shared::State::kIdle) return {};
  shared_->result = look_up(host_, port_, AI_NUMERICHOST | AI_NUMERICSERV);
  if (shared_->result) {
    shared_->state.store(Shared::State::kDone, std::memory_order_release);
    return {};
  }
  shared_->state.store(Shared::State::kRunning, std::memory_order_release);
  auto started = start_thread("pega-resolve", [shared = shared_, host = host_, port = port_]() {
    shared->result = look_up(host, port, AI_NUMERICSERV);
    // Pairs with the loads in begin() and take().
    shared->state.store(Shared::State::kDone, std::memory_order_release);
    shared->done.signal();
  });
  if (!started) {
    shared_->state.store(Shared::State::kIdle, std::memory_order_release);
    return tl::unexpected<Error>(std::move(started.error()));
  }
  // It cannot be ended: it is gone when the name servers have answered, or with the process.
  started->detach();
  return {};
}

int HostLookup::fd() const noexcept { return shared_->done.fd(); }

std::optional<Result<HostLookup::Addresses>> HostLookup::take() {
  shared_->done.clear();
  // Pairs with the store of the thread.
  if (shared_->state.load(std::memory_order_acquire) != Shared::State::kDone) return {};
  Result<Addresses> result = std::move(shared_->result);
  shared_->state.store(Shared::State::kIdle, std::memory_order_release);
  return result;
}

}  // namespace pegaflow::directory
