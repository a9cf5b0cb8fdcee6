#include "cluster/epoch_watches.h"

#include <algorithm>
#include <utility>

#include "capnp/wire/kj_time.h"

namespace pegaflow::cluster {
EpochWatches::Signal::Signal() : raised_(nullptr) {
  auto pair = kj::newPromiseAndFulfiller<void>();
  fulfiller_ = kj::mv(pair.fulfiller);
  raised_ = pair.promise.fork();
}

void EpochWatches::Signal::raise() {
  auto pair = kj::newPromiseAndFulfiller<void>();
  fulfiller_->fulfill();
  fulfiller_ = kj::mv(pair.fulfiller);
  raised_ = pair.promise.fork();
}

EpochWatches::EpochWatches(Epochs& epochs, kj::Timer& timer, IsAsked is_asked)
    : epochs_(epochs), timer_(timer), is_asked_(std::move(is_asked)) {
  epochs_.on_change([this]() { news_.raise(); });
}

EpochWatches::~EpochWatches() { epochs_.on_change({}); }

void EpochWatches::entered(const Id128& connection, Dialer dialer) {
  watches_.insert_or_assign(connection, Watch{.dialer = std::move(dialer)});
}

void EpochWatches::left(const Id128& connection) {
  if (watches_.erase(connection) != 0) progress_.raise();
}

kj::Promise<void> EpochWatches::await_news(const Id128& connection, std::uint64_t seen,
                                           Duration patience) {
  if (const auto found = watches_.find(connection); found != watches_.end()) {
    found->second.seen = std::max(found->second.seen, std::min(seen, epochs_.changes()));
    progress_.raise();
  }
  if (seen != epochs_.changes()) return kj::READY_NOW;
  return news_.wait().exclusiveJoin(timer_.afterDelay(to_kj(patience)));
}

bool EpochWatches::has_unasked() const {
  return std::any_of(watches_.begin(), watches_.end(),
                     [this](const auto& entry) { return !is_asked_(entry.second.dialer); });
}

/// A node may have several connections for a moment; one that has received all counts.
std::vector<std::string> EpochWatches::behind(std::uint64_t changes) const {
  std::vector<std::string> names;
  for (const auto& [connection, watch] : watches_) {
    const Dialer& dialer = watch.dialer;
    const bool has_all = std::any_of(watches_.begin(), watches_.end(), [&](const auto& entry) {
      return entry.second.dialer.node == dialer.node && entry.second.seen >= changes;
    });
    if (!has_all && !is_asked_(dialer)) names.push_back(dialer.name);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

kj::Promise<std::vector<std::string>> EpochWatches::spread(Duration patience) {
  return spread(epochs_.changes(), timer_.now() + to_kj(patience));
}

kj::Promise<std::vector<std::string>> EpochWatches::spread(std::uint64_t changes,
                                                           kj::TimePoint end) {
  auto names = behind(changes);
  if (names.empty() || timer_.now() >= end) return names;
  return progress_.wait().exclusiveJoin(timer_.atTime(end)).then([this, changes, end]() {
    return spread(changes, end);
  });
}

}  // namespace pegaflow::cluster
