#pragma once
/// \file
/// Reads JSON as spans of its text, so that a body can be changed without writing it anew: numbers,
/// spacing and the order of members stay what the client wrote.

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow::router {

/// One member of an object. Both views lie in the text that was read.
struct JsonMember {
  std::string_view raw_key;  ///< Between its quotes, with its escapes.
  std::string_view value;    ///< As written: a string has its quotes.
  std::string_view whole;    ///< From the key's quote to the value's last byte.

  /// Whether the key, with its escapes undone, is `name`.
  [[nodiscard]] bool is(std::string_view name) const;
};

/// How deep arrays and objects may be nested. Bodies of clients have about ten levels.
inline constexpr std::size_t kJsonDepth = 256;

/// How many members an object may have that is read: a list of them takes eight times the bytes of
/// the shortest ones. Bodies of clients have about thirty.
inline constexpr std::size_t kJsonMembers = 1024;

/// Judges the whole text (RFC 8259 and UTF-8, one object at the top) and returns its members in
/// order, repeated keys included.
/// Errors: kInvalidArgument that names what is wrong and at which byte.
Result<std::vector<JsonMember>> read_members(std::string_view text);

/// The elements of an array, as written.
/// Errors: kInvalidArgument as read_members().
Result<std::vector<std::string_view>> read_elements(std::string_view text);

/// Bytes to leave out of a text.
struct JsonCut {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// Judges the whole text (any value at the top) and calls `is_wanted` for each member of each
/// object, inner ones before their outer ones, with how many objects and arrays it is in and the
/// member whose value is its object (without its value yet; nullptr for other objects). Appends to
/// `cuts` what to leave out so that the text without the wanted members is JSON still. Cuts of one
/// object may overlap.
/// Errors: kInvalidArgument as read_members().
Result<void> find_members(std::string_view text,
                          const std::function<bool(std::size_t level, const JsonMember* parent,
                                                   const JsonMember& member)>& is_wanted,
                          std::vector<JsonCut>& cuts);

/// The last member named `name`, which is the one that parsers go by; nullptr when there is none.
const JsonMember* find_member(const std::vector<JsonMember>& members, std::string_view name);

/// A string literal (with its quotes) without its escapes. Anything else gives "". The literal
/// comes from read_members() or read_elements(), so that it is well formed.
std::string json_unescape(std::string_view literal);

/// `text` as a string literal with its quotes; bytes that are no UTF-8 become U+FFFD.
std::string json_quote(std::string_view text);

}  // namespace pegaflow::router
