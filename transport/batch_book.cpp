#include "transport/batch_book.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/assert.h"
#include "transport/fabric_checks.h"

namespace pegaflow::rails {
namespace {

using Entry = BatchBook::Entry;

std::deque<Entry*>& queue_of(Entry& entry) {
  return entry.peer->waiting[static_cast<std::size_t>(entry.batch.priority)];
}

/// Calls `visit` with each chunk that the operation covers, and the number of its bytes there.
template <typename Visit>
void visit_chunks(const Entry& entry, const Operation& operation, Visit visit) {
  std::uint64_t left = operation.size_bytes;
  std::uint64_t offset = operation.first_offset;
  for (std::size_t i = operation.first_chunk; left > 0; ++i, offset = 0) {
    const std::uint64_t part = std::min(left, entry.batch.chunks[i].size_bytes - offset);
    visit(i, part);
    left -= part;
  }
}

/// Whether the operation would bring nothing but bytes of chunks that have failed.
bool is_in_vain(const Entry& entry, const Operation& operation) {
  bool in_vain = true;
  visit_chunks(entry, operation, [&](std::size_t chunk, std::uint64_t) {
    if (!entry.has_failed(chunk)) in_vain = false;
  });
  return in_vain;
}

}  // namespace

// ---- batches

BatchBook::Entry* BatchBook::add(Fabric::Batch batch, Peer* peer) {
  const std::uint64_t number = ++last_number_;
  Entry& entry = entries_[number];
  entry.number = number;
  entry.batch = std::move(batch);
  entry.peer = peer;
  entry.completion.ticket = entry.batch.ticket;
  entry.completion.chunks.resize(entry.batch.chunks.size());
  entry.bytes_left.resize(entry.batch.chunks.size());
  deadlines_.emplace(entry.batch.deadline, number);
  validate(entry);
  if (peer == nullptr) {
    withdraw(entry, Errc::kInvalidArgument, "there is no such peer");
  } else if (peer->lost) {
    withdraw(entry, peer->lost->code, peer->lost->detail);
  } else if (entry.batch.deadline <= clock_.now()) {
    withdraw(entry, Errc::kTimeout, "its deadline had passed when it was accepted");
  } else {
    enqueue(entry, false);
    return &entry;
  }
  return nullptr;
}

void BatchBook::validate(Entry& entry) const {
  for (std::size_t i = 0; i < entry.batch.chunks.size(); ++i) {
    const Fabric::Chunk& chunk = entry.batch.chunks[i];
    const bool good =
        chunk.size_bytes > 0 &&
        fits(region_bytes_(chunk.local_region), chunk.local_offset, chunk.size_bytes) &&
        (entry.peer == nullptr || has(entry.peer->regions, chunk));
    if (good) {
      entry.bytes_left[i] = chunk.size_bytes;
      entry.waiting_bytes += chunk.size_bytes;
    } else {
      entry.completion.chunks[i] = Errc::kInvalidArgument;
      entry.completion.detail = fmt::format("chunk {} is out of range", i);
    }
  }
}

void BatchBook::withdraw(Entry& entry, Errc reason, const std::string& detail) {
  PEGA_ASSERT(!entry.completed, "batch {} has completed already", entry.number);
  if (entry.is_waiting) dequeue(entry);
  entry.retries.clear();
  for (std::size_t i = 0; i < entry.completion.chunks.size(); ++i) {
    if (entry.bytes_left[i] == 0 || entry.has_failed(i)) continue;
    entry.completion.chunks[i] = reason;
    if (entry.completion.detail.empty()) entry.completion.detail = detail;
  }
  if (entry.open == 0) return complete_if_done(entry);
  // It completes now, and is quiesced with its last operation in flight.
  deadlines_.erase({entry.batch.deadline, entry.number});
  entry.completed = true;
  entry.peer = nullptr;
  entry.completion.quiesced = false;
  sink_(std::move(entry.completion));
}

void BatchBook::lose(Peer& peer, const Error& error) {
  if (!peer.lost) peer.lost = error;
  for (const std::uint64_t number :
       find_all([&peer](const Entry& entry) { return entry.peer == &peer; })) {
    withdraw(entries_.at(number), error.code, error.detail);
  }
}

void BatchBook::complete_if_done(Entry& entry) {
  if (entry.open > 0 || entry.is_waiting) return;
  const std::uint64_t number = entry.number;
  Fabric::Completion completion{.ticket = entry.batch.ticket, .chunks = {}, .detail = {}};
  if (!entry.completed) {
    deadlines_.erase({entry.batch.deadline, number});
    completion = std::move(entry.completion);
  }
  entries_.erase(number);
  sink_(std::move(completion));
}

void BatchBook::enqueue(Entry& entry, bool first) {
  if (entry.is_waiting) return;
  entry.is_waiting = true;
  auto& queue = queue_of(entry);
  if (first) {
    queue.push_front(&entry);
  } else {
    queue.push_back(&entry);
  }
}

void BatchBook::dequeue(Entry& entry) {
  auto& queue = queue_of(entry);
  queue.erase(std::find(queue.begin(), queue.end(), &entry));
  entry.is_waiting = false;
}

// ---- searches

BatchBook::Entry* BatchBook::find(std::uint64_t number) {
  const auto found = entries_.find(number);
  return found == entries_.end() || found->second.completed ? nullptr : &found->second;
}

BatchBook::Entry* BatchBook::find_ticket(std::uint64_t ticket) {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [ticket](const auto& entry) {
    return entry.second.batch.ticket == ticket && !entry.second.completed;
  });
  return found == entries_.end() ? nullptr : &found->second;
}

BatchBook::Entry* BatchBook::find_late(TimePoint now) {
  if (deadlines_.empty() || deadlines_.begin()->first > now) return nullptr;
  return find(deadlines_.begin()->second);
}

template <typename Which>
std::vector<std::uint64_t> BatchBook::find_all(Which which) const {
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, entry] : entries_) {
    if (!entry.completed && which(entry)) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::vector<std::uint64_t> BatchBook::find_into(RegionId region) const {
  return find_all([region](const Entry& entry) {
    const auto& chunks = entry.batch.chunks;
    return std::any_of(chunks.begin(), chunks.end(), [region](const Fabric::Chunk& chunk) {
      return chunk.local_region == region;
    });
  });
}

bool BatchBook::touches(RegionId region) const {
  return std::any_of(entries_.begin(), entries_.end(), [region](const auto& found) {
    const Entry& entry = found.second;
    for (std::size_t i = 0; i < entry.batch.chunks.size(); ++i) {
      // A chunk with no bytes left is complete, or was never requested.
      if (entry.batch.chunks[i].local_region == region && entry.bytes_left[i] > 0) return true;
    }
    return false;
  });
}

// ---- operations

std::optional<Operation> BatchBook::next(Entry& entry) {
  while (!entry.retries.empty() && is_in_vain(entry, entry.retries.front())) {
    entry.retries.pop_front();
  }
  if (!entry.retries.empty()) return entry.retries.front();
  const auto& chunks = entry.batch.chunks;
  while (entry.next_chunk < chunks.size() && entry.has_failed(entry.next_chunk)) {
    ++entry.next_chunk;
    entry.next_offset = 0;
  }
  if (entry.next_chunk == chunks.size()) {
    dequeue(entry);
    complete_if_done(entry);
    return std::nullopt;
  }
  const Fabric::Chunk& chunk = chunks[entry.next_chunk];
  return Operation{.batch = entry.number,
                   .peer = entry.batch.peer,
                   .first_chunk = static_cast<std::uint32_t>(entry.next_chunk),
                   .first_offset = entry.next_offset,
                   .size_bytes = std::min(entry.piece_bytes, chunk.size_bytes - entry.next_offset),
                   .remote_region = chunk.remote_region,
                   .remote_offset = chunk.remote_offset + entry.next_offset,
                   .local_region = chunk.local_region,
                   .local_offset = chunk.local_offset + entry.next_offset,
                   .background = entry.batch.priority == Fabric::Priority::kBackground};
}

void BatchBook::begin(Entry& entry, const Operation& operation) {
  ++entry.open;
  entry.waiting_bytes -= std::min(entry.waiting_bytes, operation.size_bytes);
  if (!entry.retries.empty()) return entry.retries.pop_front();
  entry.next_offset += operation.size_bytes;
  while (entry.next_chunk < entry.batch.chunks.size() &&
         entry.next_offset >= entry.batch.chunks[entry.next_chunk].size_bytes) {
    entry.next_offset -= entry.batch.chunks[entry.next_chunk].size_bytes;
    ++entry.next_chunk;
  }
}

BatchBook::Entry& BatchBook::end(const Operation& operation) {
  const auto found = entries_.find(operation.batch);
  PEGA_ASSERT(found != entries_.end(), "an operation of unknown batch {} ended", operation.batch);
  --found->second.open;
  return found->second;
}

void BatchBook::done(const Operation& operation) {
  Entry& entry = end(operation);
  if (!entry.completed) {
    visit_chunks(entry, operation, [&entry](std::size_t chunk, std::uint64_t bytes) {
      entry.bytes_left[chunk] -= bytes;
    });
  }
  complete_if_done(entry);
}

void BatchBook::failed(const Operation& operation, Errc error,
                       const std::function<std::string()>& detail) {
  Entry& entry = end(operation);
  if (!entry.completed) {
    visit_chunks(entry, operation, [&](std::size_t chunk, std::uint64_t) {
      if (!entry.has_failed(chunk)) entry.completion.chunks[chunk] = error;
    });
    if (entry.completion.detail.empty()) entry.completion.detail = detail();
  }
  complete_if_done(entry);
}

void BatchBook::give_back(const Operation& operation, Turn turn) {
  Entry& entry = end(operation);
  if (entry.completed) return complete_if_done(entry);
  if (turn == Turn::kFirst) {
    entry.retries.push_front(operation);
  } else {
    entry.retries.push_back(operation);
  }
  entry.waiting_bytes += operation.size_bytes;
  enqueue(entry, true);
}

}  // namespace pegaflow::rails
