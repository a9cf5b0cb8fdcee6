#include "index/placement/expected_blocks.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace pegaflow::index {

namespace {

constexpr std::size_t kLeastBlocks = 1024;
constexpr std::size_t kMostBlocks = std::size_t{1} << 26;
/// The first blocks have a cell each: many prompts share a beginning that is shorter than a stride.
constexpr std::size_t kDense = 16;

/// The place behind `i` that has a cell, counted from 1.
std::size_t after(std::size_t i, std::size_t stride) { return i < kDense ? i + 1 : i + stride; }

/// 0 marks an empty cell.
std::uint64_t stored_form(std::uint64_t key) { return key == 0 ? 1 : key; }

}  // namespace

Result<ExpectedBlocks> ExpectedBlocks::create(const Options& options) {
  if (options.max_blocks < kLeastBlocks || options.max_blocks > kMostBlocks) {
    return fail(Errc::kInvalidArgument, "expected blocks: max_blocks is {}, not {} to {}",
                options.max_blocks, kLeastBlocks, kMostBlocks);
  }
  if (options.stride < 1) {
    return fail(Errc::kInvalidArgument, "expected blocks: stride is 0, not 1 or more");
  }
  if (options.lifetime <= Duration::zero()) {
    return fail(Errc::kInvalidArgument, "expected blocks: lifetime is not above 0");
  }
  return ExpectedBlocks(options);
}

ExpectedBlocks::ExpectedBlocks(const Options& options) : options_(options) {
  const std::size_t cells = std::bit_ceil(options.max_blocks / 3 * 4 + 1);
  mask_ = cells - 1;
  for (Generation* generation : {&current_, &previous_}) {
    generation->cells.resize(cells);
    generation->used.reserve(options.max_blocks);
  }
}

std::size_t ExpectedBlocks::place(const Generation& generation, std::uint64_t key) const noexcept {
  std::size_t at = (key * 0x9E3779B97F4A7C15U >> 20U) & mask_;
  while (generation.cells[at].key != 0 && generation.cells[at].key != key) at = (at + 1) & mask_;
  return at;
}

void ExpectedBlocks::drop(Cell& cell, EngineId engine) noexcept {
  if (cell.older == engine) cell.older = kNoEngine;
  if (cell.newer == engine) cell.newer = std::exchange(cell.older, kNoEngine);
}

void ExpectedBlocks::turn(TimePoint now) {
  std::swap(current_, previous_);
  for (const std::uint32_t at : current_.used) current_.cells[at] = {};
  current_.used.clear();
  current_.began = now;
}

void ExpectedBlocks::placed(EngineId engine, std::span<const std::uint64_t> chain, TimePoint now) {
  if (chain.empty()) return;
  const auto add = [&](std::size_t position) {
    if (current_.used.size() >= options_.max_blocks) turn(now);
    const std::uint64_t key = stored_form(chain[position]);
    const std::size_t at = place(current_, key);
    Cell& cell = current_.cells[at];
    if (cell.key == 0) {
      cell.key = key;
      current_.used.push_back(static_cast<std::uint32_t>(at));
    }
    if (cell.newer == engine) return;
    cell.older = cell.newer;
    cell.newer = engine;
  };
  if (now - current_.began >= options_.lifetime) {
    // Twice when nothing came for long: then both generations are too old.
    if (now - current_.began >= 2 * options_.lifetime) turn(now);
    turn(now);
  }
  for (std::size_t i = 1; i < chain.size(); i = after(i, options_.stride)) add(i - 1);
  add(chain.size() - 1);
}

void ExpectedBlocks::erased(EngineId engine, std::span<const std::uint64_t> keys) {
  for (Generation* generation : {&current_, &previous_}) {
    if (generation->used.empty()) continue;
    for (const std::uint64_t key : keys) {
      drop(generation->cells[place(*generation, stored_form(key))], engine);
    }
  }
}

void ExpectedBlocks::forget(EngineId engine) {
  for (Generation* generation : {&current_, &previous_}) {
    for (const std::uint32_t at : generation->used) {
      drop(generation->cells[at], engine);
    }
  }
}

void ExpectedBlocks::match(std::span<const std::uint64_t> chain, TimePoint now,
                           std::span<std::uint32_t> blocks) const {
  for (const Generation* generation : {&previous_, &current_}) {
    if (generation->used.empty() || now - generation->began >= 2 * options_.lifetime) continue;
    const auto look = [&](std::size_t position) {
      const Cell& cell = generation->cells[place(*generation, stored_form(chain[position]))];
      for (const EngineId engine : {cell.newer, cell.older}) {
        if (engine >= blocks.size()) continue;
        blocks[engine] = std::max(blocks[engine], static_cast<std::uint32_t>(position + 1));
      }
      return cell.key != 0;
    };
    // A cell implies those before it, of the same generation: a prompt is placed from its root.
    std::size_t before = 0;
    std::size_t i = 1;
    while (i <= chain.size() && look(i - 1)) {
      before = i;
      i = after(i, options_.stride);
    }
    // The end of a prompt has a cell wherever it is; look for it within one stride.
    const std::size_t end = std::min(i, chain.size() + 1);
    for (std::size_t last = before + 1; last < end; ++last) look(last - 1);
  }
}

}  // namespace pegaflow::index
