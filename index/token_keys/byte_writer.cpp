#include "index/token_keys/byte_writer.h"

#include <array>
#include <bit>
#include <limits>

namespace pegaflow::index {
namespace {

// Opcodes of pickle, by their names in Python's pickletools.
constexpr std::uint8_t kProto = 0x80;
constexpr std::uint8_t kFrame = 0x95;
constexpr std::uint8_t kStop = '.';
constexpr std::uint8_t kShortBinBytes = 'C';
constexpr std::uint8_t kShortBinUnicode = 0x8C;
constexpr std::uint8_t kBinUnicode = 'X';
constexpr std::uint8_t kBinInt1 = 'K';
constexpr std::uint8_t kBinInt2 = 'M';
constexpr std::uint8_t kBinInt = 'J';
constexpr std::uint8_t kLong1 = 0x8A;
constexpr std::uint8_t kEmptyTuple = ')';
constexpr std::uint8_t kTuple1 = 0x85;
constexpr std::uint8_t kTuple = 't';
constexpr std::uint8_t kBinGet = 'h';
constexpr std::uint8_t kLongBinGet = 'j';

static_assert(std::endian::native == std::endian::little,
              "numbers are written as they lie in memory");

constexpr std::size_t kFrameLengthAt = 3;
constexpr std::size_t kFrameBegin = kFrameLengthAt + 8;

}  // namespace

void CborWriter::head(std::uint8_t major, std::uint64_t value) {
  const auto type = static_cast<std::uint8_t>(major << 5U);
  if (value < 24) return out_.put(static_cast<std::uint8_t>(type | value));
  if (value <= 0xFF) {
    out_.put(static_cast<std::uint8_t>(type | 24));
    return out_.put_big(value, 1);
  }
  if (value <= 0xFFFF) {
    out_.put(static_cast<std::uint8_t>(type | 25));
    return out_.put_big(value, 2);
  }
  if (value <= 0xFFFF'FFFF) {
    out_.put(static_cast<std::uint8_t>(type | 26));
    return out_.put_big(value, 4);
  }
  out_.put(static_cast<std::uint8_t>(type | 27));
  out_.put_big(value, 8);
}

void CborWriter::numbers(std::span<const std::uint32_t> values) {
  out_.put_words(values.size(), [values](std::size_t i, std::uint64_t& word) {
    const std::uint32_t value = values[i];
    const std::uint32_t step = (value >= 24) + (value > 0xFF) + (value > 0xFFFF);
    const std::uint32_t bytes = step + (value > 0xFFFF);  // 0, 1, 2 or 4, behind the first one.
    const std::uint64_t first = step == 0 ? value : 23 + step;
    const std::uint64_t big_endian = __builtin_bswap32(value);
    word = first | big_endian >> (32 - 8 * bytes) << 8U;
    return std::size_t{1} + bytes;
  });
}

void PickleWriter::begin() {
  out_.clear();
  memoized_ = 0;
  known_.clear();
  out_.put(kProto);
  out_.put(std::uint8_t{5});
  out_.put(kFrame);
  out_.put_little(0, 8);
}

void PickleWriter::end() {
  out_.put(kStop);
  out_.set_little64(kFrameLengthAt, out_.size() - kFrameBegin);
}

void PickleWriter::number(std::int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    out_.put(kBinInt1);
    return out_.put_little(static_cast<std::uint64_t>(value), 1);
  }
  if (value >= 0 && value <= 0xFFFF) {
    out_.put(kBinInt2);
    return out_.put_little(static_cast<std::uint64_t>(value), 2);
  }
  if (value >= std::numeric_limits<std::int32_t>::min() &&
      value <= std::numeric_limits<std::int32_t>::max()) {
    out_.put(kBinInt);
    return out_.put_little(static_cast<std::uint64_t>(value), 4);
  }
  // The fewest bytes that hold it in two's complement.
  std::size_t count = 5;
  while (count < 8 && (value >> (8 * count - 1)) != 0 && (value >> (8 * count - 1)) != -1) ++count;
  out_.put(kLong1);
  out_.put(static_cast<std::uint8_t>(count));
  out_.put_little(static_cast<std::uint64_t>(value), count);
}

void PickleWriter::numbers(std::span<const std::uint32_t> values) {
  constexpr std::array<std::uint8_t, 3> kOpcodes = {kBinInt1, kBinInt2, kBinInt};
  std::uint32_t all = 0;
  for (const std::uint32_t value : values) all |= value;
  if (all > static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max())) {
    for (const std::uint32_t value : values) number(value);
    return;
  }
  out_.put_words(values.size(), [values, &kOpcodes](std::size_t i, std::uint64_t& word) {
    const std::uint64_t value = values[i];
    const std::uint32_t step = (value > 0xFF) + (value > 0xFFFF);
    word = kOpcodes[step] | value << 8U;
    return std::size_t{1} + (std::size_t{1} << step);
  });
}

void PickleWriter::bytes(std::span<const std::byte> data) {
  out_.put(kShortBinBytes);
  out_.put(static_cast<std::uint8_t>(data.size()));
  out_.put(data);
  memoize();
}

void PickleWriter::text(std::string_view data) {
  // CPython has one object for each text of one character below U+0100.
  const bool is_single =
      data.size() == 1 || (data.size() == 2 && static_cast<std::uint8_t>(data[0]) >= 0xC2 &&
                           static_cast<std::uint8_t>(data[0]) <= 0xC3);
  if (is_single) return shared_text(data);
  new_text(data);
}

void PickleWriter::constant(std::string_view data) { shared_text(data); }

void PickleWriter::shared_text(std::string_view data) {
  for (const Known& known : known_) {
    if (known.text != data) continue;
    const bool is_short = known.number <= 0xFF;
    out_.put(is_short ? kBinGet : kLongBinGet);
    return out_.put_little(known.number, is_short ? 1 : 4);
  }
  known_.push_back({data, memoized_});
  new_text(data);
}

void PickleWriter::new_text(std::string_view data) {
  const bool is_short = data.size() <= 0xFF;
  out_.put(is_short ? kShortBinUnicode : kBinUnicode);
  out_.put_little(data.size(), is_short ? 1 : 4);
  out_.put(data);
  memoize();
}

void PickleWriter::end_tuple(std::size_t count) {
  if (count == 0) return out_.put(kEmptyTuple);
  out_.put(count > 3 ? kTuple : static_cast<std::uint8_t>(kTuple1 + count - 1));
  memoize();
}

}  // namespace pegaflow::index
