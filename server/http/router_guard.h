#pragma once
/// \file
/// The check of requests that only routers may send.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/watched_file.h"
#include "cluster/peer_proof.h"
#include "server/http/http_guard.h"

namespace pegaflow::server {

/// Decides about the requests of routers, by tokens made with a secret of --peer-secret-file. The
/// file is read again when it has changed, at most once a second and only with a request; if it is
/// bad then, the former secrets stay in use. Thread-bound.
class RouterGuard {
 public:
  /// `file` empty: every request is refused, with a text that says how to change that.
  /// Errors: those of PeerSecrets::read().
  static Result<RouterGuard> create(const std::string& file);

  /// The reason to refuse, or no value: 403 without a file, 401 for a token that is missing, too
  /// old or wrong. `now` is in seconds since 1970, and `clock` is for the interval between looks at
  /// the file. `authorization` is the whole header.
  [[nodiscard]] std::optional<PostRefusal> refuse(const cluster::PeerSecret::HttpRequest& request,
                                                  std::optional<std::string_view> authorization,
                                                  std::uint64_t now, TimePoint clock);

  [[nodiscard]] std::uint64_t refused() const noexcept { return refused_; }

 private:
  RouterGuard(std::string file, WatchedFile at) : file_(std::move(file)), at_(std::move(at)) {}
  void read_again(TimePoint clock);

  std::string file_;
  WatchedFile at_;
  std::optional<cluster::PeerSecrets> secrets_{};  ///< No value without a file.
  TimePoint looked_at_{};
  bool is_file_good_ = true;
  std::uint64_t refused_ = 0;
};

}  // namespace pegaflow::server
