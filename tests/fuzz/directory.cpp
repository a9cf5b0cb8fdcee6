// libFuzzer: any bytes from a server of the directory.
//
// The first byte chooses: 0 replies, the same however the bytes are split, in proportion to what
// has arrived; 1 the contents that a node reads, with a right digest: what is taken is written
// again as the same bytes; 2 a node whose server gives these replies to its commands.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/log.h"
#include "directory/agent.h"
#include "directory/redis/redis_url.h"
#include "directory/redis/reply.h"

namespace pegaflow::directory {
namespace {

constexpr ReplyReader::Limits kLimits{
    .reply_bytes = 4096, .line_bytes = 64, .items = 128, .depth = 4};

std::span<const char> chars_of(std::string_view text) { return {text.data(), text.size()}; }

std::size_t bytes_of(const Reply& reply) {
  std::size_t bytes = sizeof(Reply) + reply.text.capacity();
  for (const Reply& item : reply.items) bytes += bytes_of(item);
  return bytes + (reply.items.capacity() - reply.items.size()) * sizeof(Reply);
}

bool is_same(const Reply& one, const Reply& other) {
  if (one.kind != other.kind || one.integer != other.integer || one.text != other.text ||
      one.items.size() != other.items.size()) {
    return false;
  }
  for (std::size_t i = 0; i < one.items.size(); ++i) {
    if (!is_same(one.items[i], other.items[i])) return false;
  }
  return true;
}

/// All replies of the bytes, in parts of that size, and whether they end with an error.
std::pair<std::vector<Reply>, bool> replies_of(std::string_view bytes, std::size_t part) {
  ReplyReader reader(kLimits);
  std::vector<Reply> replies;
  while (!bytes.empty()) {
    reader.feed(chars_of(bytes.substr(0, part)));
    bytes.remove_prefix(std::min(part, bytes.size()));
    for (;;) {
      auto next = reader.next();
      if (!next) {
        PEGA_ASSERT(next.error().code == Errc::kCorrupt, "{}", next.error().detail);
        return {std::move(replies), true};
      }
      if (!*next) break;
      replies.push_back(std::move(**next));
    }
  }
  return {std::move(replies), false};
}

void read_replies(std::string_view input) {
  if (input.empty()) return;
  const auto part = static_cast<unsigned char>(input[0]);
  input.remove_prefix(1);
  const auto [whole, whole_failed] = replies_of(input, SIZE_MAX);
  const auto [split, split_failed] = replies_of(input, std::size_t{1} + part % 32);
  PEGA_ASSERT(whole.size() == split.size() && whole_failed == split_failed,
              "{} replies in one part, {} in several", whole.size(), split.size());
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    PEGA_ASSERT(is_same(whole[i], split[i]), "reply {} depends on the parts", i);
    bytes += bytes_of(whole[i]);
  }
  // An item has three bytes at least, and an array's room doubles.
  PEGA_ASSERT(bytes <= 128 * input.size() + 4096, "{} bytes for {}", bytes, input.size());
}

void read_contents(std::string_view input) {
  const Bytes32 key{};
  const std::vector<Bytes32> keys{key};
  if (const auto member = member_of(input)) {
    PEGA_ASSERT(to_text(*member) == input, "a member of {} bytes", input.size());
  }
  const auto lease = Lease::unsealed(keys, seal(key, "lease 1", input));
  if (lease) {
    PEGA_ASSERT(lease->address.size() <= 64, "an address of {} bytes", lease->address.size());
    PEGA_ASSERT(Lease::unsealed(keys, lease->sealed(key)) == lease, "another lease");
  }
  PEGA_ASSERT(!Lease::unsealed(keys, input), "a lease without a digest");
  PEGA_ASSERT(!unseal(keys, "epochs 1", seal(key, "lease 1", input)), "a digest for all purposes");
  if (const auto known = epochs_of(input)) {
    const std::string text = to_text(*known);
    PEGA_ASSERT(text.size() == input.size(), "{} bytes", text.size());
    const auto again = epochs_of(text);
    PEGA_ASSERT(again && to_text(*again) == text, "other epochs");
  }
  if (const auto url = RedisUrl::parse(input)) {
    const auto again = RedisUrl::parse(url->name());
    PEGA_ASSERT(again && again->name() == url->name(), "{}", url->name());
  }
}

/// A server whose replies are the input's, in order.
class HostileServer final : public Commands {
 public:
  explicit HostileServer(std::string_view input) { reader_.feed(chars_of(input)); }

  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] bool is_up() const noexcept override { return is_up_; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return life_; }
  [[nodiscard]] bool is_late() const noexcept override { return false; }
  [[nodiscard]] std::size_t open() const noexcept override { return open_.size(); }
  void send(std::span<const std::string_view>, Answer answer) override {
    open_.push_back(std::move(answer));
  }

  /// False when the input is used up.
  bool answer_some(std::size_t most) {
    for (; most > 0 && !open_.empty(); --most) {
      auto next = reader_.next();
      if (!next || !*next) return false;
      Answer answer = std::move(open_.front());
      open_.pop_front();
      answer(std::move(**next));
    }
    return true;
  }
  void lose() {
    is_up_ = false;
    for (Answer& answer : std::exchange(open_, {})) answer(fail(Errc::kPeerLost, "lost"));
    is_up_ = true;
    ++life_;
  }

 private:
  const std::string name_ = "redis://fuzz:1/0";
  ReplyReader reader_{kLimits};
  std::deque<Answer> open_;
  bool is_up_ = true;
  std::uint64_t life_ = 1;
};

void run_node(std::string_view input) {
  if (input.size() < 8) return;
  const std::string_view choices = input.substr(0, 8);
  HostileServer server(input.substr(8));
  ManualClock clock;
  AgentOptions options;
  options.servers.bucket_bits = 8;
  options.announcer.sweep_one_in = 1;
  options.announcer.least_circle = std::chrono::milliseconds(1);
  options.announcer.most_anchors = 64;
  options.leases.own = {.node = {1, 1}, .address = "10.0.0.1:1", .lanes = ""};
  std::size_t answers = 0;
  std::size_t questions = 0;
  Agent agent({&server}, Keys{.anchors = {}, .all = {Bytes32{}}}, options, clock,
              {.found =
                   [&](const Found& found) {
                     ++answers;
                     PEGA_ASSERT(found.owners.size() <= kMostFound, "{}", found.owners.size());
                   },
               .epochs = [](const KnownEpochs&) {}});
  for (std::size_t round = 0; round < 64; ++round) {
    const auto choice = static_cast<unsigned char>(choices[round % choices.size()]);
    agent.step();
    if ((choice & 1U) != 0) {
      BlockKey key;
      key.bytes[0] = static_cast<std::byte>(round);
      agent.take({.space = 1, .blocks = {{key, (choice & 2U) != 0}}});
      agent.ask({.ticket = round,
                 .candidates = {{.place = 0, .is_sure = true, .key = key}},
                 .deadline = clock.now() + std::chrono::milliseconds(5)});
      ++questions;
    }
    if ((choice & 4U) != 0) agent.publish({.spaces = {{Bytes32{}, {1, choice}}}, .floor = {}});
    if (!server.answer_some(1 + choice % 16)) break;
    if (choice == 0xff) server.lose();
    clock.advance(std::chrono::milliseconds(choice * 16));
  }
  server.lose();
  PEGA_ASSERT(answers == questions, "{} answers to {} questions", answers, questions);
}

void run(std::string_view input) {
  if (input.empty()) return;
  const auto choice = static_cast<unsigned char>(input[0]) % 3;
  const std::string_view rest = input.substr(1);
  if (choice == 0) read_replies(rest);
  if (choice == 1) read_contents(rest);
  if (choice == 2) run_node(rest);
}

}  // namespace
}  // namespace pegaflow::directory

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  pegaflow::set_log_level(pegaflow::LogLevel::kOff);
  return 0;
}

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pegaflow::directory::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
