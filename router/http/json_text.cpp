#include "router/http/json_text.h"

#include <array>
#include <cstdint>

#include <fmt/format.h>

namespace pegaflow::router {
namespace {

/// The length of the UTF-8 sequence at the start of `text`; 0 when it is invalid.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0U) != 0x80) return 0;
  }
  // Overlong forms, surrogates, beyond U+10FFFF.
  if ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F)) return 0;
  if ((first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F)) return 0;
  return length;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/// True for the bytes of a string that need no check: all but quote, backslash, controls,
/// non-ASCII.
constexpr std::array<bool, 256> kPlain = [] {
  std::array<bool, 256> plain{};
  for (std::size_t c = 0x20; c < 0x80; ++c) plain[c] = c != '"' && c != '\\';
  return plain;
}();

/// Walks over a text once. Each skip_*() starts at the first byte of the element that it skips.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  [[nodiscard]] std::size_t at() const { return at_; }
  [[nodiscard]] std::string_view from(std::size_t begin) const {
    return text_.substr(begin, at_ - begin);
  }
  [[nodiscard]] bool ended() const { return at_ == text_.size(); }
  [[nodiscard]] bool sees(char c) const { return !ended() && text_[at_] == c; }
  bool take(char c) {
    if (!sees(c)) return false;
    ++at_;
    return true;
  }
  void skip_blanks() {
    while (!ended() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
      ++at_;
    }
  }
  [[nodiscard]] tl::unexpected<Error> wrong(std::string_view what) const {
    return fail(Errc::kInvalidArgument, "not JSON: {} at byte {}", what, at_);
  }

  Result<void> skip_string() {
    if (!take('"')) return wrong("a string is missing");
    while (!ended()) {
      const char c = text_[at_];
      if (kPlain[static_cast<unsigned char>(c)]) {
        ++at_;
      } else if (c == '"') {
        ++at_;
        return {};
      } else if (c == '\\') {
        PEGA_TRY(skip_escape());
      } else if (static_cast<unsigned char>(c) < 0x20) {
        return wrong("a control character in a string");
      } else {
        const std::size_t length = utf8_length(text_.substr(at_));
        if (length == 0) return wrong("bytes that are not UTF-8");
        at_ += length;
      }
    }
    return wrong("a string without its end");
  }

  /// Skips any value with its contents, without recursion.
  Result<void> skip_value() {
    std::string open;  // The closing brackets of all open levels.
    while (true) {
      bool closed = false;
      if (sees('{') || sees('[')) {
        const char end = text_[at_++] == '{' ? '}' : ']';
        skip_blanks();
        if (!take(end)) {
          open.push_back(end);
          if (open.size() >= kJsonDepth) return wrong("too many levels");
          if (end == '}') PEGA_TRY(skip_key());
          continue;
        }
      } else {
        PEGA_TRY(skip_scalar());
      }
      do {
        closed = false;
        if (open.empty()) return {};
        skip_blanks();
        if (take(open.back())) {
          open.pop_back();
          closed = true;
        } else if (!take(',')) {
          return wrong("a comma or an end is missing");
        }
      } while (closed);
      skip_blanks();
      if (open.back() == '}') PEGA_TRY(skip_key());
    }
  }

  /// Skips a key, its colon, and the blanks up to the value.
  Result<void> skip_key() {
    PEGA_TRY(skip_string());
    return skip_colon();
  }

  Result<void> skip_colon() {
    skip_blanks();
    if (!take(':')) return wrong("a colon is missing");
    skip_blanks();
    return {};
  }

  Result<void> skip_scalar() {
    if (ended()) return wrong("a value is missing");
    const char c = text_[at_];
    if (c == '"') return skip_string();
    if (c == '-' || (c >= '0' && c <= '9')) return skip_number();
    for (const std::string_view word : {"true", "false", "null"}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return {};
      }
    }
    return wrong("a value is missing");
  }

 private:
  Result<void> skip_escape() {
    ++at_;
    if (ended()) return wrong("a string without its end");
    const char c = text_[at_];
    if (c == 'u') {
      if (text_.size() - at_ < 5) return wrong("a short escape");
      for (std::size_t i = 1; i <= 4; ++i) {
        if (hex_digit(text_[at_ + i]) < 0) return wrong("a bad escape");
      }
      at_ += 5;
      return {};
    }
    if (std::string_view("\"\\/bfnrt").find(c) == std::string_view::npos) {
      return wrong("a bad escape");
    }
    ++at_;
    return {};
  }

  bool skip_digits() {
    const std::size_t begin = at_;
    while (!ended() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ != begin;
  }

  Result<void> skip_number() {
    take('-');
    if (!take('0') && !skip_digits()) return wrong("a bad number");
    if (take('.') && !skip_digits()) return wrong("a bad number");
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      if (!skip_digits()) return wrong("a bad number");
    }
    return {};
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

/// Does the work of json_unescape() for the bytes between the quotes.
std::string undo_escapes(std::string_view raw);

void append_utf8(std::string& out, std::uint32_t code) {
  if (code < 0x80) {
    out.push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out.push_back(static_cast<char>(0xC0U | (code >> 6U)));
    out.push_back(static_cast<char>(0x80U | (code & 0x3FU)));
  } else if (code < 0x10000) {
    out.push_back(static_cast<char>(0xE0U | (code >> 12U)));
    out.push_back(static_cast<char>(0x80U | ((code >> 6U) & 0x3FU)));
    out.push_back(static_cast<char>(0x80U | (code & 0x3FU)));
  } else {
    out.push_back(static_cast<char>(0xF0U | (code >> 18U)));
    out.push_back(static_cast<char>(0x80U | ((code >> 12U) & 0x3FU)));
    out.push_back(static_cast<char>(0x80U | ((code >> 6U) & 0x3FU)));
    out.push_back(static_cast<char>(0x80U | (code & 0x3FU)));
  }
}

std::uint32_t four_digits(std::string_view raw, std::size_t at) {
  std::uint32_t code = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    code = code * 16 + static_cast<std::uint32_t>(hex_digit(raw[at + i]));
  }
  return code;
}

std::string undo_escapes(std::string_view raw) {
  std::string out;
  out.reserve(raw.size());
  for (std::size_t i = 0; i < raw.size(); ++i) {
    if (raw[i] != '\\') {
      out.push_back(raw[i]);
      continue;
    }
    const char c = raw[++i];
    constexpr std::string_view kFrom = "bfnrt";
    constexpr std::string_view kTo = "\b\f\n\r\t";
    if (const std::size_t found = kFrom.find(c); found != std::string_view::npos) {
      out.push_back(kTo[found]);
    } else if (c != 'u') {
      out.push_back(c);
    } else {
      std::uint32_t code = four_digits(raw, i + 1);
      i += 4;
      if (code >= 0xD800 && code < 0xE000) {
        const bool pair = code < 0xDC00 && raw.substr(i + 1, 2) == "\\u" &&
                          four_digits(raw, i + 3) >= 0xDC00 && four_digits(raw, i + 3) < 0xE000;
        if (pair) {
          code = 0x10000 + ((code - 0xD800) << 10U) + (four_digits(raw, i + 3) - 0xDC00);
          i += 6;
        } else {
          code = 0xFFFD;  // A single surrogate has no UTF-8.
        }
      }
      append_utf8(out, code);
    }
  }
  return out;
}

using IsWanted =
    std::function<bool(std::size_t level, const JsonMember* parent, const JsonMember& member)>;

/// The walk of find_members(): over every value of a text, without recursion.
class MemberFinder {
 public:
  MemberFinder(std::string_view text, const IsWanted& is_wanted, std::vector<JsonCut>& cuts)
      : scan_(text), is_wanted_(is_wanted), cuts_(cuts) {}

  Result<void> run() {
    scan_.skip_blanks();
    while (true) {
      PEGA_TRY_LET(const bool has_opened, begin_value());
      if (has_opened) continue;
      PEGA_TRY_LET(const bool has_next, end_values());
      if (!has_next) return {};
    }
  }

 private:
  // An open object or array. An array uses `is_object` only.
  struct Level {
    bool is_object = false;
    bool has_kept = false;
    std::size_t kept_end = 0;     // The end of the last member that stays.
    std::size_t begin = 0;        // The begin of the current member's key.
    std::size_t value_begin = 0;  // The begin of its value.
    std::size_t cut_begin = 0;    // The begin of a wanted member whose end is not known yet.
    bool is_cutting = false;
    JsonMember member{};
  };

  /// At the begin of a value: opens it, and returns whether values in it follow, or skips it.
  Result<bool> begin_value() {
    if (!scan_.sees('{') && !scan_.sees('[')) {
      PEGA_TRY(scan_.skip_scalar());
      return false;
    }
    const bool is_object = scan_.take('{');
    if (!is_object) scan_.take('[');
    scan_.skip_blanks();
    if (scan_.take(is_object ? '}' : ']')) return false;
    if (open_.size() >= kJsonDepth) return scan_.wrong("too many levels");
    open_.emplace_back().is_object = is_object;
    if (is_object) PEGA_TRY(begin_member());
    return true;
  }

  /// After a value: ends all levels that end here. Returns whether another value follows.
  Result<bool> end_values() {
    while (true) {
      end_member();
      const std::size_t end = scan_.at();
      scan_.skip_blanks();
      if (open_.empty()) {
        if (!scan_.ended()) return scan_.wrong("more after the value");
        return false;
      }
      const bool is_object = open_.back().is_object;
      if (!scan_.take(is_object ? '}' : ']')) {
        if (!scan_.take(',')) return scan_.wrong("a comma or an end is missing");
        scan_.skip_blanks();
        if (is_object) PEGA_TRY(begin_member());
        return true;
      }
      close_level(end);
    }
  }

  Result<void> begin_member() {
    Level& level = open_.back();
    if (level.is_cutting) cuts_.push_back({level.cut_begin, scan_.at()});
    level.is_cutting = false;
    level.begin = scan_.at();
    PEGA_TRY(scan_.skip_string());
    const std::string_view quoted = scan_.from(level.begin);
    level.member = {quoted.substr(1, quoted.size() - 2), {}, {}};
    PEGA_TRY(scan_.skip_colon());
    level.value_begin = scan_.at();
    return {};
  }

  void end_member() {
    if (open_.empty() || !open_.back().is_object) return;
    Level& level = open_.back();
    level.member.value = scan_.from(level.value_begin);
    level.member.whole = scan_.from(level.begin);
    const bool has_parent = open_.size() > 1 && open_[open_.size() - 2].is_object;
    const JsonMember* const parent = has_parent ? &open_[open_.size() - 2].member : nullptr;
    if (is_wanted_(open_.size(), parent, level.member)) {
      level.cut_begin = level.begin;
      level.is_cutting = true;
    } else {
      level.has_kept = true;
      level.kept_end = scan_.at();
    }
  }

  /// No member follows: the comma before the cut member is cut, too. `end` is its end.
  void close_level(std::size_t end) {
    const Level& level = open_.back();
    if (level.is_cutting) cuts_.push_back({level.has_kept ? level.kept_end : level.cut_begin, end});
    open_.pop_back();
  }

  Scanner scan_;
  const IsWanted& is_wanted_;
  std::vector<JsonCut>& cuts_;
  std::vector<Level> open_;
};

}  // namespace

bool JsonMember::is(std::string_view name) const {
  const bool is_plain = raw_key.find('\\') == std::string_view::npos;
  return is_plain ? raw_key == name : undo_escapes(raw_key) == name;
}

Result<std::vector<JsonMember>> read_members(std::string_view text) {
  Scanner scan(text);
  std::vector<JsonMember> members;
  scan.skip_blanks();
  if (!scan.take('{')) return scan.wrong("an object is missing");
  scan.skip_blanks();
  bool more = !scan.take('}');
  while (more) {
    if (members.size() == kJsonMembers) return scan.wrong("too many members");
    JsonMember& member = members.emplace_back();
    const std::size_t begin = scan.at();
    PEGA_TRY(scan.skip_string());
    const std::string_view key = scan.from(begin);
    member.raw_key = key.substr(1, key.size() - 2);
    scan.skip_blanks();
    if (!scan.take(':')) return scan.wrong("a colon is missing");
    scan.skip_blanks();
    const std::size_t value_begin = scan.at();
    PEGA_TRY(scan.skip_value());
    member.value = scan.from(value_begin);
    member.whole = scan.from(begin);
    scan.skip_blanks();
    more = scan.take(',');
    if (!more && !scan.take('}')) return scan.wrong("a comma or an end is missing");
    if (more) scan.skip_blanks();
  }
  scan.skip_blanks();
  if (!scan.ended()) return scan.wrong("more after the object");
  return members;
}

Result<std::vector<std::string_view>> read_elements(std::string_view text) {
  Scanner scan(text);
  std::vector<std::string_view> elements;
  scan.skip_blanks();
  if (!scan.take('[')) return scan.wrong("an array is missing");
  scan.skip_blanks();
  bool more = !scan.take(']');
  while (more) {
    const std::size_t begin = scan.at();
    PEGA_TRY(scan.skip_value());
    elements.push_back(scan.from(begin));
    scan.skip_blanks();
    more = scan.take(',');
    if (!more && !scan.take(']')) return scan.wrong("a comma or an end is missing");
    if (more) scan.skip_blanks();
  }
  scan.skip_blanks();
  if (!scan.ended()) return scan.wrong("more after the array");
  return elements;
}

Result<void> find_members(std::string_view text, const IsWanted& is_wanted,
                          std::vector<JsonCut>& cuts) {
  return MemberFinder(text, is_wanted, cuts).run();
}

const JsonMember* find_member(const std::vector<JsonMember>& members, std::string_view name) {
  for (auto member = members.rbegin(); member != members.rend(); ++member) {
    if (member->is(name)) return &*member;
  }
  return nullptr;
}

std::string text_of(const std::vector<JsonMember>& members, std::string_view name) {
  const JsonMember* const member = find_member(members, name);
  return member == nullptr ? std::string() : json_unescape(member->value);
}

std::string json_unescape(std::string_view literal) {
  if (literal.size() < 2 || literal.front() != '"') return {};
  return undo_escapes(literal.substr(1, literal.size() - 2));
}

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_length(text.substr(i));
    const char c = text[i];
    if (length == 0) {
      out += "\xEF\xBF\xBD";
    } else if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out.append(text.substr(i, length));
    }
    i += length == 0 ? 1 : length;
  }
  out.push_back('"');
  return out;
}

}  // namespace pegaflow::router
