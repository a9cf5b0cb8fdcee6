#include "server/chains/prompt_chains.h"

#include <algorithm>
#include <utility>

namespace pegaflow::server {

std::size_t PromptChains::bytes_of(const Row& row) {
  return sizeof(Row) + row.space.size() + row.chain.keys.size() * sizeof(std::uint64_t);
}

bool PromptChains::are_wanted() const {
  return read_at_ && clock_.now() - *read_at_ < options_.interest;
}

bool PromptChains::add(std::string_view space, PromptChain chain) {
  if (!are_wanted()) {
    // Those that are left are of no use to the next router either.
    first_ += rows_.size();
    rows_.clear();
    bytes_ = 0;
    ++counted_.unwanted;
    return false;
  }
  rows_.push_back({std::string(space), std::move(chain)});
  bytes_ += bytes_of(rows_.back());
  ++counted_.kept;
  while (rows_.size() > options_.most_chains ||
         (bytes_ > options_.most_bytes && rows_.size() > 1)) {
    bytes_ -= bytes_of(rows_.front());
    rows_.pop_front();
    ++first_;
    ++counted_.lost;
  }
  if (auto hook = std::exchange(on_next_, nullptr)) hook();
  return true;
}

PromptChains::Part PromptChains::read(std::string_view space, std::uint64_t position,
                                      std::size_t most_bytes) {
  read_at_ = clock_.now();
  const std::uint64_t end = first_ + rows_.size();
  Part part{.position = end};
  std::size_t bytes = 0;
  for (std::uint64_t at = std::clamp(position, first_, end); at < end; ++at) {
    const Row& row = rows_[static_cast<std::size_t>(at - first_)];
    if (row.space != space) continue;
    bytes += bytes_of(row);
    if (bytes > most_bytes && !part.chains.empty()) {
      part.position = at;
      part.has_more = true;
      break;
    }
    part.chains.push_back(row.chain);
  }
  return part;
}

PromptChains::Stats PromptChains::stats() const {
  Stats stats = counted_;
  stats.chains = rows_.size();
  stats.bytes = bytes_;
  return stats;
}

}  // namespace pegaflow::server
