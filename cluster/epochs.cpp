#include "cluster/epochs.h"

#include <algorithm>
#include <chrono>

#include "base/id128.h"

namespace pegaflow::cluster {
namespace {

Epoch next_by_clock(const Epoch& known) {
  return epoch_after(known,
                     std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::system_clock::now().time_since_epoch()),
                     Id128::random().low);
}

}  // namespace

Epoch epoch_after(const Epoch& known, std::chrono::microseconds system_time, std::uint64_t id) {
  const auto time = static_cast<std::uint64_t>(std::max<std::int64_t>(0, system_time.count()));
  return {.counter = std::min(std::max(known.counter + 1, time), Epoch::kEnd - 1), .id = id};
}

Epochs::Epochs(std::function<void()> news, Next next, std::size_t max_spaces)
    : news_(std::move(news)),
      next_(next ? std::move(next) : Next(next_by_clock)),
      max_spaces_(max_spaces) {}

Epoch Epochs::of(const Bytes32& space) const {
  const auto found = epochs_.find(first_name(space));
  return found == epochs_.end() ? floor_ : found->second;
}

bool Epochs::take_floor(const Epoch& epoch) {
  if (epoch <= floor_) return false;
  floor_ = epoch;
  std::erase_if(epochs_, [&](const auto& entry) { return entry.second <= floor_; });
  return true;
}

bool Epochs::take(const Bytes32& space, const Epoch& epoch) {
  if (epoch <= of(space)) return false;
  epochs_.insert_or_assign(first_name(space), epoch);
  return true;
}

const Bytes32& Epochs::first_name(const Bytes32& space) const {
  const auto found = aliases_.find(space);
  return found == aliases_.end() ? space : found->second;
}

void Epochs::alias(const Bytes32& space, const Bytes32& first) {
  const Epoch epoch = of(space);  // As a name of its own or of another, which it was until now.
  epochs_.erase(space);
  aliases_.insert_or_assign(space, first);
  learn(first, epoch);
}

void Epochs::forget_alias(const Bytes32& space) {
  const Epoch epoch = of(space);
  if (aliases_.erase(space) == 0) return;
  // Without room the table's next cut would drop it, or one like it.
  if (epochs_.size() < max_spaces_) take(space, epoch);
}

void Epochs::cut() {
  if (epochs_.size() <= max_spaces_) return;
  std::vector<Epoch> sorted;
  sorted.reserve(epochs_.size());
  for (const auto& [space, epoch] : epochs_) sorted.push_back(epoch);
  const auto newest_gone =
      sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() - max_spaces_ - 1);
  std::nth_element(sorted.begin(), newest_gone, sorted.end());
  take_floor(*newest_gone);
}

void Epochs::note_change() {
  ++changes_;
  if (news_) news_();
  if (changed_) changed_();
}

bool Epochs::learn(const Bytes32& space, const Epoch& epoch) {
  const bool is_news = take(space, epoch);
  cut();
  if (is_news) note_change();
  return is_news;
}

std::optional<Epoch> Epochs::raise(const Bytes32& space) {
  if (!learn(space, next_(of(space)))) return std::nullopt;
  return of(space);
}

KnownEpochs Epochs::known() const {
  return {.spaces = {epochs_.begin(), epochs_.end()}, .floor = floor_};
}

void Epochs::learn(const KnownEpochs& known) {
  bool is_news = take_floor(known.floor);
  for (const auto& [space, epoch] : known.spaces) is_news = take(space, epoch) || is_news;
  cut();
  if (is_news) note_change();
}

}  // namespace pegaflow::cluster
