#include "tests/sim/directory_servers.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace pegaflow::directory {
namespace {

Reply nil() { return {}; }
Reply text_of(std::string value) {
  return {.kind = Reply::Kind::kText, .text = std::move(value), .items = {}};
}
Reply status() { return {.kind = Reply::Kind::kStatus, .text = "OK", .items = {}}; }
Reply count_of(bool is_changed) {
  return {.kind = Reply::Kind::kInteger, .integer = is_changed ? 1 : 0, .text = {}, .items = {}};
}

int order(const std::array<char, kMemberBytes>& member, const std::string& text) {
  const std::size_t both = std::min(member.size(), text.size());
  const int order = std::memcmp(member.data(), text.data(), both);
  return order != 0 ? order : static_cast<int>(member.size()) - static_cast<int>(text.size());
}

/// The first member that is not before `bound`.
template <typename Members>
auto lower_bound(Members& members, const std::string& bound) {
  return std::lower_bound(
      members.begin(), members.end(), bound,
      [](const auto& member, const std::string& text) { return order(member, text) < 0; });
}

}  // namespace

Reply SimulatedServer::run(const std::vector<std::string>& words, TimePoint now) {
  const std::string& name = words[0];
  const bool is_anchor = words[1].starts_with("a:");
  if (is_anchor && name == "ZRANGEBYLEX") {
    const bool is_sweep = words[3] == "+";
    counts_.long_buckets += is_sweep && words[2] != "-" ? 1 : 0;
    ++(is_sweep ? counts_.sweeps : counts_.anchor_lookups);
    return range(words);
  }
  if (is_anchor) {
    ++counts_.anchor_writes;
    return count_of(name == "ZADD" ? change_anchor(words[1], words[3], true)
                                   : change_anchor(words[1], words[2], false));
  }
  ++counts_.other;
  if (name == "SET") return set(words, now);
  if (name == "GET") return get(words[1], now);
  if (name == "PEXPIRE") return count_of(extend(words[1], std::stoll(words[2]), now));
  if (name == "ZRANGEBYLEX") return range(words);
  if (name == "ZADD") return count_of(sets_[words[1]].insert(words[3]).second);
  if (name == "ZREM") return count_of(sets_[words[1]].erase(words[2]) != 0);
  if (name != "MGET") return {.kind = Reply::Kind::kError, .text = "ERR unknown", .items = {}};
  Reply all{.kind = Reply::Kind::kArray, .text = {}, .items = {}};
  for (std::size_t i = 1; i < words.size(); ++i) {
    all.items.push_back(get(words[i], now));
    counts_.lease_bytes += all.items.back().text.size() + 7;  // With its header: "$64\r\n", "\r\n".
  }
  return all;
}

void SimulatedServer::flush() {
  texts_.clear();
  sets_.clear();
  anchors_.clear();
  members_ = 0;
}

Reply SimulatedServer::get(const std::string& key, TimePoint now) {
  const auto found = texts_.find(key);
  if (found == texts_.end() || found->second.until <= now) return nil();
  return text_of(found->second.value);
}

Reply SimulatedServer::set(const std::vector<std::string>& words, TimePoint now) {
  const bool is_new_only = words.back() == "NX";
  if (is_new_only && get(words[1], now).is(Reply::Kind::kText)) return nil();
  Text text{.value = words[2]};
  if (words.size() == 5) text.until = now + std::chrono::milliseconds(std::stoll(words[4]));
  texts_[words[1]] = std::move(text);
  return status();
}

bool SimulatedServer::extend(const std::string& key, std::int64_t ms, TimePoint now) {
  if (!get(key, now).is(Reply::Kind::kText)) return false;
  texts_[key].until = now + std::chrono::milliseconds(ms);
  return true;
}

Reply SimulatedServer::range(const std::vector<std::string>& words) {
  Reply found{.kind = Reply::Kind::kArray, .text = {}, .items = {}};
  const std::size_t most = std::stoul(words[6]);
  if (words[1].starts_with("a:")) {
    const auto bucket = anchors_.find(words[1]);
    if (bucket == anchors_.end()) return found;
    const Bucket& members = bucket->second;
    auto at = words[2] == "-" ? members.begin() : lower_bound(members, words[2].substr(1));
    const auto end = words[3] == "+" ? members.end() : lower_bound(members, words[3].substr(1));
    for (; at < end && found.items.size() < most; ++at) {
      found.items.push_back(text_of(std::string(at->data(), at->size())));
    }
    return found;
  }
  // All members of another set.
  for (const std::string& member : sets_[words[1]]) {
    if (found.items.size() >= most) break;
    found.items.push_back(text_of(member));
  }
  return found;
}

bool SimulatedServer::change_anchor(const std::string& key, const std::string& member,
                                    bool is_added) {
  Bucket& members = anchors_[key];
  const auto at = lower_bound(members, member);
  const bool is_there = at != members.end() && order(*at, member) == 0;
  if (is_there == is_added) return false;
  if (is_added) {
    std::array<char, kMemberBytes> bytes{};
    std::memcpy(bytes.data(), member.data(), std::min(bytes.size(), member.size()));
    members.insert(at, bytes);
    ++members_;
  } else {
    members.erase(at);
    --members_;
    if (members.empty()) anchors_.erase(key);
  }
  return true;
}

void SimulatedNetwork::Connection::send(std::span<const std::string_view> arguments,
                                        Answer answer) {
  ++open_;
  network_.sent_.push_back({.at = network_.clock_.now() + kLatency,
                            .from = self_,
                            .server = &server_,
                            .words = {arguments.begin(), arguments.end()},
                            .answer = std::move(answer)});
}

void SimulatedNetwork::run_until(TimePoint end) {
  while (!sent_.empty() && sent_.front().at <= end) {
    Sent sent = std::move(sent_.front());
    sent_.pop_front();
    if (sent.at > clock_.now()) clock_.advance(sent.at - clock_.now());
    Reply reply = sent.server->run(sent.words, clock_.now());
    // A node that has ended receives nothing; what it had sent arrives.
    if (*sent.from == nullptr) continue;
    --(*sent.from)->open_;
    sent.answer(std::move(reply));
  }
  if (end > clock_.now()) clock_.advance(end - clock_.now());
}

}  // namespace pegaflow::directory
