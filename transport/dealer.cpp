#include "transport/dealer.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "base/assert.h"
#include "transport/fabric_checks.h"

namespace pegaflow::rails {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

std::size_t queue_of(Fabric::Priority priority) { return static_cast<std::size_t>(priority); }

}  // namespace

// ---- callers

void Dealer::add_region(RegionId region, std::uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  regions_[static_cast<std::uint32_t>(region)] = size_bytes;
}

void Dealer::close_region(RegionId region, const std::function<void()>& wake) {
  std::unique_lock lock(mutex_);
  regions_.erase(static_cast<std::uint32_t>(region));
  withdraw_all(
      [region](const Work& work) {
        return std::any_of(
            work.batch.chunks.begin(), work.batch.chunks.end(),
            [region](const Fabric::Chunk& chunk) { return chunk.local_region == region; });
      },
      Errc::kCancelled, "its region was unregistered");
  wake();  // For the completions.
  quiesced_.wait(lock, [&] { return !touches(region); });
}

bool Dealer::touches(RegionId region) const {
  return std::any_of(works_.begin(), works_.end(), [region](const auto& entry) {
    const Work& work = entry.second;
    for (std::size_t i = 0; i < work.batch.chunks.size(); ++i) {
      // A chunk with no bytes left is complete, or was never requested.
      if (work.batch.chunks[i].local_region == region && work.bytes_left[i] > 0) return true;
    }
    return false;
  });
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
  lose(id, found->second, {Errc::kCancelled, "the peer was disconnected"});
  peers_.erase(found);
  update_has_work();
  return true;
}

void Dealer::add(Fabric::Batch batch) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = ++last_number_;
  const auto found = works_.try_emplace(number).first;
  Work& work = found->second;
  work.number = number;
  work.batch = std::move(batch);
  work.completion.ticket = work.batch.ticket;
  work.completion.chunks.resize(work.batch.chunks.size());
  work.bytes_left.resize(work.batch.chunks.size());
  deadlines_.emplace(work.batch.deadline, number);

  const auto peer_found = peers_.find(static_cast<std::uint32_t>(work.batch.peer));
  Peer* const peer = peer_found == peers_.end() ? nullptr : &peer_found->second;
  validate(work, peer);
  if (peer == nullptr) {
    withdraw(found, Errc::kInvalidArgument, "there is no such peer");
  } else if (peer->lost) {
    withdraw(found, peer->lost->code, peer->lost->detail);
  } else if (work.batch.deadline <= clock_.now()) {
    withdraw(found, Errc::kTimeout, "its deadline had passed when it was accepted");
  } else {
    std::uint64_t all = 0;
    for (const std::uint64_t bytes : work.bytes_left) all += bytes;
    work.waiting_bytes = all;
    const std::uint64_t share = all / (2 * options_.rails) / kPageBytes * kPageBytes;
    work.piece_bytes = std::clamp(share, std::min(options_.least_piece_bytes, options_.piece_bytes),
                                  options_.piece_bytes);
    enqueue(*peer, work, false);
  }
}

void Dealer::validate(Work& work, const Peer* peer) const {
  for (std::size_t i = 0; i < work.batch.chunks.size(); ++i) {
    const Fabric::Chunk& chunk = work.batch.chunks[i];
    const auto local = regions_.find(static_cast<std::uint32_t>(chunk.local_region));
    bool good = chunk.size_bytes > 0 && local != regions_.end() &&
                fits(local->second, chunk.local_offset, chunk.size_bytes);
    if (good && peer != nullptr) good = has(peer->regions, chunk);
    if (good) {
      work.bytes_left[i] = chunk.size_bytes;
    } else {
      work.completion.chunks[i] = Errc::kInvalidArgument;
      work.completion.detail = fmt::format("chunk {} is out of range", i);
    }
  }
}

void Dealer::enqueue(Peer& peer, Work& work, bool first) {
  if (work.is_waiting) return;
  work.is_waiting = true;
  auto& queue = peer.waiting[queue_of(work.batch.priority)];
  if (first) {
    queue.push_front(work.number);
  } else {
    queue.push_back(work.number);
  }
  work_.store(true, std::memory_order_release);
}

void Dealer::cancel(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(works_.begin(), works_.end(), [ticket](const auto& entry) {
    return entry.second.batch.ticket == ticket && !entry.second.completed;
  });
  if (found != works_.end()) withdraw(found, Errc::kCancelled, "cancelled by its caller");
}

void Dealer::finish() {
  const std::lock_guard lock(mutex_);
  for (auto& [number, peer] : peers_) {
    lose(Fabric::PeerId{number}, peer, {Errc::kCancelled, "the fabric was closed"});
  }
}

// ---- rails

bool Dealer::next_operation(Work& work, Operation& operation) {
  const auto failed = [&](std::size_t chunk) { return work.completion.chunks[chunk].has_value(); };
  if (!work.retries.empty()) {
    operation = work.retries.front();
    return true;
  }
  const auto& chunks = work.batch.chunks;
  while (work.next_chunk < chunks.size() && failed(work.next_chunk)) {
    ++work.next_chunk;
    work.next_offset = 0;
  }
  if (work.next_chunk == chunks.size()) return false;
  const Fabric::Chunk& first = chunks[work.next_chunk];
  operation = {.batch = work.number,
               .peer = work.batch.peer,
               .first_chunk = static_cast<std::uint32_t>(work.next_chunk),
               .first_offset = work.next_offset,
               .size_bytes = std::min(work.piece_bytes, first.size_bytes - work.next_offset),
               .remote_region = first.remote_region,
               .remote_offset = first.remote_offset + work.next_offset,
               .local_region = first.local_region,
               .local_offset = first.local_offset + work.next_offset,
               .background = work.batch.priority == Fabric::Priority::kBackground};
  // Whole chunks that follow it contiguously at both ends are included.
  for (std::size_t i = work.next_chunk + 1; i < chunks.size() && !failed(i); ++i) {
    const Fabric::Chunk& last = chunks[i - 1];
    const Fabric::Chunk& next = chunks[i];
    const bool whole = operation.first_offset + operation.size_bytes == first.size_bytes ||
                       i > work.next_chunk + 1;
    if (!whole || next.remote_region != last.remote_region ||
        next.local_region != last.local_region ||
        next.remote_offset != last.remote_offset + last.size_bytes ||
        next.local_offset != last.local_offset + last.size_bytes ||
        next.size_bytes > work.piece_bytes - operation.size_bytes) {
      break;
    }
    operation.size_bytes += next.size_bytes;
  }
  return true;
}

std::vector<Operation> Dealer::deal(std::size_t rail,
                                    const std::function<Room(Fabric::PeerId)>& room) {
  std::vector<Operation> dealt;
  const std::lock_guard lock(mutex_);
  for (auto& [number, peer] : peers_) {
    const bool has = std::any_of(peer.waiting.begin(), peer.waiting.end(),
                                 [](const auto& queue) { return !queue.empty(); });
    if (!has) continue;
    Room left = room(Fabric::PeerId{number});
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
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
  const bool background = priority == queue_of(Fabric::Priority::kBackground);
  const TimePoint now = clock_.now();
  std::uint64_t before = 0;  // Waiting bytes of the batches left to other rails.
  for (std::size_t place = 0; place < std::min(queue.size(), kMostLooks);) {
    const auto found = works_.find(queue[place]);
    PEGA_ASSERT(found != works_.end() && !found->second.completed,
                "a batch in the queue has ended");
    Work& work = found->second;
    Operation operation;
    if (!next_operation(work, operation)) {
      queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(place));
      work.is_waiting = false;
      complete_if_done(found);
      continue;
    }
    if (!is_worthwhile(peer, rail, operation.size_bytes, before + work.waiting_bytes)) {
      before += work.waiting_bytes;
      ++place;
      continue;
    }
    const std::size_t operations =
        std::min(room.operations, background ? room.background_operations : room.operations);
    const std::uint64_t bytes =
        std::min(room.bytes, background ? room.background_bytes : room.bytes);
    if (operations == 0 || bytes < operation.size_bytes) return;
    room.operations -= 1;
    room.bytes -= operation.size_bytes;
    if (background) {
      room.background_operations -= 1;
      room.background_bytes -= operation.size_bytes;
    }
    ++work.open;
    work.waiting_bytes -= std::min(work.waiting_bytes, operation.size_bytes);
    peer.paces[rail].begin(operation.size_bytes, now);
    operation.rail = rail;
    if (!work.retries.empty()) {
      work.retries.pop_front();
    } else {
      work.next_offset += operation.size_bytes;
      while (work.next_chunk < work.batch.chunks.size() &&
             work.next_offset >= work.batch.chunks[work.next_chunk].size_bytes) {
        work.next_offset -= work.batch.chunks[work.next_chunk].size_bytes;
        ++work.next_chunk;
      }
    }
    dealt.push_back(operation);
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
    const auto peer = peers_.find(static_cast<std::uint32_t>(operation.peer));
    if (peer != peers_.end()) {
      peer->second.paces[operation.rail].ended(operation.size_bytes,
                                               outcome.kind == Outcome::Kind::kDone, now);
    }
    const auto found = works_.find(operation.batch);
    PEGA_ASSERT(found != works_.end(), "an operation of an unknown batch ended");
    Work& work = found->second;
    --work.open;
    if (!work.completed) {
      if (outcome.kind == Outcome::Kind::kDone) {
        std::uint64_t left = operation.size_bytes;
        std::uint64_t offset = operation.first_offset;
        for (std::size_t i = operation.first_chunk; left > 0; ++i, offset = 0) {
          const std::uint64_t part = std::min(left, work.batch.chunks[i].size_bytes - offset);
          work.bytes_left[i] -= part;
          left -= part;
        }
      } else if (outcome.kind == Outcome::Kind::kFailed) {
        fail_chunks(work, operation, outcome.error, outcome.detail);
      } else if (operation.tries + 1 >= kMostTries) {
        fail_chunks(work, operation, Errc::kPeerLost, outcome.detail);
      } else {
        work.retries.push_back(operation);
        ++work.retries.back().tries;
        work.waiting_bytes += operation.size_bytes;
        // Its batch has not completed, so the peer exists.
        enqueue(peers_.at(static_cast<std::uint32_t>(operation.peer)), work, true);
      }
    }
    complete_if_done(found);
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
  if (for_good || found->second.down.size() >= options_.rails) lose(peer, found->second, error);
  return found->second.lost.has_value();
}

void Dealer::lose(Fabric::PeerId id, Peer& peer, const Error& error) {
  if (!peer.lost) peer.lost = error;
  withdraw_all([id](const Work& work) { return work.batch.peer == id; }, error.code, error.detail);
}

// ---- how batches end

void Dealer::fail_chunks(Work& work, const Operation& operation, Errc error,
                         const std::string& detail) {
  std::uint64_t left = operation.size_bytes;
  std::uint64_t offset = operation.first_offset;
  for (std::size_t i = operation.first_chunk; left > 0; ++i, offset = 0) {
    if (!work.completion.chunks[i]) work.completion.chunks[i] = error;
    left -= std::min(left, work.batch.chunks[i].size_bytes - offset);
  }
  if (work.completion.detail.empty()) work.completion.detail = detail;
}

void Dealer::fail_rest(Work& work, Errc reason, const std::string& detail) {
  for (std::size_t i = 0; i < work.completion.chunks.size(); ++i) {
    if (work.bytes_left[i] == 0 || work.completion.chunks[i]) continue;
    work.completion.chunks[i] = reason;
    if (work.completion.detail.empty()) work.completion.detail = detail;
  }
}

void Dealer::withdraw(Works::iterator found, Errc reason, const std::string& detail) {
  Work& work = found->second;
  if (work.is_waiting) {
    auto& queue = peers_.at(static_cast<std::uint32_t>(work.batch.peer))
                      .waiting[queue_of(work.batch.priority)];
    queue.erase(std::find(queue.begin(), queue.end(), work.number));
    work.is_waiting = false;
  }
  work.retries.clear();
  fail_rest(work, reason, detail);
  if (work.open > 0) {
    // It completes now, and is quiesced with its last operation in flight.
    deadlines_.erase({work.batch.deadline, work.number});
    work.completed = true;
    work.completion.quiesced = false;
    completions_.push_back(std::move(work.completion));
    completed_.store(true, std::memory_order_release);
    return;
  }
  complete_if_done(found);
}

void Dealer::withdraw_all(const std::function<bool(const Work&)>& which, Errc reason,
                          const std::string& detail) {
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, work] : works_) {
    if (!work.completed && which(work)) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  for (const std::uint64_t number : numbers) withdraw(works_.find(number), reason, detail);
}

void Dealer::complete_if_done(Works::iterator found) {
  Work& work = found->second;
  if (work.open > 0 || work.is_waiting) return;
  if (work.completed) {
    completions_.push_back({.ticket = work.batch.ticket, .chunks = {}, .detail = {}});
  } else {
    deadlines_.erase({work.batch.deadline, work.number});
    completions_.push_back(std::move(work.completion));
  }
  completed_.store(true, std::memory_order_release);
  works_.erase(found);
  quiesced_.notify_all();
}

std::vector<Fabric::Completion> Dealer::take_completions() {
  const std::lock_guard lock(mutex_);
  completed_.store(false, std::memory_order_relaxed);
  return std::exchange(completions_, {});
}

// ---- time

void Dealer::on_time(TimePoint now) {
  const std::lock_guard lock(mutex_);
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    withdraw(works_.find(deadlines_.begin()->second), Errc::kTimeout, "its deadline passed");
  }
}

TimePoint Dealer::next_time() const {
  const std::lock_guard lock(mutex_);
  return deadlines_.empty() ? TimePoint::max() : deadlines_.begin()->first;
}

void Dealer::update_has_work() {
  const bool any = std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    return std::any_of(entry.second.waiting.begin(), entry.second.waiting.end(),
                       [](const auto& queue) { return !queue.empty(); });
  });
  work_.store(any, std::memory_order_release);
}

}  // namespace pegaflow::rails
