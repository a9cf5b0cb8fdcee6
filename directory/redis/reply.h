#pragma once
/// \file
/// The replies of a Redis server, read from bytes of an untrusted server.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace pegaflow::directory {

/// One reply of RESP2. A value.
struct Reply {
  enum class Kind : std::uint8_t { kStatus, kError, kInteger, kText, kNil, kArray };
  Kind kind = Kind::kNil;
  std::int64_t integer = 0;
  std::string text;          ///< The bytes of a status, an error or a text.
  std::vector<Reply> items;  ///< The items of an array.

  [[nodiscard]] bool is(Kind wanted) const noexcept { return kind == wanted; }
};

/// Splits the bytes of a connection into replies.
///
/// It allocates by what has arrived and never by what a header announces, so that a hostile server
/// costs no more memory than it sends, and Limits::reply_bytes at most. After an error the
/// connection is of no further use. Thread-bound.
class ReplyReader {
 public:
  struct Limits {
    std::size_t reply_bytes = std::size_t{8} << 20;  ///< Bytes of one reply, with all of its items.
    /// Bytes of a header, a status or an error: that about protected mode has 1,065.
    std::size_t line_bytes = 4096;
    std::size_t items = std::size_t{1} << 17;  ///< Items of one reply.
    std::size_t depth = 4;                     ///< Arrays in arrays.
  };
  ReplyReader() = default;
  explicit ReplyReader(const Limits& limits) : limits_(limits) {}

  void feed(std::span<const char> bytes) { input_.append(bytes.data(), bytes.size()); }
  /// The next complete reply; no value until more bytes arrive. Errors: kCorrupt for bytes that are
  /// no reply, and for a reply beyond a limit.
  Result<std::optional<Reply>> next();

 private:
  struct Open {
    Reply array;
    std::size_t left = 0;  ///< Items to come; not 0.
  };
  /// One line without its end; no value until all of it is here.
  Result<std::optional<std::string>> line();
  /// One element without the items of an array, whose count is `left`.
  Result<std::optional<Reply>> element(std::size_t& left);
  Result<std::optional<Reply>> text_of(std::int64_t length, std::size_t header_end);
  void consume(std::size_t bytes);

  Limits limits_;
  std::string input_;
  std::size_t begin_ = 0;  ///< Bytes of `input_` that were read.
  std::size_t taken_ = 0;  ///< Bytes of the present reply that were read.
  std::size_t elements_ = 0;
  std::vector<Open> open_;  ///< The arrays that the next element is in.
};

}  // namespace pegaflow::directory
