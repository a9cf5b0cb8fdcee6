#pragma once
/// \file
/// Reader of MessagePack, value by value.
///
/// Why our own: Debian 12's libmsgpack-cxx-dev depends on Boost 1.74 and cannot be installed beside
/// the Boost 1.81 of the router, nlohmann-json's reader recurses on nested arrays until the stack
/// overflows, and a visitor is called for each of the thousands of token ids that most batches only
/// skip. docs/decisions has the comparison.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace pegaflow::index {

/// Type of the next value.
enum class MsgpackType : std::uint8_t {
  kNil,
  kBool,
  kUnsigned,  ///< Zero or above.
  kNegative,
  kFloat,
  kString,
  kBinary,
  kArray,
  kMap,
  kExtension,
  kInvalid,  ///< The reserved byte 0xc1, or the end of the input.
};

/// Reads values from bytes that it does not own. Each read function returns false, and consumes
/// nothing, when the next value has another type or is cut off. Immutable input; thread-bound.
class MsgpackReader {
 public:
  explicit MsgpackReader(std::span<const std::byte> bytes)
      : at_(reinterpret_cast<const unsigned char*>(bytes.data())), end_(at_ + bytes.size()) {}

  [[nodiscard]] bool at_end() const noexcept { return at_ == end_; }
  [[nodiscard]] std::size_t left() const noexcept { return static_cast<std::size_t>(end_ - at_); }
  [[nodiscard]] MsgpackType peek() const noexcept;

  bool read_nil() noexcept;
  /// An integer that is zero or above.
  bool read_unsigned(std::uint64_t& value) noexcept;
  /// An integer as its 64 bits: negative ones in two's complement.
  bool read_integer_bits(std::uint64_t& value) noexcept;
  /// A float, or an integer.
  bool read_number(double& value) noexcept;
  bool read_string(std::string_view& value) noexcept;
  bool read_binary(std::span<const std::byte>& value) noexcept;
  bool read_array(std::uint32_t& elements) noexcept;
  bool read_map(std::uint32_t& pairs) noexcept;

  /// Outcome of skip().
  enum class Skipped : std::uint8_t {
    kDone,
    kCutOff,   ///< The input ends within the value, or has the reserved byte. The position is lost.
    kTooDeep,  ///< Consumed as well, but nested deeper than `most_depth`, at most 16.
  };
  /// Consumes one value with everything in it, without recursion, however deep it is.
  Skipped skip(std::size_t most_depth) noexcept;
  /// Consumes `count` values of any depth; false if they are cut off, and the position is lost.
  bool skip_values(std::uint64_t count) noexcept;

 private:
  struct Head {
    MsgpackType type = MsgpackType::kInvalid;
    std::uint32_t size = 0;   // Bytes of the head.
    std::uint64_t value = 0;  // The integer's bits, or the length or count behind the head.
  };
  static constexpr std::size_t kTrackedDepth = 16;
  [[nodiscard]] Head head() const noexcept;
  // Consumes a value without the values in it, whose number goes to `inside`.
  bool consume(std::uint64_t& inside) noexcept;
  std::uint64_t skip_scalars(std::uint64_t most) noexcept;
  [[nodiscard]] std::uint64_t big_endian(std::size_t offset, std::size_t size) const noexcept;

  const unsigned char* at_;
  const unsigned char* end_;
};

}  // namespace pegaflow::index
