#include "router/body/usage.h"

#include <charconv>
#include <initializer_list>
#include <string>
#include <vector>

#include "router/http/json_text.h"

namespace pegaflow::router {
namespace {

/// Longer objects are no usage.
constexpr std::size_t kMaxBytes = 4096;

std::optional<std::uint32_t> number_of(const std::vector<JsonMember>& members,
                                       std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) {
    const JsonMember* const member = find_member(members, name);
    if (member == nullptr) continue;
    std::uint32_t value = 0;
    const char* const end = member->value.data() + member->value.size();
    const auto [stop, error] = std::from_chars(member->value.data(), end, value);
    if (error == std::errc() && stop == end) return value;
  }
  return std::nullopt;
}

/// The object at the beginning of `text`; empty when it does not end. A usage has no braces in
/// strings.
std::string_view object_of(std::string_view text) {
  std::size_t depth = 0;
  for (std::size_t i = 0; i < text.size() && i < kMaxBytes; ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return text.substr(0, i + 1);
  }
  return {};
}

}  // namespace

std::optional<Usage> find_usage(std::string_view piece) {
  constexpr std::string_view kName = "\"usage\":";
  const std::size_t at = piece.rfind(kName);
  if (at == std::string_view::npos) return std::nullopt;
  piece.remove_prefix(at + kName.size());
  const std::size_t begin = piece.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos || piece[begin] != '{') return std::nullopt;
  const auto members = read_members(object_of(piece.substr(begin)));
  if (!members) return std::nullopt;
  const auto prompt = number_of(*members, {"prompt_tokens", "input_tokens"});
  if (!prompt) return std::nullopt;
  Usage usage{.prompt_tokens = *prompt,
              .cached_tokens = number_of(*members, {"cache_read_input_tokens"})};
  for (const std::string_view name : {"prompt_tokens_details", "input_tokens_details"}) {
    const JsonMember* const details = find_member(*members, name);
    if (details == nullptr || details->value.front() != '{') continue;
    const auto inner = read_members(details->value);
    if (inner) usage.cached_tokens = number_of(*inner, {"cached_tokens"});
  }
  return usage;
}

}  // namespace pegaflow::router
