#include "directory/servers.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/id128.h"
#include "base/log.h"

namespace pegaflow::directory {
namespace {

constexpr Log kLog{"directory"};

constexpr std::size_t kSlots = std::size_t{1} << 16;
constexpr std::string_view kMarkerStart = "pegaflow-directory 1 ";

/// FNV-1a, finalized: the same at every node and in every release.
std::uint64_t hash_of(std::string_view text, std::uint64_t number) {
  std::uint64_t hash = 0xcbf29ce484222325ULL ^ number * 0x9e3779b97f4a7c15ULL;
  for (const char byte : text) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  }
  hash ^= hash >> 33;
  hash *= 0xff51afd7ed558ccdULL;
  return hash ^ (hash >> 33);
}

/// The bits in a marker; no value if it is none.
std::optional<unsigned> bits_of(std::string_view marker) {
  if (!marker.starts_with(kMarkerStart)) return {};
  marker.remove_prefix(kMarkerStart.size());
  unsigned bits = 0;
  const auto [end, status] = std::from_chars(marker.data(), marker.data() + marker.size(), bits);
  const bool has_id = static_cast<std::size_t>(marker.data() + marker.size() - end) == 33;
  if (status != std::errc() || !has_id || bits < kLeastBucketBits || bits > kMostBucketBits) {
    return {};
  }
  return bits;
}

}  // namespace

Servers::Servers(const std::vector<Commands*>& servers, const Options& options, const Clock& clock,
                 Stats& stats)
    : options_(options), clock_(clock), stats_(stats), slots_(kSlots) {
  for (Commands* const each : servers) servers_.push_back({.commands = each, .why = {}});
  if (servers_.size() == 1) return;  // It has all slots.
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    std::uint64_t best = 0;
    for (std::size_t server = 0; server < servers_.size(); ++server) {
      const std::uint64_t weight = hash_of(servers_[server].commands->name(), slot);
      if (server != 0 && weight <= best) continue;
      best = weight;
      slots_[slot] = static_cast<std::uint8_t>(server);
    }
  }
}

bool Servers::is_ready(std::size_t server) const noexcept {
  const Server& one = servers_[server];
  return one.commands->is_up() && one.life == one.commands->life() && one.bucket_bits != 0;
}

bool Servers::is_prompt(std::size_t server) const noexcept {
  return is_ready(server) && !servers_[server].commands->is_late();
}

bool Servers::expect(const Result<Reply>& reply, Reply::Kind wanted) {
  if (!reply) return false;
  if (reply->is(wanted)) return true;
  ++(reply->is(Reply::Kind::kError) ? stats_.errors : stats_.bad_replies);
  return false;
}

void Servers::check(std::size_t server) {
  Server& one = servers_[server];
  one.is_checking = true;
  one.next = clock_.now() + options_.check;
  const std::uint64_t life = one.commands->life();
  const std::string fresh =
      fmt::format("{}{} {}", kMarkerStart, options_.bucket_bits, to_string(Id128::random()));
  // Each time, so that a server that was flushed has a marker at once.
  one.commands->send(std::array<std::string_view, 4>{"SET", "g", fresh, "NX"},
                     [this](Result<Reply>&& reply) {
                       if (reply && reply->is(Reply::Kind::kNil)) return;
                       expect(reply, Reply::Kind::kStatus);
                     });
  one.commands->send(std::array<std::string_view, 2>{"GET", "g"},
                     [this, server, life](Result<Reply>&& reply) { read(server, life, reply); });
}

void Servers::read(std::size_t server, std::uint64_t life, const Result<Reply>& reply) {
  Server& one = servers_[server];
  one.is_checking = false;
  if (!reply || life != one.commands->life()) return;
  const auto bits = expect(reply, Reply::Kind::kText) ? bits_of(reply->text) : std::nullopt;
  if (!bits) {
    if (reply->is(Reply::Kind::kText)) ++stats_.bad_replies;
    std::string why = fmt::format("its key \"g\" is no marker of a directory: \"{}\"",
                                  reply->text.substr(0, 100));
    if (one.why != why) {
      kLog.error(
          "directory server not used, it needs a database of its own server={} reason=\"{}\"",
          one.commands->name(), why);
    }
    one.why = std::move(why);
    one.bucket_bits = 0;
    return;
  }
  const bool is_new_life = std::exchange(one.life, life) != life;
  const bool is_new_data = one.marker != reply->text;
  one.marker = reply->text;
  one.bucket_bits = *bits;
  one.why.clear();
  if (is_new_data && *bits != options_.bucket_bits) {
    kLog.warn("directory server has another number of buckets, which is used server={} bits={}",
              one.commands->name(), *bits);
  }
  // A lost connection may have lost writes.
  if ((is_new_life || is_new_data) && lost_) lost_(server);
}

void Servers::step() {
  const TimePoint now = clock_.now();
  for (std::size_t server = 0; server < servers_.size(); ++server) {
    Server& one = servers_[server];
    if (!one.commands->is_up() || one.is_checking) continue;
    const bool is_new = one.life != one.commands->life() && one.why.empty();
    if (is_new || now >= one.next) check(server);
  }
}

TimePoint Servers::next_step() const {
  TimePoint next = TimePoint::max();
  for (const Server& one : servers_) {
    if (one.commands->is_up() && !one.is_checking) next = std::min(next, one.next);
  }
  return next;
}

}  // namespace pegaflow::directory
