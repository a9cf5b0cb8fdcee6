#pragma once
/// \file
/// The consent of this process to reads of its memory, where the kernel demands it.

#include <cstdint>

#include <kj/async.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/read_consent.h"
#include "client/link.h"

namespace pegaflow {

/// Consents to the processes that the server names, one at a time.
///
/// Bound to the KJ thread of its link.
class Consent {
 public:
  /// The link outlives it. The server answers each call, and `deadline` later at the latest.
  Consent(Link& link, ReadConsent kernel, Duration deadline)
      : link_(link), kernel_(std::move(kernel)), deadline_(deadline) {}
  ~Consent() { end(); }
  Consent(const Consent&) = delete;
  Consent& operator=(const Consent&) = delete;

  /// Whether other processes need the consent of this one.
  [[nodiscard]] bool is_needed() const noexcept { return kernel_.is_needed; }
  /// Whether this process needs none of others.
  [[nodiscard]] bool reads_without() const noexcept { return kernel_.reads_without; }

  /// The server has registered memory that needs consent.
  void begin();
  /// The connection ends: no process may read any longer.
  void end();

 private:
  struct Next;
  /// `refused`: a process that cannot be permitted, by the server's name; 0: none.
  kj::Promise<void> permit_next(std::uint64_t permitted, std::uint64_t refused = 0);
  kj::Promise<void> permit(Next&& next);

  Link& link_;
  const ReadConsent kernel_;
  const Duration deadline_;
  bool has_begun_ = false;
  bool is_busy_told_ = false;
  kj::Promise<void> task_ = nullptr;
};

}  // namespace pegaflow
