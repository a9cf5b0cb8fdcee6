#include "index/events/msgpack_reader.h"

#include <array>

namespace pegaflow::index {
namespace {

// Bytes of values whose first byte tells their size, by that byte; 0 for all others.
constexpr std::array<std::uint8_t, 256> kSizes = [] {
  std::array<std::uint8_t, 256> sizes{};
  for (unsigned first = 0; first < 256; ++first) {
    const bool small = first <= 0x7f || first >= 0xe0;
    const bool constant = first == 0xc0 || first == 0xc2 || first == 0xc3;
    if (small || constant) sizes[first] = 1;
  }
  for (const unsigned first : {0xccU, 0xd0U}) {
    for (unsigned power = 0; power < 4; ++power) {
      sizes[first + power] = static_cast<std::uint8_t>(1 + (1U << power));
    }
  }
  sizes[0xca] = 5;
  sizes[0xcb] = 9;
  return sizes;
}();

}  // namespace

std::uint64_t MsgpackReader::big_endian(std::size_t offset, std::size_t size) const noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) value = value << 8U | at_[offset + i];
  return value;
}

// One function, because the format is one table of first bytes.
MsgpackReader::Head MsgpackReader::head() const noexcept {
  if (at_ == end_) return {};
  const std::uint8_t first = *at_;
  if (first <= 0x7f) return {MsgpackType::kUnsigned, 1, first};
  if (first <= 0x8f) return {MsgpackType::kMap, 1, first & 0x0fU};
  if (first <= 0x9f) return {MsgpackType::kArray, 1, first & 0x0fU};
  if (first <= 0xbf) return {MsgpackType::kString, 1, first & 0x1fU};
  if (first >= 0xe0) {
    return {MsgpackType::kNegative, 1,
            static_cast<std::uint64_t>(std::int64_t{static_cast<std::int8_t>(first)})};
  }
  struct Form {
    MsgpackType type;
    std::uint8_t digits;  // Bytes of the number behind the first byte.
    std::uint8_t extra;   // Bytes that belong to the value beyond that number: see below.
  };
  using enum MsgpackType;
  static constexpr std::array<Form, 32> kForms{{
      {kNil, 0, 0},        {kInvalid, 0, 0},   {kBool, 0, 0},      {kBool, 0, 1},       // c0..c3
      {kBinary, 1, 0},     {kBinary, 2, 0},    {kBinary, 4, 0},                         // c4..c6
      {kExtension, 1, 1},  {kExtension, 2, 1}, {kExtension, 4, 1},                      // c7..c9
      {kFloat, 4, 0},      {kFloat, 8, 0},                                              // ca, cb
      {kUnsigned, 1, 0},   {kUnsigned, 2, 0},  {kUnsigned, 4, 0},  {kUnsigned, 8, 0},   // cc..cf
      {kNegative, 1, 0},   {kNegative, 2, 0},  {kNegative, 4, 0},  {kNegative, 8, 0},   // d0..d3
      {kExtension, 0, 2},  {kExtension, 0, 3}, {kExtension, 0, 5}, {kExtension, 0, 9},  // d4..d7
      {kExtension, 0, 17},                                                              // d8
      {kString, 1, 0},     {kString, 2, 0},    {kString, 4, 0},                         // d9..db
      {kArray, 2, 0},      {kArray, 4, 0},                                              // dc, dd
      {kMap, 2, 0},        {kMap, 4, 0},                                                // de, df
  }};
  const Form form = kForms[first - 0xc0U];
  const std::uint32_t size = 1U + form.digits;
  if (left() < size) return {};
  Head found{form.type, size, big_endian(1, form.digits)};
  if (form.type == kExtension) found.value += form.extra;  // With the byte of its type.
  if (form.type == kBool) found.value = form.extra;
  if (form.type == kNegative) {
    const unsigned shift = 64U - 8U * form.digits;
    found.value =
        static_cast<std::uint64_t>(static_cast<std::int64_t>(found.value << shift) >> shift);
    if (static_cast<std::int64_t>(found.value) >= 0) found.type = kUnsigned;
  }
  return found;
}

MsgpackType MsgpackReader::peek() const noexcept { return head().type; }

bool MsgpackReader::read_nil() noexcept {
  if (at_ == end_ || *at_ != 0xc0) return false;
  ++at_;
  return true;
}

bool MsgpackReader::read_unsigned(std::uint64_t& value) noexcept {
  const Head found = head();
  if (found.type != MsgpackType::kUnsigned) return false;
  at_ += found.size;
  value = found.value;
  return true;
}

bool MsgpackReader::read_integer_bits(std::uint64_t& value) noexcept {
  const Head found = head();
  if (found.type != MsgpackType::kUnsigned && found.type != MsgpackType::kNegative) return false;
  at_ += found.size;
  value = found.value;
  return true;
}

bool MsgpackReader::read_number(double& value) noexcept {
  const Head found = head();
  if (found.type == MsgpackType::kUnsigned) {
    value = static_cast<double>(found.value);
  } else if (found.type == MsgpackType::kNegative) {
    value = static_cast<double>(static_cast<std::int64_t>(found.value));
  } else if (found.type != MsgpackType::kFloat) {
    return false;
  } else if (found.size == 5) {
    value = std::bit_cast<float>(static_cast<std::uint32_t>(found.value));
  } else {
    value = std::bit_cast<double>(found.value);
  }
  at_ += found.size;
  return true;
}

bool MsgpackReader::read_string(std::string_view& value) noexcept {
  const Head found = head();
  if (found.type != MsgpackType::kString || left() - found.size < found.value) return false;
  value = {reinterpret_cast<const char*>(at_ + found.size), static_cast<std::size_t>(found.value)};
  at_ += found.size + found.value;
  return true;
}

bool MsgpackReader::read_binary(std::span<const std::byte>& value) noexcept {
  const Head found = head();
  if (found.type != MsgpackType::kBinary || left() - found.size < found.value) return false;
  value = {reinterpret_cast<const std::byte*>(at_ + found.size),
           static_cast<std::size_t>(found.value)};
  at_ += found.size + found.value;
  return true;
}

bool MsgpackReader::read_array(std::uint32_t& elements) noexcept {
  const Head found = head();
  // Each element has at least one byte: a count that cannot be true is cut off at once.
  if (found.type != MsgpackType::kArray || left() - found.size < found.value) return false;
  at_ += found.size;
  elements = static_cast<std::uint32_t>(found.value);
  return true;
}

bool MsgpackReader::read_map(std::uint32_t& pairs) noexcept {
  const Head found = head();
  if (found.type != MsgpackType::kMap || (left() - found.size) / 2 < found.value) return false;
  at_ += found.size;
  pairs = static_cast<std::uint32_t>(found.value);
  return true;
}

bool MsgpackReader::consume(std::uint64_t& inside) noexcept {
  const Head found = head();
  if (found.type == MsgpackType::kInvalid) return false;
  at_ += found.size;
  inside = 0;
  switch (found.type) {
    case MsgpackType::kArray:
    case MsgpackType::kMap:
      inside = found.type == MsgpackType::kMap ? 2 * found.value : found.value;
      return inside <= left();
    case MsgpackType::kString:
    case MsgpackType::kBinary:
    case MsgpackType::kExtension:
      if (left() < found.value) return false;
      at_ += found.value;
      return true;
    default:
      return true;
  }
}

// Consumes at most `most` values that contain no others and returns their number. Lists of token
// ids are most of what an engine sends.
std::uint64_t MsgpackReader::skip_scalars(std::uint64_t most) noexcept {
  std::uint64_t count = 0;
  for (; count < most && at_ != end_; ++count) {
    const std::size_t size = kSizes[*at_];
    if (size == 0 || left() < size) break;
    at_ += size;
  }
  return count;
}

bool MsgpackReader::skip_values(std::uint64_t count) noexcept {
  // The sum stays within the input: a container with more values than bytes is cut off.
  for (std::uint64_t pending = count; pending > 0;) {
    pending -= skip_scalars(pending);
    if (pending == 0) break;
    std::uint64_t inside = 0;
    if (!consume(inside)) return false;
    pending += inside - 1;
  }
  return true;
}

MsgpackReader::Skipped MsgpackReader::skip(std::size_t most_depth) noexcept {
  std::array<std::uint64_t, kTrackedDepth> open;  // Values that each open container still needs.
  std::size_t depth = 0;
  bool too_deep = false;
  for (;;) {
    std::uint64_t inside = 0;
    if (!consume(inside)) return Skipped::kCutOff;
    if (inside > 0 && depth < kTrackedDepth) {
      too_deep |= depth >= most_depth;
      inside -= skip_scalars(inside);
      if (inside > 0) {
        open[depth++] = inside;
        continue;
      }
    }
    too_deep |= inside > 0;
    if (!skip_values(inside)) return Skipped::kCutOff;  // Below the tracked depth.
    while (depth > 0 && --open[depth - 1] == 0) --depth;
    if (depth == 0) return too_deep ? Skipped::kTooDeep : Skipped::kDone;
  }
}

}  // namespace pegaflow::index
