// libFuzzer: any bytes as a body that is split, and as a stream of events.
//
// What our reader takes for JSON another one does too, and the other way round; the bodies for both
// engines are JSON again, and mean what they should. A stream reads the same however it is cut.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/assert.h"
#include "router/json_text.h"
#include "router/split.h"
#include "router/sse.h"

namespace pegaflow {
namespace {

using nlohmann::json;

/// The other reader's opinion; none on what it refuses and RFC 8259 has in its grammar (a number
/// that no double holds, half of a surrogate pair), and on what it lets pass and RFC 8259 does not
/// (a byte order mark, and whatever follows a zero byte).
std::optional<json> other_opinion(const std::string& text) {
  if (text.find('\0') != std::string::npos || text.substr(0, 1) == "\xEF") return std::nullopt;
  try {
    return json::parse(text);
  } catch (const json::out_of_range&) {
    return std::nullopt;
  } catch (const json::parse_error& error) {
    if (std::string_view(error.what()).find("surrogate") != std::string_view::npos) {
      return std::nullopt;
    }
    return json(json::value_t::discarded);
  }
}

void check_split(const std::vector<JsonMember>& members, bool is_anthropic) {
  (void)decide(members, is_anthropic, 1);
  const json to_prefill =
      json::parse(prefill_body(members, is_anthropic, Flow::kStore), nullptr, false);
  PEGA_ASSERT(to_prefill.is_object(), "no JSON for the prefill engine");
  PEGA_ASSERT(to_prefill["max_tokens"] == 1 && to_prefill["stream"] == false, "too much to do");
  PEGA_ASSERT(to_prefill["kv_transfer_params"]["pegaflow"]["save_tail"] == true, "no tail");
}

void check_body(const std::string& text) {
  const auto members = read_members(text);
  if (!members && members.error().detail.find("too many") != std::string::npos) return;
  const std::optional<json> other = other_opinion(text);
  if (!other) return;
  const json& parsed = *other;
  const bool is_object = !parsed.is_discarded() && parsed.is_object();
  PEGA_ASSERT(members.has_value() == is_object, "two opinions");
  if (!members) return;

  for (const bool is_anthropic : {false, true}) check_split(*members, is_anthropic);
  (void)prompt_prefix(*members, 16);
  for (const JsonMember& member : *members) (void)json_unescape(member.value);

  json wanted = parsed;
  wanted.erase("kv_transfer_params");
  PEGA_ASSERT(json::parse(decode_body(text, *members, "")) == wanted, "another body");
  wanted["kv_transfer_params"] = {{"a", 1}};
  PEGA_ASSERT(json::parse(decode_body(text, *members, "{\"a\":1}")) == wanted, "another body");
}

void check_stream(std::string_view bytes, std::size_t step) {
  SseTracker whole;
  const std::size_t all = whole.feed(bytes);
  SseTracker pieces;
  std::size_t last = 0;
  for (std::size_t at = 0; at < bytes.size(); at += step) {
    const std::string_view piece = bytes.substr(at, step);
    const std::size_t ended = pieces.feed(piece);
    PEGA_ASSERT(ended <= piece.size(), "{} of {}", ended, piece.size());
    if (ended > 0) last = at + ended;
  }
  PEGA_ASSERT(all == last, "events end at {} and at {}", all, last);
  PEGA_ASSERT(whole.events() == pieces.events(), "{} {}", whole.events(), pieces.events());
  PEGA_ASSERT(whole.is_finished() == pieces.is_finished(), "finished or not");
}

}  // namespace
}  // namespace pegaflow

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  pegaflow::check_body(text);
  pegaflow::check_stream(text, data[0] % 32 + 1);
  return 0;
}
