#include "tests/support/kinds_engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <poll.h>

#include "tests/support/engine_memory.h"

namespace pegaflow::testing {
namespace {

constexpr std::byte kUnused{0xEE};

template <typename T>
T value_of(Result<T>&& result) {
  if (!result) throw std::runtime_error(to_string(result.error()));
  return std::move(*result);
}

std::vector<std::byte> pattern(std::uint64_t seed, std::size_t bytes) {
  std::vector<std::byte> page(bytes);
  fill_page(page.data(), page.size(), seed);
  return page;
}

}  // namespace

OverlaidMemory::OverlaidMemory(std::vector<Group> groups, std::size_t blocks, std::size_t gap_bytes)
    : groups_(std::move(groups)), blocks_(blocks) {
  std::size_t layers = 0;
  for (const Group& group : groups_) {
    stride_ = std::max(stride_, group.layer_bytes + gap_bytes);
    layers = std::max(layers, group.layers);
  }
  bytes_.assign(layers * blocks_ * stride_, kUnused);
  model_ = bytes_;
}

PageLayout OverlaidMemory::layout(std::size_t group) const {
  std::vector<Segment> segments;
  for (std::size_t layer = 0; layer < groups_[group].layers; ++layer) {
    // A layout is over memory that devices write.
    auto* const base = const_cast<std::byte*>(bytes_.data()) + at(layer, 0);
    segments.push_back({base, stride_, groups_[group].layer_bytes});
  }
  return PageLayout::create(std::move(segments), blocks_).value();
}

void OverlaidMemory::write(std::vector<std::byte>& memory, std::size_t group, std::uint32_t block,
                           const std::vector<std::byte>& page) const {
  const std::size_t bytes = groups_[group].layer_bytes;
  for (std::size_t layer = 0; layer < groups_[group].layers; ++layer) {
    std::memcpy(memory.data() + at(layer, block), page.data() + layer * bytes, bytes);
  }
}

void OverlaidMemory::fill(std::size_t group, std::uint32_t block, std::uint64_t seed) {
  write(bytes_, group, block, pattern(seed, page_bytes(group)));
  expect(group, block, seed);
}

void OverlaidMemory::expect(std::size_t group, std::uint32_t block, std::uint64_t seed) {
  write(model_, group, block, pattern(seed, page_bytes(group)));
}

void OverlaidMemory::accept(std::size_t group, std::uint32_t block) {
  const std::size_t bytes = groups_[group].layer_bytes;
  for (std::size_t layer = 0; layer < groups_[group].layers; ++layer) {
    const std::size_t place = at(layer, block);
    std::memcpy(model_.data() + place, bytes_.data() + place, bytes);
  }
}

std::size_t OverlaidMemory::wrong_bytes() const {
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < bytes_.size(); ++i) wrong += bytes_[i] == model_[i] ? 0 : 1;
  return wrong;
}

KindsEngine::KindsEngine(Options options, OverlaidMemory& memory, Device& device)
    : memory_(memory), kinds_(std::move(options.kinds)), unit_tokens_(options.unit_tokens) {
  for (LinkOptions* const link : {&options.session, &options.mover.link}) {
    link->socket_path = options.socket;
    link->instance = options.instance;
    link->build = "test";
  }
  options.mover.factors = {{"model", "several kinds"}};
  MoverKinds kinds{.kinds = {},
                   .unit_tokens = options.unit_tokens,
                   .alignment_tokens = options.alignment_tokens};
  for (const KindOfGroups& kind : kinds_) {
    MoverKind& own = kinds.kinds.emplace_back(
        MoverKind{.rule = kind.rule, .tokens = kind.tokens, .block_tokens = kind.block_tokens});
    for (const std::size_t group : kind.groups) own.members.push_back(memory.layout(group));
  }
  session_ = value_of(CacheSession::start(options.session));
  mover_ = value_of(Mover::start(options.mover, kinds, device));
}

void KindsEngine::wait_ready() {
  if (!mover_->wait_for(LinkState::kReady, kHang)) {
    throw std::runtime_error("the mover is not ready: " + mover_->status().detail);
  }
  if (!session_->wait_for(LinkState::kReady, kHang)) {
    throw std::runtime_error("the session is not ready: " + session_->status().detail);
  }
}

std::vector<BlockKey> KindsEngine::unit_keys(std::uint64_t prompt, std::size_t units) {
  return numbered_keys(numbers_from(prompt << 32, units));
}

std::vector<std::uint32_t> KindsEngine::new_blocks(const KindRange& range) {
  std::vector<std::uint32_t> blocks(range.count * kinds_[range.kind].groups.size());
  for (std::uint32_t& block : blocks) block = next_block++;
  // In no order, as an engine gives them out.
  std::rotate(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(blocks.size() / 3),
              blocks.end());
  return blocks;
}

template <typename Body>
void KindsEngine::for_each(const KindRange& range, const std::vector<std::uint32_t>& blocks,
                           Body body) const {
  const std::vector<std::size_t>& groups = kinds_[range.kind].groups;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::size_t member = i % groups.size();
    body(groups[member], blocks[i], range.first + i / groups.size(), member);
  }
}

Result<void> KindsEngine::start_save(std::uint64_t prompt, const KindRange& range) {
  const std::vector<std::uint32_t> blocks = new_blocks(range);
  for_each(range, blocks,
           [&](std::size_t group, std::uint32_t block, std::size_t number, std::size_t member) {
             memory_.fill(group, block, seed_of(prompt, range.kind, member, number));
           });
  const std::size_t units = kinds_[range.kind].block_tokens / unit_tokens_;
  const auto all = unit_keys(prompt, range.end() * units);
  std::vector<BlockKey> keys;
  for (std::size_t block = range.first; block < range.end(); ++block) {
    keys.push_back(all[(block + 1) * units - 1]);
  }
  return mover_->save(scheduler, ++last_job, range.kind, keys, blocks, Device::Event::kNow);
}

Mover::Finished KindsEngine::save(std::uint64_t prompt, const KindRange& range) {
  if (Result<void> started = start_save(prompt, range); !started) {
    throw std::runtime_error(to_string(started.error()));
  }
  return next_finished();
}

Result<CacheSession::Answer> KindsEngine::lookup(std::uint64_t prompt, std::size_t units,
                                                 std::size_t local_units) {
  return session_->lookup(unit_keys(prompt, units), local_units)
      .and_then(
          [this](CacheSession::Ticket ticket) { return session_->take(ticket, kHang).value(); });
}

Result<CacheSession::Answer> KindsEngine::claim(std::uint64_t prompt, std::size_t units,
                                                std::size_t local_units) {
  return session_->claim(unit_keys(prompt, units), {}, local_units)
      .and_then(
          [this](CacheSession::Ticket ticket) { return session_->take(ticket, kHang).value(); });
}

Result<CacheSession::Boundaries> KindsEngine::boundaries(std::uint64_t prompt, std::size_t units) {
  return session_->boundaries(unit_keys(prompt, units))
      .and_then([this](CacheSession::Ticket ticket) {
        return session_->take_boundaries(ticket, kHang).value();
      });
}

Result<void> KindsEngine::start_load(const CacheSession::Answer& claim,
                                     const std::vector<KindRange>& ranges) {
  last_ranges_ = ranges;
  last_blocks_.clear();
  std::vector<LoadRange> loads;
  for (const KindRange& range : ranges) last_blocks_.push_back(new_blocks(range));
  for (std::size_t i = 0; i < ranges.size(); ++i) loads.push_back({ranges[i], last_blocks_[i]});
  return mover_->load(++last_job, claim.token, loads, claim.ranges);
}

Mover::Finished KindsEngine::load(std::uint64_t prompt, const CacheSession::Answer& claim,
                                  const std::vector<KindRange>& ranges) {
  if (Result<void> started = start_load(claim, ranges); !started) {
    throw std::runtime_error(to_string(started.error()));
  }
  Mover::Finished done = next_finished();
  if (!done.error) expect_last_load(prompt);
  return done;
}

void KindsEngine::expect_last_load(std::uint64_t prompt) {
  for (std::size_t i = 0; i < last_ranges_.size(); ++i) {
    const KindRange& range = last_ranges_[i];
    for_each(range, last_blocks_[i],
             [&](std::size_t group, std::uint32_t block, std::size_t number, std::size_t member) {
               memory_.expect(group, block, seed_of(prompt, range.kind, member, number));
             });
  }
}

void KindsEngine::accept_last_load() {
  for (std::size_t i = 0; i < last_ranges_.size(); ++i) {
    for_each(last_ranges_[i], last_blocks_[i],
             [&](std::size_t group, std::uint32_t block, std::size_t, std::size_t) {
               memory_.accept(group, block);
             });
  }
}

std::vector<std::uint32_t> KindsEngine::last_blocks() const {
  std::vector<std::uint32_t> all;
  for (const auto& blocks : last_blocks_) all.insert(all.end(), blocks.begin(), blocks.end());
  return all;
}

Mover::Finished KindsEngine::next_finished() {
  while (finished_.empty()) {
    pollfd wanted{mover_->finished_fd(), POLLIN, 0};
    const int limit_ms = static_cast<int>(std::chrono::milliseconds(kHang).count());
    if (::poll(&wanted, 1, limit_ms) != 1) throw std::runtime_error("a job is not reported");
    finished_ = mover_->take_finished();
  }
  Mover::Finished first = std::move(finished_.front());
  finished_.erase(finished_.begin());
  return first;
}

}  // namespace pegaflow::testing
