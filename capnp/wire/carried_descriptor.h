#pragma once
/// \file
/// Capabilities that do nothing but carry a descriptor.

#include <memory>
#include <utility>

#include <fcntl.h>

#include <kj/async.h>

#include "base/os/unique_fd.h"

namespace pegaflow {

/// Serves `Interface` with a descriptor that it borrows. `owner` keeps the descriptor open; without
/// one it outlives the connection.
template <typename Interface>
class CarriedDescriptor final : public Interface::Server {
 public:
  explicit CarriedDescriptor(int fd, std::shared_ptr<const void> owner = nullptr)
      : fd_(fd), owner_(std::move(owner)) {}
  kj::Maybe<int> getFd() override { return fd_; }

 private:
  const int fd_;
  const std::shared_ptr<const void> owner_;
};

/// A duplicate of the descriptor of a capability, which is closed with the capability; empty
/// without one.
template <typename Client>
kj::Promise<UniqueFd> descriptor_of(Client& capability) {
  return capability.getFd().then(
      [](kj::Maybe<int> fd) {
        KJ_IF_MAYBE (number, fd) {
          return UniqueFd(::fcntl(*number, F_DUPFD_CLOEXEC, 0));
        }
        return UniqueFd();
      },
      [](kj::Exception&&) { return UniqueFd(); });
}

}  // namespace pegaflow
