#include "router/http/form_text.h"

#include <algorithm>
#include <string>

#include "router/http/http_message.h"

namespace pegaflow::router {
namespace {

constexpr std::string_view kBlanks = " \t";

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

/// A header's value as its first word and its parameters: `form-data; name="a"`.
class Parameters {
 public:
  explicit Parameters(std::string_view value) : rest_(value) {
    first_ = trimmed(rest_.substr(0, rest_.find(';')));
    skip(rest_.find(';'));
  }
  [[nodiscard]] std::string_view first() const { return first_; }

  /// The parameter named `name` with its quotes and escapes undone; nothing when there is none.
  [[nodiscard]] std::optional<std::string> find(std::string_view name) const {
    Parameters left = *this;
    while (!left.rest_.empty()) {
      const std::size_t end = left.rest_.find_first_of(";=");
      if (end == std::string_view::npos) return std::nullopt;
      const std::string_view key = trimmed(left.rest_.substr(0, end));
      const bool has_value = left.rest_[end] == '=';
      left.skip(end);
      if (!has_value) continue;
      std::string value = left.take_value();
      if (equals_ignoring_case(key, name)) return value;
    }
    return std::nullopt;
  }

 private:
  /// Drops the bytes up to and including the one at `at`; all of them for npos.
  void skip(std::size_t at) { rest_ = at < rest_.size() ? rest_.substr(at + 1) : ""; }

  std::string take_value() {
    rest_.remove_prefix(std::min(rest_.size(), rest_.find_first_not_of(kBlanks)));
    std::string value;
    if (rest_.substr(0, 1) != "\"") {
      const std::size_t end = rest_.find(';');
      value = trimmed(rest_.substr(0, end));
      skip(end);
      return value;
    }
    std::size_t at = 1;
    for (; at < rest_.size() && rest_[at] != '"'; ++at) {
      if (rest_[at] == '\\' && at + 1 < rest_.size()) ++at;
      value.push_back(rest_[at]);
    }
    rest_.remove_prefix(std::min(rest_.size(), at));
    skip(rest_.find(';'));
    return value;
  }

  std::string_view first_;
  std::string_view rest_;
};

/// The end of a delimiter line whose boundary ends at `at`: the first byte after its CRLF, or npos
/// when the line is not a delimiter. `is_last` is set for the delimiter that closes the form.
std::size_t end_of_delimiter(std::string_view body, std::size_t at, bool& is_last) {
  is_last = body.substr(at, 2) == "--";
  if (is_last) return at + 2;
  at = std::min(body.find_first_not_of(kBlanks, at), body.size());
  return body.substr(at, 2) == "\r\n" ? at + 2 : std::string_view::npos;
}

/// Whether a part with these header lines is the text field named `name`.
bool is_field(std::string_view lines, std::string_view name) {
  while (!lines.empty()) {
    const std::size_t end = std::min(lines.find("\r\n"), lines.size());
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(std::min(lines.size(), end + 2));
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos ||
        !equals_ignoring_case(trimmed(line.substr(0, colon)), "content-disposition")) {
      continue;
    }
    const Parameters disposition(line.substr(colon + 1));
    return equals_ignoring_case(disposition.first(), "form-data") &&
           disposition.find("name") == name && !disposition.find("filename");
  }
  return false;
}

}  // namespace

std::optional<std::string_view> form_field(std::string_view body, std::string_view content_type,
                                           std::string_view name) {
  const Parameters type(content_type);
  if (!equals_ignoring_case(type.first(), "multipart/form-data")) return std::nullopt;
  const std::optional<std::string> boundary = type.find("boundary");
  if (!boundary || boundary->empty()) return std::nullopt;
  const std::string delimiter = "\r\n--" + *boundary;

  std::optional<std::string_view> value;
  bool is_last = false;
  // The first delimiter may begin the body; bytes before it are ignored.
  std::size_t at = 0;
  if (body.substr(0, delimiter.size() - 2) == std::string_view(delimiter).substr(2)) {
    at = delimiter.size() - 2;
  } else {
    at = body.find(delimiter);
    if (at == std::string_view::npos) return std::nullopt;
    at += delimiter.size();
  }
  at = end_of_delimiter(body, at, is_last);
  while (!is_last && at != std::string_view::npos) {
    // The empty line ends the headers; it follows the delimiter at once where there are none.
    const std::size_t blank = body.find("\r\n\r\n", at - 2);
    if (blank == std::string_view::npos) return value;
    const std::size_t content = blank + 4;
    const std::string_view lines = blank > at ? body.substr(at, blank - at) : std::string_view();
    std::size_t end = content - 2;  // An empty part may leave its CRLF out.
    std::size_t next = std::string_view::npos;
    while (next == std::string_view::npos) {
      end = body.find(delimiter, end);
      if (end == std::string_view::npos) return value;
      next = end_of_delimiter(body, end + delimiter.size(), is_last);
      if (next == std::string_view::npos) end += 2;  // Content that begins like a delimiter.
    }
    if (is_field(lines, name)) {
      value = body.substr(content, end > content ? end - content : 0);
    }
    at = next;
  }
  return value;
}

}  // namespace pegaflow::router
