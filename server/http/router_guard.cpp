#include "server/http/router_guard.h"

#include <utility>

#include "base/log.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"http"};

constexpr Duration kLookInterval = std::chrono::seconds(1);
constexpr std::string_view kBearer = "Bearer ";

}  // namespace

Result<RouterGuard> RouterGuard::create(const std::string& file) {
  RouterGuard guard(file, WatchedFile(file));
  if (!file.empty()) {
    PEGA_TRY_LET(guard.secrets_, cluster::PeerSecrets::read(file));
  }
  return guard;
}

void RouterGuard::read_again(TimePoint clock) {
  if (clock - looked_at_ < kLookInterval) return;
  looked_at_ = clock;
  // Corrected permissions do not change the stamp, so a bad file is read again each time.
  if (!at_.has_changed() && is_file_good_) return;
  auto read = cluster::PeerSecrets::read(file_);
  if (read) {
    secrets_ = std::move(*read);
  } else if (is_file_good_) {
    kLog.error(
        "the changed secret file is rejected, routers prove the former secrets reason=\"{}\"",
        read.error().detail);
  }
  is_file_good_ = read.has_value();
}

std::optional<PostRefusal> RouterGuard::refuse(const cluster::PeerSecret::HttpRequest& request,
                                               std::optional<std::string_view> authorization,
                                               std::uint64_t now, TimePoint clock) {
  if (!secrets_) {
    ++refused_;
    return PostRefusal{403,
                       "this page is for routers that share a secret with the server: start both "
                       "with --peer-secret-file FILE"};
  }
  read_again(clock);
  const bool is_good =
      authorization && authorization->starts_with(kBearer) &&
      cluster::is_http_token(*secrets_, request, authorization->substr(kBearer.size()), now);
  if (is_good) return std::nullopt;
  ++refused_;
  return PostRefusal{401,
                     "the token is missing, wrong or too old: the router needs the secret of "
                     "--peer-secret-file, and a clock that is right within two minutes"};
}

}  // namespace pegaflow::server
