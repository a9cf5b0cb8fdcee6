#include "transport/dealer.h"

#include <algorithm>
#include <limits>

namespace pegaflow::rails {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

}  // namespace

Dealer::Dealer(const Options& options, const Clock& clock)
    : options_(options),
      clock_(clock),
      book_(
          clock,
          [this](RegionId region) {
            const auto found = regions_.find(static_cast<std::uint32_t>(region));
            return found == regions_.end() ? 0 : found->second;
          },
          [this](Fabric::Completion&& completion) {
            const bool quiesced = completion.quiesced;
            completions_.push_back(std::move(completion));
            completed_.store(true, std::memory_order_release);
            if (quiesced) quiesced_.notify_all();
          }) {}

// ---- callers

void Dealer::add_region(RegionId region, std::uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  regions_[static_cast<std::uint32_t>(region)] = size_bytes;
}

void Dealer::close_region(RegionId region, const std::function<void()>& wake) {
  std::unique_lock lock(mutex_);
  regions_.erase(static_cast<std::uint32_t>(region));
  for (const std::uint64_t number : book_.find_into(region)) {
    book_.withdraw(*book_.find(number), Errc::kCancelled, "its region was unregistered");
  }
  wake();  // For the completions.
  quiesced_.wait(lock, [&] { return !book_.touches(region); });
}

void Dealer::add_peer(Fabric::PeerId id, std::vector<RegionDescriptor> regions) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<std::uint32_t>(id)];
  peer.regions = std::move(regions);
  peer.paces.resize(options_.rails);
}

bool Dealer::remove_peer(Fabric::PeerId id) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end()) return false;
  book_.lose(found->second, {Errc::kCancelled, "the peer was disconnected"});
  peers_.erase(found);
  update_has_work();
  return true;
}

void Dealer::add(Fabric::Batch batch) {
  const std::lock_guard lock(mutex_);
  const auto peer = peers_.find(static_cast<std::uint32_t>(batch.peer));
  BatchBook::Entry* const entry =
      book_.add(std::move(batch), peer == peers_.end() ? nullptr : &peer->second);
  if (entry == nullptr) return;
  entry->piece_bytes = piece_bytes_for(entry->waiting_bytes);
  work_.store(true, std::memory_order_release);
}

std::uint64_t Dealer::piece_bytes_for(std::uint64_t batch_bytes) const {
  const std::uint64_t share = batch_bytes / (2 * options_.rails) / kPageBytes * kPageBytes;
  return std::clamp(share, std::min(options_.least_piece_bytes, options_.piece_bytes),
                    options_.piece_bytes);
}

void Dealer::cancel(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  if (BatchBook::Entry* const entry = book_.find_ticket(ticket)) {
    book_.withdraw(*entry, Errc::kCancelled, "cancelled by its caller");
  }
}

void Dealer::finish() {
  const std::lock_guard lock(mutex_);
  for (auto& [number, peer] : peers_) {
    book_.lose(peer, {Errc::kCancelled, "the fabric was closed"});
  }
}

// ---- rails

void Dealer::extend(Operation& operation, const BatchBook::Entry& entry) {
  const auto& chunks = entry.batch.chunks;
  const std::size_t first = operation.first_chunk;
  if (operation.first_offset + operation.size_bytes != chunks[first].size_bytes) return;
  for (std::size_t i = first + 1; i < chunks.size() && !entry.has_failed(i); ++i) {
    const Fabric::Chunk& last = chunks[i - 1];
    const Fabric::Chunk& next = chunks[i];
    if (next.remote_region != last.remote_region || next.local_region != last.local_region ||
        next.remote_offset != last.remote_offset + last.size_bytes ||
        next.local_offset != last.local_offset + last.size_bytes ||
        next.size_bytes > entry.piece_bytes - operation.size_bytes) {
      break;
    }
    operation.size_bytes += next.size_bytes;
  }
}

std::vector<Operation> Dealer::deal(std::size_t rail,
                                    const std::function<Room(Fabric::PeerId)>& room) {
  std::vector<Operation> dealt;
  const std::lock_guard lock(mutex_);
  for (auto& [number, peer] : peers_) {
    if (!peer.has_waiting()) continue;
    Room left = room(Fabric::PeerId{number});
    for (std::size_t priority = 0; priority < peer.waiting.size(); ++priority) {
      take(peer, rail, priority, left, dealt);
      // The foreground waits for room, so the background gets none.
      if (!peer.waiting[priority].empty()) break;
    }
  }
  update_has_work();
  return dealt;
}

void Dealer::take(Peer& peer, std::size_t rail, std::size_t priority, Room& room,
                  std::vector<Operation>& dealt) {
  auto& queue = peer.waiting[priority];
  const bool background = priority == static_cast<std::size_t>(Fabric::Priority::kBackground);
  const TimePoint now = clock_.now();
  std::uint64_t before = 0;  // Waiting bytes of the batches left to other rails.
  for (std::size_t place = 0; place < std::min(queue.size(), kMostLooks);) {
    BatchBook::Entry& entry = *queue[place];
    std::optional<Operation> operation = book_.next(entry);
    if (!operation) continue;  // It has left the queue.
    if (entry.retries.empty()) extend(*operation, entry);
    if (!is_worthwhile(peer, rail, operation->size_bytes, before + entry.waiting_bytes)) {
      before += entry.waiting_bytes;
      ++place;
      continue;
    }
    const std::size_t operations =
        std::min(room.operations, background ? room.background_operations : room.operations);
    const std::uint64_t bytes =
        std::min(room.bytes, background ? room.background_bytes : room.bytes);
    if (operations == 0 || bytes < operation->size_bytes) return;
    room.operations -= 1;
    room.bytes -= operation->size_bytes;
    if (background) {
      room.background_operations -= 1;
      room.background_bytes -= operation->size_bytes;
    }
    operation->rail = rail;
    book_.begin(entry, *operation);
    peer.paces[rail].begin(operation->size_bytes, now);
    dealt.push_back(*operation);
  }
}

bool Dealer::is_worthwhile(const Peer& peer, std::size_t rail, std::uint64_t size_bytes,
                           std::uint64_t waiting_bytes) const {
  const TimePoint now = clock_.now();
  const Pace& own = peer.paces[rail];
  if (options_.rails == 1) return true;
  if (!own.is_known(now)) return own.open < kFirstOperations;
  const auto size = static_cast<double>(size_bytes);
  double bytes_per_s = 0;
  auto other_bytes = static_cast<double>(waiting_bytes);
  double soonest = std::numeric_limits<double>::max();
  for (std::size_t i = 0; i < peer.paces.size(); ++i) {
    const Pace& other = peer.paces[i];
    if (i == rail || peer.down.contains(i) || !other.is_known(now)) continue;
    bytes_per_s += 1 / other.seconds_for(1);
    other_bytes += static_cast<double>(other.open_bytes);
    soonest = std::min(soonest, other.seconds_for(static_cast<double>(other.open_bytes) + size));
  }
  if (bytes_per_s == 0) return true;
  return own.seconds_for(static_cast<double>(own.open_bytes) + size) <=
         std::max(soonest, other_bytes / bytes_per_s);
}

void Dealer::Pace::begin(std::uint64_t size_bytes, TimePoint now) {
  if (open == 0) {
    if (now - counted_until >= kPaceLife) *this = {};
    counted_until = now;
  }
  ++open;
  open_bytes += size_bytes;
}

void Dealer::Pace::ended(std::uint64_t size_bytes, bool done, TimePoint now) {
  --open;
  open_bytes -= size_bytes;
  if (done) bytes += static_cast<double>(size_bytes);
  busy += now - counted_until;
  counted_until = now;
  while (busy > kPaceMemory) {
    busy /= 2;
    bytes /= 2;
  }
}

void Dealer::ended(std::span<const Outcome> outcomes) {
  const std::lock_guard lock(mutex_);
  const TimePoint now = clock_.now();
  for (const Outcome& outcome : outcomes) {
    const Operation& operation = outcome.operation;
    const bool is_done = outcome.kind == Outcome::Kind::kDone;
    const auto peer = peers_.find(static_cast<std::uint32_t>(operation.peer));
    if (peer != peers_.end()) {
      peer->second.paces[operation.rail].ended(operation.size_bytes, is_done, now);
    }
    const auto detail = [&outcome] { return outcome.detail; };
    if (is_done) {
      book_.done(operation);
    } else if (outcome.kind == Outcome::Kind::kFailed) {
      book_.failed(operation, outcome.error, detail);
    } else if (operation.tries + 1 >= kMostTries) {
      book_.failed(operation, Errc::kPeerLost, detail);
    } else {
      Operation again = operation;
      ++again.tries;
      book_.give_back(again, BatchBook::Turn::kLast);
      work_.store(true, std::memory_order_release);
    }
  }
}

void Dealer::path_up(Fabric::PeerId peer, std::size_t rail) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(static_cast<std::uint32_t>(peer));
  if (found != peers_.end()) found->second.down.erase(rail);
}

bool Dealer::path_down(Fabric::PeerId peer, std::size_t rail, const Error& error, bool for_good) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(static_cast<std::uint32_t>(peer));
  if (found == peers_.end()) return true;
  found->second.down.insert(rail);
  if (for_good || found->second.down.size() >= options_.rails) book_.lose(found->second, error);
  return found->second.lost.has_value();
}

std::vector<Fabric::Completion> Dealer::take_completions() {
  const std::lock_guard lock(mutex_);
  completed_.store(false, std::memory_order_relaxed);
  return std::exchange(completions_, {});
}

// ---- time

void Dealer::on_time(TimePoint now) {
  const std::lock_guard lock(mutex_);
  while (BatchBook::Entry* const late = book_.find_late(now)) {
    book_.withdraw(*late, Errc::kTimeout, "its deadline passed");
  }
}

TimePoint Dealer::next_time() const {
  const std::lock_guard lock(mutex_);
  return book_.next_deadline();
}

void Dealer::update_has_work() {
  const bool any = std::any_of(peers_.begin(), peers_.end(),
                               [](const auto& entry) { return entry.second.has_waiting(); });
  work_.store(any, std::memory_order_release);
}

}  // namespace pegaflow::rails
