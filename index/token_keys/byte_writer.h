#pragma once
/// \file
/// The bytes that are hashed, written as CBOR or as Python's pickle.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace pegaflow::index {

/// Bytes at the end of a buffer that is used again and again.
class ByteWriter {
 public:
  void clear() { bytes_.clear(); }
  void put(std::uint8_t byte) { bytes_.push_back(byte); }
  void put(std::string_view text) { bytes_.insert(bytes_.end(), text.begin(), text.end()); }
  void put(std::span<const std::byte> bytes) {
    const auto* const first = reinterpret_cast<const std::uint8_t*>(bytes.data());
    bytes_.insert(bytes_.end(), first, first + bytes.size());
  }
  void put_little(std::uint64_t value, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) put(static_cast<std::uint8_t>(value >> (8 * i)));
  }
  void put_big(std::uint64_t value, std::size_t count) {
    for (std::size_t i = count; i-- > 0;) put(static_cast<std::uint8_t>(value >> (8 * i)));
  }
  /// Adds `count` items, each of at most 8 bytes: `item(i, word)` sets the item's bytes in the
  /// order of memory and returns their number.
  template <typename Item>
  void put_words(std::size_t count, const Item& item) {
    const std::size_t begin = bytes_.size();
    bytes_.resize(begin + 8 * count);
    std::uint8_t* at = bytes_.data() + begin;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t word = 0;
      const std::size_t size = item(i, word);
      std::memcpy(at, &word, sizeof word);  // The next item overwrites what is too much.
      at += size;
    }
    bytes_.resize(static_cast<std::size_t>(at - bytes_.data()));
  }
  /// Overwrites 8 bytes at `at`.
  void set_little64(std::size_t at, std::uint64_t value) {
    for (std::size_t i = 0; i < 8; ++i)
      bytes_[at + i] = static_cast<std::uint8_t>(value >> (8 * i));
  }
  [[nodiscard]] std::size_t size() const { return bytes_.size(); }
  [[nodiscard]] std::span<const std::uint8_t> bytes() const { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// CBOR in its canonical form (RFC 7049, section 3.9): the shortest heads, definite lengths.
class CborWriter {
 public:
  void begin() { out_.clear(); }
  void end() {}
  void null() { out_.put(0xF6); }
  void number(std::int64_t value) {
    if (value >= 0) {
      head(0, static_cast<std::uint64_t>(value));
    } else {
      head(1, static_cast<std::uint64_t>(-1 - value));
    }
  }
  void unsigned_number(std::uint64_t value) { head(0, value); }
  /// As many numbers; without a branch for each, which would be mispredicted.
  void numbers(std::span<const std::uint32_t> values);
  void bytes(std::span<const std::byte> data) {
    head(2, data.size());
    out_.put(data);
  }
  void text(std::string_view data) {
    head(3, data.size());
    out_.put(data);
  }
  /// A text that is one Python object wherever it occurs: CBOR writes it out each time.
  void constant(std::string_view data) { text(data); }
  void begin_tuple(std::size_t count) { head(4, count); }
  void end_tuple(std::size_t /*count*/) {}
  void begin_map(std::size_t count) { head(5, count); }
  [[nodiscard]] std::span<const std::uint8_t> written() const { return out_.bytes(); }

 private:
  void head(std::uint8_t major, std::uint64_t value);
  ByteWriter out_;
};

/// Python's pickle, protocol 5, as CPython's C implementation writes one value: in one frame, so of
/// less than 64 KiB. An object that occurs twice is written once and named by its number then.
class PickleWriter {
 public:
  void begin();
  void end();
  void null() { out_.put('N'); }
  void number(std::int64_t value);
  void numbers(std::span<const std::uint32_t> values);
  /// At most 255 bytes.
  void bytes(std::span<const std::byte> data);
  /// Equal texts of more than one character are different objects.
  void text(std::string_view data);
  void constant(std::string_view data);
  void begin_tuple(std::size_t count) {
    if (count > 3) out_.put('(');
  }
  void end_tuple(std::size_t count);
  [[nodiscard]] std::span<const std::uint8_t> written() const { return out_.bytes(); }

 private:
  struct Known {
    std::string_view text;
    std::uint32_t number;
  };

  void memoize() {
    out_.put(0x94);
    ++memoized_;
  }
  void shared_text(std::string_view data);
  void new_text(std::string_view data);

  ByteWriter out_;
  std::uint32_t memoized_ = 0;
  std::vector<Known> known_;  ///< Texts that are one object wherever they occur.
};

}  // namespace pegaflow::index
