#pragma once
/// \file
/// A server of the directory in memory, which answers when a test says so, with faults.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "directory/redis/commands.h"

namespace pegaflow::directory::testing {

/// The data, which several connections may share.
struct Data {
  struct Text {
    std::string value;
    TimePoint until = TimePoint::max();
  };
  std::map<std::string, Text, std::less<>> texts;
  std::map<std::string, std::set<std::string>, std::less<>> sets;

  [[nodiscard]] std::size_t members() const {
    std::size_t count = 0;
    for (const auto& [key, members] : sets) count += key.starts_with("a:") ? members.size() : 0;
    return count;
  }
};

inline Reply nil() { return {.text = {}, .items = {}}; }
inline Reply text(std::string value) {
  return {.kind = Reply::Kind::kText, .text = std::move(value), .items = {}};
}
inline Reply error(std::string value) {
  return {.kind = Reply::Kind::kError, .text = std::move(value), .items = {}};
}
inline Reply integer(std::int64_t value) {
  return {.kind = Reply::Kind::kInteger, .integer = value, .text = {}, .items = {}};
}

/// The connection of one node to it. Commands wait until run().
class MemoryServer final : public Commands {
 public:
  using Words = std::vector<std::string>;

  MemoryServer(Data& data, const Clock& clock, std::string name = "redis://memory:1/0")
      : data_(data), clock_(clock), name_(std::move(name)) {}

  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] bool is_up() const noexcept override { return is_up_; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return life_; }
  [[nodiscard]] bool is_late() const noexcept override { return false; }
  [[nodiscard]] std::size_t open() const noexcept override { return open_.size(); }
  void send(std::span<const std::string_view> arguments, Answer answer) override {
    if (!is_up_) return answer(fail(Errc::kPeerLost, "{} is not connected", name_));
    open_.push_back({Words(arguments.begin(), arguments.end()), std::move(answer)});
  }

  /// Answers commands, also those that answers cause; one to which `faults` has a reply gets it.
  void run(std::size_t most = SIZE_MAX) {
    for (; most > 0 && !open_.empty(); --most) {
      auto [words, answer] = std::move(open_.front());
      open_.pop_front();
      done.push_back(words);
      if (faults) {
        if (auto reply = faults(words)) {
          answer(std::move(*reply));
          continue;
        }
      }
      answer(execute(words));
    }
  }
  /// The connection breaks: open commands are answered with an error. It is up again at once.
  void lose() {
    is_up_ = false;
    for (auto& [words, answer] : std::exchange(open_, {})) {
      answer(fail(Errc::kPeerLost, "the connection to {} is lost", name_));
    }
    is_up_ = true;
    ++life_;
  }
  [[nodiscard]] std::size_t count(std::string_view command, std::string_view key = {}) const {
    std::size_t found = 0;
    for (const Words& words : done) {
      found += words[0] == command && words[1].starts_with(key) ? 1 : 0;
    }
    return found;
  }

  std::function<std::optional<Reply>(const Words&)> faults;
  std::vector<Words> done;  ///< All commands that were answered.

 private:
  Reply get(const std::string& key) const {
    if (data_.sets.contains(key)) return error("WRONGTYPE Operation against a key");
    const auto found = data_.texts.find(key);
    if (found == data_.texts.end() || found->second.until <= clock_.now()) return nil();
    return text(found->second.value);
  }

  Reply execute(const Words& words) {
    const std::string& name = words[0];
    if (name == "GET") return get(words[1]);
    if (name == "MGET") {
      Reply all{.kind = Reply::Kind::kArray, .text = {}, .items = {}};
      for (std::size_t i = 1; i < words.size(); ++i) all.items.push_back(get(words[i]));
      return all;
    }
    if (name == "SET") return set(words);
    if (name == "PEXPIRE") {
      if (!get(words[1]).is(Reply::Kind::kText)) return integer(0);
      data_.texts[words[1]].until = clock_.now() + std::chrono::milliseconds(std::stoll(words[2]));
      return integer(1);
    }
    if (name == "ZADD") return integer(data_.sets[words[1]].insert(words[3]).second ? 1 : 0);
    if (name == "ZREM")
      return integer(static_cast<std::int64_t>(data_.sets[words[1]].erase(words[2])));
    if (name == "ZRANGEBYLEX") return range(words);
    return error("ERR unknown command");
  }
  Reply set(const Words& words) {
    if (words.back() == "NX" && get(words[1]).is(Reply::Kind::kText)) return nil();
    Data::Text text{.value = words[2]};
    if (words.size() == 5)
      text.until = clock_.now() + std::chrono::milliseconds(std::stoll(words[4]));
    data_.sets.erase(words[1]);
    data_.texts[words[1]] = std::move(text);
    return {.kind = Reply::Kind::kStatus, .text = "OK", .items = {}};
  }
  Reply range(const Words& words) {
    Reply found{.kind = Reply::Kind::kArray, .text = {}, .items = {}};
    const std::set<std::string>& members = data_.sets[words[1]];
    auto at = words[2] == "-" ? members.begin() : members.lower_bound(words[2].substr(1));
    const auto end = words[3] == "+" ? members.end() : members.lower_bound(words[3].substr(1));
    for (std::size_t left = std::stoul(words[6]); at != end && left > 0; ++at, --left) {
      found.items.push_back(text(*at));
    }
    return found;
  }

  Data& data_;
  const Clock& clock_;
  const std::string name_;
  std::deque<std::pair<Words, Answer>> open_;
  bool is_up_ = true;
  std::uint64_t life_ = 1;
};

}  // namespace pegaflow::directory::testing
