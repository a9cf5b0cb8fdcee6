#include "directory/epoch_board.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace pegaflow::directory {
namespace {

constexpr std::string_view kPurpose = "epochs 1";
constexpr std::size_t kEntryBytes = sizeof(Bytes32) + 16;

void put(std::string& text, const Epoch& epoch) {
  for (const std::uint64_t number : {epoch.counter, epoch.id}) {
    for (std::size_t i = 8; i-- > 0;) text.push_back(static_cast<char>(number >> (8 * i)));
  }
}

Epoch get(std::string_view text) {
  const auto number = [&](std::size_t from) {
    std::uint64_t value = 0;
    for (const char byte : text.substr(from, 8)) {
      value = value << 8 | static_cast<unsigned char>(byte);
    }
    return value;
  };
  return {.counter = number(0), .id = number(8)};
}

}  // namespace

std::string to_text(const KnownEpochs& known) {
  std::string text;
  put(text, known.floor);
  auto sorted = known.spaces;
  std::sort(sorted.begin(), sorted.end());
  for (const auto& [space, epoch] : sorted) {
    text.append(reinterpret_cast<const char*>(space.data()), space.size());
    put(text, epoch);
  }
  return text;
}

std::optional<KnownEpochs> epochs_of(std::string_view text) {
  if (text.size() < 16 || (text.size() - 16) % kEntryBytes != 0) return {};
  if ((text.size() - 16) / kEntryBytes > KnownEpochs::kMaxSpaces) return {};
  KnownEpochs known{.spaces = {}, .floor = get(text.substr(0, 16))};
  bool is_good = known.floor.counter < Epoch::kEnd;
  for (std::size_t from = 16; from < text.size(); from += kEntryBytes) {
    auto& [space, epoch] = known.spaces.emplace_back();
    std::memcpy(space.data(), text.data() + from, space.size());
    epoch = get(text.substr(from + space.size(), 16));
    is_good = is_good && epoch.counter < Epoch::kEnd;
  }
  if (!is_good) return {};
  return known;
}

EpochBoard::EpochBoard(Servers& servers, const Keys& keys, const Options& options,
                       const Clock& clock, Stats& stats,
                       std::function<void(const KnownEpochs&)> news)
    : servers_(servers),
      keys_(keys),
      options_(options),
      clock_(clock),
      stats_(stats),
      news_(std::move(news)),
      seen_(servers.count()),
      next_(clock.now()) {}

bool EpochBoard::is_known() const noexcept {
  return std::all_of(seen_.begin(), seen_.end(), [](const Seen& each) { return each.is_read; });
}

void EpochBoard::publish(const KnownEpochs& known) {
  std::string text = to_text(known);
  if (std::exchange(has_own_, true) && own_ == text) return;
  own_ = std::move(text);
  next_ = clock_.now();
}

void EpochBoard::read(std::size_t server, const Result<Reply>& reply) {
  if (!reply) return;
  const bool is_absent = reply->is(Reply::Kind::kNil);
  // A key of another type is a text that no node can read: SET replaces it.
  const bool is_strange = reply->is(Reply::Kind::kError) && reply->text.starts_with("WRONGTYPE");
  if (!is_absent && !is_strange && !servers_.expect(reply, Reply::Kind::kText)) return;
  Seen& seen = seen_[server];
  std::optional<std::string> theirs;
  if (!is_absent) {
    if (!is_strange) theirs = unseal(keys_.all, kPurpose, reply->text);
    const auto known = theirs ? epochs_of(*theirs) : std::nullopt;
    if (!known) {
      ++stats_.bad_epochs;
      // It may be newer than what this node knows: only one that knows more may replace it.
      if (!is_known()) return;
    } else if (*theirs != own_ && *theirs != seen.text) {
      seen.text = *theirs;
      ++stats_.epochs_learned;
      news_(*known);
      // What this node knows then comes with publish(): it may be the same text.
      seen.is_read = true;
      return;
    }
  }
  seen.is_read = true;
  if (!has_own_ || theirs == own_) return;
  // No namespace was reset yet: there is nothing to keep.
  if (is_absent && own_ == to_text(KnownEpochs{})) return;
  servers_.commands(server).send(
      std::array<std::string_view, 3>{"SET", "e", seal(keys_.anchors, kPurpose, own_)},
      [this](Result<Reply>&& written) { servers_.expect(written, Reply::Kind::kStatus); });
}

void EpochBoard::step() {
  if (clock_.now() < next_) return;
  next_ = clock_.now() + options_.check;
  for (std::size_t server = 0; server < servers_.count(); ++server) {
    if (!servers_.is_ready(server)) continue;
    servers_.commands(server).send(std::array<std::string_view, 2>{"GET", "e"},
                                   [this, server](Result<Reply>&& reply) { read(server, reply); });
  }
}

}  // namespace pegaflow::directory
