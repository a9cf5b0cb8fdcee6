#pragma once
/// \file
/// Who may use the router, and how often.

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
  /// Lines `NAME KEY [REQUESTS_PER_SECOND]`; blank lines and those that begin with # do not count.
  /// A key without a rate has `default_rate`; 0 is without limit. A bucket holds the requests of
  /// one second, one at least.
  /// Errors: kInvalidArgument that names the line, never the key; also for a text without a key,
  /// which is a file that is just being written.
  static Result<AccessList> parse(std::string_view text, std::int64_t default_rate);

  /// Takes over how full the buckets of `former` are, for keys that stay with their rate: reading
  /// the file again gives nobody more requests.
  void continue_from(const AccessList& former);

  struct Verdict {
    enum class Kind : unsigned char { kAllowed, kUnknown, kTooOften } kind = Kind::kUnknown;
    std::string_view name{};    ///< Whose key it is; lives as long as the list.
    Duration retry_after = {};  ///< With kTooOften.
  };
  /// Takes one request out of the key's bucket. How long it takes says nothing about a key's bytes.
  Verdict check(std::string_view key, TimePoint now);

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }

 private:
  struct Entry {
    std::string name;
    std::string key;
    double rate = 0;  // A second.
    double tokens = 1;
    TimePoint filled{};
  };
  std::unordered_map<std::uint64_t, Entry> entries_;  // By a keyed hash of the key.
  std::uint64_t seed_ = 0;
};

/// The key in `Authorization: Bearer KEY`; empty for anything else.
std::string_view bearer_key(std::string_view authorization);

}  // namespace pegaflow::router
