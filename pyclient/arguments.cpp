#include "pyclient/arguments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string_view>

#include <pybind11/stl.h>

#include "pyclient/py_error.h"

namespace pegaflow::py_arguments {
namespace {

namespace py = pybind11;
using py_error::raise;

std::string_view view(const py::bytes& raw) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(raw.ptr(), &data, &size) != 0) throw py::error_already_set();
  return {data, static_cast<std::size_t>(size)};
}

template <typename T>
std::vector<std::uint32_t> from_buffer(const py::buffer_info& info) {
  std::vector<std::uint32_t> blocks;
  blocks.reserve(static_cast<std::size_t>(info.size));
  const char* at = static_cast<const char*>(info.ptr);
  for (py::ssize_t i = 0; i < info.size; ++i, at += info.strides[0]) {
    T value;
    std::memcpy(&value, at, sizeof value);
    if (value < 0 || static_cast<std::uint64_t>(value) > UINT32_MAX) {
      raise({Errc::kInvalidArgument, fmt::format("{} is not a block number", value)});
    }
    blocks.push_back(static_cast<std::uint32_t>(value));
  }
  return blocks;
}

void take_duration(py::dict& named, const char* name, Duration& target) {
  if (!named.contains(name)) return;
  target = to_duration(named[name].cast<double>(), name);
  PyDict_DelItemString(named.ptr(), name);
}

template <typename T>
void take(py::dict& named, const char* name, T& target) {
  if (!named.contains(name)) return;
  target = named[name].cast<T>();
  PyDict_DelItemString(named.ptr(), name);
}

/// None counts as absent.
template <typename T>
void take_optional(py::dict& named, const char* name, std::optional<T>& target) {
  if (!named.contains(name)) return;
  if (!named[name].is_none()) target = named[name].cast<T>();
  PyDict_DelItemString(named.ptr(), name);
}

}  // namespace

std::vector<BlockKey> to_keys(const py::bytes& packed, std::size_t key_bytes) {
  const std::string_view raw = view(packed);
  if (key_bytes == 0 || key_bytes > BlockKey::kMaxBytes || raw.size() % key_bytes != 0) {
    raise(
        {Errc::kInvalidArgument, fmt::format("{} bytes of keys of {} bytes each; a key has 1 to {}",
                                             raw.size(), key_bytes, BlockKey::kMaxBytes)});
  }
  std::vector<BlockKey> keys(raw.size() / key_bytes);
  const char* at = raw.data();
  for (BlockKey& key : keys) {
    std::memcpy(key.bytes.data(), at, key_bytes);
    at += key_bytes;
  }
  return keys;
}

std::vector<std::uint32_t> to_blocks(const py::object& blocks) {
  if (PyObject_CheckBuffer(blocks.ptr()) != 0 && !py::isinstance<py::bytes>(blocks)) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(blocks).request();
    if (info.ndim != 1) {
      raise({Errc::kInvalidArgument, fmt::format("blocks of {} dimensions", info.ndim)});
    }
    const std::string_view kind = info.format;
    if (info.itemsize == 4 && kind == "I") return from_buffer<std::uint32_t>(info);
    if (info.itemsize == 4 && kind == "i") return from_buffer<std::int32_t>(info);
    if (info.itemsize == 8 && (kind == "l" || kind == "q")) return from_buffer<std::int64_t>(info);
    if (info.itemsize == 8 && (kind == "L" || kind == "Q")) return from_buffer<std::uint64_t>(info);
    raise({Errc::kInvalidArgument,
           fmt::format("blocks of format \"{}\"; 32- or 64-bit integers are possible", kind)});
  }
  const py::object fast = py::reinterpret_steal<py::object>(
      PySequence_Fast(blocks.ptr(), "blocks must be a sequence of whole numbers"));
  if (!fast) throw py::error_already_set();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  std::vector<std::uint32_t> out;
  out.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    int overflow = 0;
    const long long value =
        PyLong_AsLongLongAndOverflow(PySequence_Fast_GET_ITEM(fast.ptr(), i), &overflow);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (overflow != 0 || value < 0 || value > static_cast<long long>(UINT32_MAX)) {
      raise({Errc::kInvalidArgument, fmt::format("blocks[{}] is not a block number", i)});
    }
    out.push_back(static_cast<std::uint32_t>(value));
  }
  return out;
}

Id128 to_id(const py::bytes& raw) {
  const std::string_view bytes = view(raw);
  if (bytes.size() != 16) {
    raise({Errc::kInvalidArgument, fmt::format("an id of {} bytes; it has 16", bytes.size())});
  }
  Id128 id;
  for (std::size_t i = 0; i < 16; ++i) {
    std::uint64_t& half = i < 8 ? id.high : id.low;
    half = half << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return id;
}

py::bytes from_id(const Id128& id) {
  if (id.is_none()) return py::bytes();
  char raw[16];
  for (unsigned i = 0; i < 8; ++i) {
    raw[i] = static_cast<char>(id.high >> (56 - 8 * i));
    raw[8 + i] = static_cast<char>(id.low >> (56 - 8 * i));
  }
  return {raw, sizeof raw};
}

std::vector<Segment> to_segments(const py::sequence& segments) {
  std::vector<Segment> out;
  out.reserve(segments.size());
  for (const py::handle entry : segments) {
    const auto parts = py::reinterpret_borrow<py::object>(entry).cast<py::tuple>();
    if (parts.size() != 3) {
      raise({Errc::kInvalidArgument,
             "a segment is (address, block_stride_bytes, size_bytes), of numbers"});
    }
    // Python hands addresses over as numbers. NOLINTNEXTLINE(performance-no-int-to-ptr)
    out.push_back({reinterpret_cast<std::byte*>(parts[0].cast<std::uintptr_t>()),
                   parts[1].cast<std::uint64_t>(), parts[2].cast<std::uint64_t>()});
  }
  return out;
}

std::vector<PageLayout> to_layouts(const py::sequence& segments, std::uint64_t block_count,
                                   std::uint32_t cells) {
  const std::vector<Segment> all = to_segments(segments);
  const std::size_t count = std::max(1U, cells);
  if (all.size() % count != 0) {
    raise({Errc::kInvalidArgument,
           fmt::format("{} segments for {} cells: each cell has equally many", all.size(), cells)});
  }
  const std::size_t each = all.size() / count;
  std::vector<PageLayout> layouts;
  for (auto first = all.begin(); layouts.size() < count; first += static_cast<long>(each)) {
    layouts.push_back(py_error::value_or_raise(
        PageLayout::create({first, first + static_cast<long>(each)}, block_count)));
  }
  return layouts;
}

namespace {

/// Raises InvalidArgument, naming the value, unless `entry` is a tuple or list of `size` parts.
py::sequence parts_of(const py::handle& entry, std::size_t size, const char* form) {
  if (py::isinstance<py::sequence>(entry) && !py::isinstance<py::bytes>(entry) &&
      !py::isinstance<py::str>(entry) && py::len(entry) == size) {
    return py::reinterpret_borrow<py::sequence>(entry);
  }
  raise({Errc::kInvalidArgument,
         fmt::format("{} is not {}", py::repr(entry).cast<std::string>(), form)});
}

KindRange to_range(const py::sequence& parts) {
  return {.kind = parts[0].cast<std::size_t>(),
          .first = parts[1].cast<std::size_t>(),
          .count = parts[2].cast<std::size_t>()};
}

}  // namespace

MoverKinds to_kinds(const py::sequence& kinds, std::uint32_t unit_tokens,
                    std::uint32_t alignment_tokens) {
  MoverKinds out{.kinds = {}, .unit_tokens = unit_tokens, .alignment_tokens = alignment_tokens};
  for (const py::handle entry : kinds) {
    const py::sequence parts = parts_of(entry, 4, "a kind (rule, tokens, block_tokens, members)");
    const auto rule = parts[0].cast<int>();
    if (rule < 0 || rule > static_cast<int>(BlockRule::kState)) {
      raise({Errc::kInvalidArgument,
             fmt::format("kind {} of blocks has rule {}; 0 (prefix) to 3 (state) are known",
                         out.kinds.size(), rule)});
    }
    MoverKind kind{.rule = static_cast<BlockRule>(rule),
                   .tokens = parts[1].cast<std::uint32_t>(),
                   .block_tokens = parts[2].cast<std::uint32_t>()};
    for (const py::handle member : parts[3].cast<py::sequence>()) {
      const py::sequence pair = parts_of(member, 2, "a member (segments, block_count)");
      kind.members.push_back(py_error::value_or_raise(PageLayout::create(
          to_segments(pair[0].cast<py::sequence>()), pair[1].cast<std::uint64_t>())));
    }
    out.kinds.push_back(std::move(kind));
  }
  return out;
}

std::vector<KindRange> to_ranges(const py::sequence& ranges) {
  std::vector<KindRange> out;
  for (const py::handle entry : ranges) {
    out.push_back(to_range(parts_of(entry, 3, "a range (kind, first, count)")));
  }
  return out;
}

LoadRanges to_load_ranges(const py::sequence& ranges) {
  LoadRanges out;
  for (const py::handle entry : ranges) {
    const py::sequence parts = parts_of(entry, 4, "a range (kind, first, count, blocks)");
    out.ranges.push_back({.range = to_range(parts), .blocks = {}});
    out.blocks.push_back(to_blocks(parts[3]));
  }
  for (std::size_t i = 0; i < out.ranges.size(); ++i) out.ranges[i].blocks = out.blocks[i];
  return out;
}

Duration to_duration(double seconds, const char* what) {
  // Nine days in nanoseconds are far below the limit of 64 bits.
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 8e5) {
    raise({Errc::kInvalidArgument, fmt::format("{} is {} s", what, seconds)});
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

void take_link_options(py::dict& named, LinkOptions& options) {
  take_duration(named, "connect_deadline", options.connect_deadline);
  take_duration(named, "lookup_deadline", options.lookup_deadline);
  take_duration(named, "open_deadline", options.open_deadline);
  take_duration(named, "reserve_deadline", options.reserve_deadline);
  take_duration(named, "reconnect_interval", options.reconnect_interval);
  take_duration(named, "refused_interval", options.refused_interval);
  take(named, "breaker_failures", options.breaker_failures);
  take_duration(named, "breaker_window", options.breaker_window);
  take_duration(named, "breaker_probe_interval", options.breaker_probe_interval);
  take(named, "offers_loads", options.offers_loads);
  take(named, "offers_saves", options.offers_saves);
  take(named, "minimum_version", options.minimum_version);
  take(named, "maximum_version", options.maximum_version);
  py::bytes scheduler;
  take(named, "scheduler", scheduler);
  if (py::len(scheduler) != 0) options.scheduler = to_id(scheduler);
}

NetworkChoice take_network(py::dict& named) {
  NetworkChoice choice;
  take(named, "direct_nics", choice.nics);
  take(named, "ucx_library", choice.ucx_library);
  return choice;
}

void take_mover_options(py::dict& named, Mover::Options& options) {
  take_duration(named, "load_patience", options.load_patience);
  take_duration(named, "coming_patience", options.coming_patience);
  take(named, "load_bytes_per_second", options.load_bytes_per_second);
  take(named, "max_jobs", options.max_jobs);
  take_optional(named, "shard", options.shard);
  take_optional(named, "shards", options.shards);
  take(named, "cells", options.cells);
  take(named, "saves", options.saves);
  take(named, "numa_node", options.numa_node);
  take(named, "direct_group", options.direct_group);
  take(named, "has_fixed_memory", options.has_fixed_memory);
  take(named, "sample_one_in", options.sample_one_in);
  std::string verify;
  take(named, "verify", verify);
  if (verify == "sample") {
    options.verify = Mover::Verify::kSample;
  } else if (verify == "all") {
    options.verify = Mover::Verify::kAll;
  } else if (!verify.empty() && verify != "off") {
    raise({Errc::kInvalidArgument, fmt::format("verify=\"{}\" is not off, sample or all", verify)});
  }
}

void refuse_unknown(const py::dict& named) {
  for (const auto& [name, value] : named) {
    raise({Errc::kInvalidArgument,
           fmt::format("unknown option {}", py::str(name).cast<std::string>())});
  }
}

}  // namespace pegaflow::py_arguments
