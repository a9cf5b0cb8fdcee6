#include "directory/redis/redis_url.h"

#include <cerrno>
#include <charconv>
#include <optional>
#include <utility>

#include <sys/stat.h>

#include <fmt/format.h>

#include "base/os/text_file.h"

namespace pegaflow::directory {
namespace {

/// The longest user or password.
constexpr std::size_t kMostBytes = 512;

template <typename T>
std::optional<T> number_of(std::string_view text, T most) {
  T number{};
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status != std::errc() || end != text.data() + text.size() || number > most) return {};
  return number;
}

std::optional<std::string> decoded(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      plain.push_back(text[i]);
      continue;
    }
    unsigned value = 0;
    const std::string_view digits = text.substr(i + 1, 2);
    const auto [end, status] =
        std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (status != std::errc() || digits.size() != 2 || end != digits.data() + 2) return {};
    plain.push_back(static_cast<char>(value));
    i += 2;
  }
  return plain;
}

/// The part of an address that may be logged.
std::string without_login(std::string_view text) {
  const std::size_t at = text.rfind('@');
  if (at == std::string_view::npos) return std::string(text);
  return "..." + std::string(text.substr(at));
}

Result<void> read_host(std::string_view text, RedisUrl& url) {
  std::string_view port;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return fail(Errc::kInvalidArgument, "']' is missing");
    url.host = text.substr(1, end - 1);
    text.remove_prefix(end + 1);
    if (!text.empty() && !text.starts_with(':')) {
      return fail(Errc::kInvalidArgument, "\"{}\" is no port", text);
    }
    port = text.empty() ? text : text.substr(1);
    if (!text.empty() && port.empty()) return fail(Errc::kInvalidArgument, "the port is missing");
  } else {
    const std::size_t colon = text.find(':');
    url.host = text.substr(0, colon);
    if (colon != std::string_view::npos) {
      port = text.substr(colon + 1);
      if (port.empty()) return fail(Errc::kInvalidArgument, "the port is missing");
    }
  }
  if (url.host.empty()) return fail(Errc::kInvalidArgument, "the host is missing");
  if (port.empty()) return {};
  const auto number = number_of<std::uint16_t>(port, 65535);
  if (!number || *number == 0) return fail(Errc::kInvalidArgument, "\"{}\" is no port", port);
  url.port = *number;
  return {};
}

Result<void> read_login(std::string_view text, RedisUrl& url) {
  const std::size_t colon = text.find(':');
  const auto user = decoded(text.substr(0, colon));
  const auto password =
      decoded(colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1));
  if (!user || !password) {
    return fail(Errc::kInvalidArgument, "'%' in a user or password needs two hexadecimal digits");
  }
  if (user->size() > kMostBytes || password->size() > kMostBytes) {
    return fail(Errc::kInvalidArgument, "a user or password has more than {} bytes", kMostBytes);
  }
  url.user = *user;
  url.password = *password;
  return {};
}

Result<RedisUrl> read_url(std::string_view text) {
  RedisUrl url;
  constexpr std::string_view kPlain = "redis://";
  constexpr std::string_view kTls = "rediss://";
  url.is_tls = text.starts_with(kTls);
  if (!url.is_tls && !text.starts_with(kPlain)) {
    return fail(Errc::kInvalidArgument, "it begins with neither redis:// nor rediss://");
  }
  text.remove_prefix(url.is_tls ? kTls.size() : kPlain.size());
  if (const std::size_t at = text.rfind('@'); at != std::string_view::npos) {
    PEGA_TRY(read_login(text.substr(0, at), url));
    text.remove_prefix(at + 1);
  }
  if (const std::size_t slash = text.find('/'); slash != std::string_view::npos) {
    const std::string_view database = text.substr(slash + 1);
    const auto number = number_of<unsigned>(database.empty() ? "0" : database, 65535);
    if (!number) return fail(Errc::kInvalidArgument, "\"{}\" is no number of a database", database);
    url.database = *number;
    text = text.substr(0, slash);
  }
  PEGA_TRY(read_host(text, url));
  return url;
}

}  // namespace

Result<RedisUrl> RedisUrl::parse(std::string_view text) {
  auto url = read_url(text);
  if (url) return url;
  return fail(Errc::kInvalidArgument,
              "--directory: \"{}\" is not redis[s]://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]: {}",
              without_login(text), url.error().detail);
}

std::string RedisUrl::name() const {
  const bool is_v6 = host.find(':') != std::string::npos;
  return fmt::format("{}://{}{}{}:{}/{}", is_tls ? "rediss" : "redis", is_v6 ? "[" : "", host,
                     is_v6 ? "]" : "", port, database);
}

Result<RedisLogin> RedisLogin::read(const std::string& path) {
  const std::string what = "--directory-secret-file " + path;
  const auto text = read_text_file(path);
  if (!text) return fail(Errc::kRefused, "{}: {}", what, text.error().detail);
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) return fail_errno(errno, what);
  if ((about.st_mode & S_IRWXO) != 0) {
    return fail(Errc::kRefused, "{}: every user may read it; chmod o= {}", what, path);
  }
  std::string_view rest = *text;
  while (rest.ends_with('\n') || rest.ends_with('\r')) rest.remove_suffix(1);
  RedisLogin login;
  if (const std::size_t end = rest.find('\n'); end != std::string_view::npos) {
    std::string_view user = rest.substr(0, end);
    if (user.ends_with('\r')) user.remove_suffix(1);
    login.user = user;
    rest.remove_prefix(end + 1);
  }
  login.password = rest;
  const bool has_more = rest.find('\n') != std::string_view::npos;
  if (login.password.empty() || has_more || rest.size() > kMostBytes ||
      login.user.size() > kMostBytes) {
    return fail(Errc::kInvalidArgument,
                "{}: it has to have a password, or a user and a password on two lines, of {} bytes "
                "at most",
                what, kMostBytes);
  }
  return login;
}

}  // namespace pegaflow::directory
