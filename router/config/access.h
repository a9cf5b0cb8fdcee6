#pragma once
/// \file
/// The API keys of the router's clients, and their request rates.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"
#include "base/error.h"

namespace pegaflow::router {

/// The API keys of a file, each with a bucket of requests. Thread-bound.
class AccessList {
 public:
  /// Parses lines `NAME KEY [REQUESTS_PER_SECOND]`; ignores blank lines and lines that begin with
  /// #. A key without a rate has `default_rate`; 0 is unlimited. A bucket holds the requests of one
  /// second, at least one.
  /// Errors: kInvalidArgument that names the line, never the key; also for a text without a key,
  /// because the file may be incomplete.
  static Result<AccessList> parse(std::string_view text, std::int64_t default_rate);

  /// Copies the levels of the buckets of `former` for keys that stay with their rate: reading the
  /// file again gives no client more requests.
  void continue_from(const AccessList& former);

  struct Verdict {
    enum class Kind : unsigned char { kAllowed, kUnknown, kTooOften } kind = Kind::kUnknown;
    std::string_view name{};    ///< The name of the key; lives as long as the list.
    Duration retry_after = {};  ///< With kTooOften.
  };
  /// Takes one request out of the key's bucket. The time that it takes does not depend on the bytes
  /// of a key.
  Verdict check(std::string_view key, TimePoint now);

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }

 private:
  struct Entry {
    std::string name;
    std::string key;
    double rate = 0;  // Requests per second.
    double tokens = 1;
    TimePoint filled{};
  };
  std::unordered_map<std::uint64_t, Entry> entries_;  // By a keyed hash of the key.
  std::uint64_t seed_ = 0;
};

/// The key in `Authorization: Bearer KEY`; empty for anything else.
std::string_view bearer_key(std::string_view authorization);

}  // namespace pegaflow::router
