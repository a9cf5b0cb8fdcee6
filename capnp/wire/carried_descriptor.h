#pragma once
/// \file
/// Capabilities that do nothing but carry a descriptor.

#include <memory>
#include <utility>

#include <kj/common.h>

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

}  // namespace pegaflow
