#pragma once
/// \file
/// Requests to a node, sent as by another node.

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/error.h"

namespace pegaflow::perf {

/// A connection to the --peer-listen of a node without a secret. Thread-bound.
class PeerQuestion {
 public:
  /// Errors: kPeerLost when no node responds at `address`; kRefused when it rejects the greeting.
  static Result<std::unique_ptr<PeerQuestion>> greet(const std::string& address);
  ~PeerQuestion();
  PeerQuestion(const PeerQuestion&) = delete;
  PeerQuestion& operator=(const PeerQuestion&) = delete;

  /// The round-trip time of one `confirm`. Errors: kPeerLost.
  Result<Duration> confirm();

 private:
  struct Connection;
  explicit PeerQuestion(std::unique_ptr<Connection> connection);

  std::unique_ptr<Connection> connection_;
};

}  // namespace pegaflow::perf
