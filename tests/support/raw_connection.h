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
  /// Throws std::runtime_error if no process listens.
  explicit RawConnection(const std::string& socket);

  /// Sends all bytes; false if the other side closed, or took none for kHang.
  bool send(std::string_view bytes);
  /// Sends all bytes in one message, with a copy of `fd` beside the first one.
  bool send_with_fd(std::string_view bytes, int fd);
  /// Closes the direction to the peer only.
  void finish();
  /// Reads until the other side closes; false after kHang.
  bool becomes_closed();
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  UniqueFd fd_;
};

}  // namespace pegaflow::testing
