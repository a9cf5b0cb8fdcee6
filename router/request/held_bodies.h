#pragma once
/// \file
/// The bodies of a request that may still be sent to an engine.

#include <cstddef>
#include <string>

namespace pegaflow::router {

class ClientRequest;

/// Owns the client's body, and with --pd-first-token the body that continues after the first token.
/// Both, and the text of the prompt that the policy kv-aware keeps, count in Metrics::body_bytes
/// until release(): the client's connection counts the first, this object the others. Thread-bound.
class HeldBodies {
 public:
  explicit HeldBodies(ClientRequest& request) : request_(request) {}
  ~HeldBodies() {
    drop_continuation();
    count_text(0);
  }
  HeldBodies(const HeldBodies&) = delete;
  HeldBodies& operator=(const HeldBodies&) = delete;

  /// The client's body, without the members that were removed.
  [[nodiscard]] std::string& client() noexcept { return client_; }
  [[nodiscard]] const std::string& continuation() const noexcept { return continuation_; }
  void hold_continuation(std::string body);
  void drop_continuation();
  /// Another object keeps `bytes` of the prompt's text.
  void count_text(std::size_t bytes);
  /// Frees both bodies: nothing is sent again.
  void release();

 private:
  ClientRequest& request_;
  std::string client_;
  std::string continuation_;
  std::size_t text_bytes_ = 0;
};

}  // namespace pegaflow::router
