#pragma once
/// \file
/// Conversion of Python's arguments to the client's types.

#include <cstdint>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "base/block_key.h"
#include "base/id128.h"
#include "base/page_layout.h"
#include "client/kinds.h"
#include "client/link_options.h"
#include "client/mover.h"
#include "pyclient/network.h"

namespace pegaflow::py_arguments {

// All with the GIL. Each raises InvalidArgument with the reason, or TypeError.

/// `n * key_bytes` bytes, back to back.
std::vector<BlockKey> to_keys(const pybind11::bytes& packed, std::size_t key_bytes);

/// Any sequence of whole numbers, or a one-dimensional buffer of 32- or 64-bit integers, such as a
/// NumPy array.
std::vector<std::uint32_t> to_blocks(const pybind11::object& blocks);

Id128 to_id(const pybind11::bytes& raw);
/// 16 bytes, or none for no id.
pybind11::bytes from_id(const Id128& id);

std::vector<Segment> to_segments(const pybind11::sequence& segments);
/// The layout of a block, or one for each of its `cells`: equally many segments each, in order.
std::vector<PageLayout> to_layouts(const pybind11::sequence& segments, std::uint64_t block_count,
                                   std::uint32_t cells);

/// (rule, tokens, block_tokens, members) each; a member is (segments, block_count).
MoverKinds to_kinds(const pybind11::sequence& kinds, std::uint32_t unit_tokens,
                    std::uint32_t alignment_tokens);
/// (kind, first, count) each.
std::vector<KindRange> to_ranges(const pybind11::sequence& ranges);

/// The ranges of a load, with the memory that they refer to. Movable, not copyable.
struct LoadRanges {
  std::vector<std::vector<std::uint32_t>> blocks;
  std::vector<LoadRange> ranges;
};
/// (kind, first, count, blocks) each.
LoadRanges to_load_ranges(const pybind11::sequence& ranges);

/// Fields of LinkOptions by their names; durations are seconds. Removes the known ones from
/// `named`.
void take_link_options(pybind11::dict& named, LinkOptions& options);
/// The same for the fields that only Mover::Options has.
void take_mover_options(pybind11::dict& named, Mover::Options& options);
/// The same for `direct_nics`, a list, and `ucx_library`.
NetworkChoice take_network(pybind11::dict& named);
/// Raises for options that remain unused.
void refuse_unknown(const pybind11::dict& named);

/// Raises InvalidArgument unless `seconds` is positive and within the clock's range.
Duration to_duration(double seconds, const char* what);

}  // namespace pegaflow::py_arguments
