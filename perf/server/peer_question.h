#pragma once
/// \file
/// Questions to a node as another node asks them.

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/error.h"

namespace pegaflow::perf {

/// A connection to the --peer-listen of a node without a secret. Thread-bound.
class PeerQuestion {
 public:
  /// Errors: kPeerLost when nobody answers there, kRefused when it does not let us in.
  static Result<std::unique_ptr<PeerQuestion>> greet(const std::string& address);
  ~PeerQuestion();
  PeerQuestion(const PeerQuestion&) = delete;
  PeerQuestion& operator=(const PeerQuestion&) = delete;

  /// How long the answer to one `confirm` takes. Errors: kPeerLost.
  Result<Duration> confirm();

 private:
  struct Connection;
  explicit PeerQuestion(std::unique_ptr<Connection> connection);

  std::unique_ptr<Connection> connection_;
};

}  // namespace pegaflow::perf
