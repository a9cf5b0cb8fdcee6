#include "directory/redis/server_info.h"

#include <algorithm>
#include <charconv>

namespace pegaflow::directory {
namespace {

/// A value for logs and pages: short, of printable ASCII.
std::string word_of(std::string_view text) {
  constexpr std::size_t kMost = 32;
  const bool is_good = text.size() <= kMost && std::all_of(text.begin(), text.end(), [](char each) {
                         return each > ' ' && each < 0x7f;
                       });
  return is_good ? std::string(text) : std::string();
}

}  // namespace

void ServerInfo::read(std::string_view text) {
  std::string redis;
  std::string valkey;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) continue;
    const std::string_view name = line.substr(0, colon);
    const std::string value = word_of(line.substr(colon + 1));
    if (name == "redis_version") redis = value;
    if (name == "valkey_version") valkey = value;
    if (name == "redis_mode" || name == "server_mode") mode = value;
    if (name == "maxmemory_policy") policy = value;
    if (name == "maxmemory") {
      max_bytes = 0;
      std::from_chars(value.data(), value.data() + value.size(), max_bytes);
    }
  }
  // Valkey also tells the version of Redis that it is compatible with.
  if (!valkey.empty()) {
    version = "Valkey " + valkey;
  } else if (!redis.empty()) {
    version = "Redis " + redis;
  }
}

}  // namespace pegaflow::directory
