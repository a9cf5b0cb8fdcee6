#pragma once
/// \file
/// Reads JSON as spans of its text, so that a body can be changed without serializing it again:
/// numbers, spacing and the order of members stay as the client wrote them.

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow::router {

/// One member of an object. The views point into the text that was read.
struct JsonMember {
  std::string_view raw_key;  ///< Between its quotes, with its escapes.
  std::string_view value;    ///< As written: a string has its quotes.
  std::string_view whole;    ///< From the key's quote to the value's last byte.

  /// Whether the key, with its escapes undone, is `name`.
  [[nodiscard]] bool is(std::string_view name) const;
};

/// The maximum nesting of arrays and objects. Bodies of clients have about ten levels.
inline constexpr std::size_t kJsonDepth = 256;

/// The maximum number of members of an object that is read: the list of them needs eight times the
/// bytes of the shortest members. Bodies of clients have about thirty.
inline constexpr std::size_t kJsonMembers = 1024;

/// Validates the whole text (RFC 8259 and UTF-8, one object at the top) and returns its members in
/// order, repeated keys included.
/// Errors: kInvalidArgument that names the defect and its byte.
Result<std::vector<JsonMember>> read_members(std::string_view text);

/// The elements of an array, as written.
/// Errors: kInvalidArgument, as from read_members().
Result<std::vector<std::string_view>> read_elements(std::string_view text);

/// Bytes to leave out of a text.
struct JsonCut {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// Validates the whole text (any value at the top) and calls `is_wanted` for each member of each
/// object, inner members before outer ones. `level` counts the enclosing objects and arrays;
/// `parent` is the member whose value is the enclosing object (without its value yet; nullptr for
/// other objects). Appends to `cuts` the bytes to leave out so that the text without the wanted
/// members is still JSON. Cuts of one object may overlap.
/// Errors: kInvalidArgument, as from read_members().
Result<void> find_members(std::string_view text,
                          const std::function<bool(std::size_t level, const JsonMember* parent,
                                                   const JsonMember& member)>& is_wanted,
                          std::vector<JsonCut>& cuts);

/// The last member named `name`, which is the one that parsers use; nullptr when there is none.
const JsonMember* find_member(const std::vector<JsonMember>& members, std::string_view name);

/// The text of the member named `name`, with its escapes undone; "" when there is none, or it is no
/// string.
std::string text_of(const std::vector<JsonMember>& members, std::string_view name);

/// The text of a string literal (with its quotes), with its escapes undone; "" for any other value.
/// The literal comes from read_members() or read_elements(), so it is well formed.
std::string json_unescape(std::string_view literal);

/// `text` as a string literal with its quotes; bytes that are not UTF-8 become U+FFFD.
std::string json_quote(std::string_view text);

}  // namespace pegaflow::router
