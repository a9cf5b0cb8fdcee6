#include "router/config/access.h"

#include <algorithm>
#include <charconv>
#include <random>
#include <sstream>
#include <vector>

#include <xxhash.h>

namespace pegaflow::router {
namespace {

bool same_bytes(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference |=
        static_cast<unsigned char>(a[i]) ^ static_cast<unsigned>(static_cast<unsigned char>(b[i]));
  }
  return difference == 0;
}

}  // namespace

Result<AccessList> AccessList::parse(std::string_view text, std::int64_t default_rate) {
  AccessList list;
  std::random_device device;
  list.seed_ = (std::uint64_t{device()} << 32U) | device();
  std::istringstream lines{std::string(text)};
  std::size_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::istringstream in(line);
    std::vector<std::string> words;
    for (std::string word; in >> word;) words.push_back(word);
    if (words.empty() || words[0].front() == '#') continue;
    if (words.size() > 3 || words.size() < 2) {
      return fail(Errc::kInvalidArgument, "line {}: expected `NAME KEY [REQUESTS_PER_SECOND]`",
                  number);
    }
    std::int64_t rate = default_rate;
    if (words.size() == 3) {
      const char* const end = words[2].data() + words[2].size();
      const auto [rest, status] = std::from_chars(words[2].data(), end, rate);
      if (status != std::errc() || rest != end || rate < 0) {
        return fail(Errc::kInvalidArgument, "line {}: the rate is not a whole number", number);
      }
    }
    Entry entry{words[0], words[1], static_cast<double>(rate), 0, {}};
    entry.tokens = std::max(1.0, entry.rate);
    const std::uint64_t hash = XXH3_64bits_withSeed(words[1].data(), words[1].size(), list.seed_);
    if (!list.entries_.emplace(hash, std::move(entry)).second) {
      return fail(Errc::kInvalidArgument, "line {}: the key is a duplicate", number);
    }
  }
  if (list.entries_.empty()) return fail(Errc::kInvalidArgument, "the file has no key");
  return list;
}

void AccessList::continue_from(const AccessList& former) {
  for (const auto& [hash, old] : former.entries_) {
    const auto found = entries_.find(XXH3_64bits_withSeed(old.key.data(), old.key.size(), seed_));
    if (found == entries_.end() || found->second.key != old.key) continue;
    if (found->second.rate != old.rate) continue;
    found->second.tokens = old.tokens;
    found->second.filled = old.filled;
  }
}

AccessList::Verdict AccessList::check(std::string_view key, TimePoint now) {
  const auto found = entries_.find(XXH3_64bits_withSeed(key.data(), key.size(), seed_));
  if (found == entries_.end() || !same_bytes(found->second.key, key)) return {};
  Entry& entry = found->second;
  if (entry.rate > 0) {
    const double size = std::max(1.0, entry.rate);
    const double seconds = std::chrono::duration<double>(now - entry.filled).count();
    entry.tokens = std::min(size, entry.tokens + seconds * entry.rate);
    entry.filled = now;
    if (entry.tokens < 1) {
      const std::chrono::duration<double> wait((1 - entry.tokens) / entry.rate);
      return {Verdict::Kind::kTooOften, entry.name, std::chrono::duration_cast<Duration>(wait)};
    }
    entry.tokens -= 1;
  }
  return {Verdict::Kind::kAllowed, entry.name};
}

std::string_view bearer_key(std::string_view authorization) {
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() <= kScheme.size()) return {};
  for (std::size_t i = 0; i < kScheme.size(); ++i) {
    const char c = authorization[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c) != kScheme[i]) return {};
  }
  authorization.remove_prefix(kScheme.size());
  return authorization;
}

}  // namespace pegaflow::router
