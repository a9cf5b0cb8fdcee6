#pragma once
/// \file
/// Bytes to a Unix socket without any protocol.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/os/unique_fd.h"

namespace pegaflow::testing {

/// A blocking connection to a Unix socket. Thread-bound.
class RawConnection {
 public:
  /// Throws std::runtime_error when nobody listens.
  explicit RawConnection(const std::string& socket);

  /// All of the bytes; false when the other side closed, or took nothing for kHang.
  bool send(std::string_view bytes);
  /// All of it in one message, with a copy of `fd` beside its first byte.
  bool send_with_fd(std::string_view bytes, int fd);
  /// Closes our direction only.
  void finish();
  /// Reads until the other side closes; false after kHang.
  bool becomes_closed();
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  UniqueFd fd_;
};

}  // namespace pegaflow::testing
