#pragma once
/// \file
/// One Redis server as the directory uses it, so that a simulation can stand in its place.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "directory/redis/reply.h"

namespace pegaflow::directory {

/// Sends commands to one server, which answers them in order.
///
/// It is *up* from the moment that the server has accepted the login until the connection is lost.
/// Each time begins another *life*. Thread-bound.
class Commands {
 public:
  /// Errors: kPeerLost when the connection is lost before the reply; kBusy beyond a limit.
  using Answer = std::function<void(Result<Reply>&&)>;

  virtual ~Commands() = default;

  /// For logs and metrics, and to distribute anchors: the same text at every node.
  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  [[nodiscard]] virtual bool is_up() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t life() const noexcept = 0;
  /// A command has waited for its reply beyond the deadline, and still does.
  [[nodiscard]] virtual bool is_late() const noexcept = 0;
  /// Commands without a reply yet.
  [[nodiscard]] virtual std::size_t open() const noexcept = 0;
  /// `answer` is called once, later or at once.
  virtual void send(std::span<const std::string_view> arguments, Answer answer) = 0;
};

}  // namespace pegaflow::directory
