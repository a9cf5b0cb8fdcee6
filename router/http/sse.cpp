#include "router/http/sse.h"

namespace pegaflow::router {
namespace {

constexpr std::size_t kKept = 64;  // Enough for the lines that the tracker inspects.

bool begins(std::string_view text, std::string_view with) {
  return text.substr(0, with.size()) == with;
}

/// The value of a field, without the optional blank before it.
std::string_view after_colon(std::string_view line, std::size_t name) {
  line.remove_prefix(name + 1);
  if (!line.empty() && line.front() == ' ') line.remove_prefix(1);
  return line;
}

}  // namespace

void SseTracker::end_line() {
  at_event_end_ = line_is_empty_;
  if (line_is_empty_) {
    if (event_has_data_ && !event_is_last_) ++events_;
    if (event_is_last_) finished_ = true;
    event_has_data_ = event_is_last_ = false;
  } else {
    std::string_view line = line_;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (begins(line, "data:")) {
      event_has_data_ = true;
      if (after_colon(line, 4) == "[DONE]") event_is_last_ = true;
    } else if (begins(line, "event:") && after_colon(line, 5) == "message_stop") {
      event_is_last_ = true;
    }
  }
  line_.clear();
  line_is_empty_ = true;
}

std::size_t SseTracker::feed(std::string_view bytes) {
  std::size_t complete = 0;
  std::size_t at = 0;
  while (at < bytes.size()) {
    const std::size_t end = bytes.find('\n', at);
    const std::string_view piece =
        bytes.substr(at, (end == std::string_view::npos ? bytes.size() : end) - at);
    if (line_.size() < kKept) line_.append(piece.substr(0, kKept - line_.size()));
    line_is_empty_ = line_.empty() || line_ == "\r";
    if (end == std::string_view::npos) break;
    end_line();
    at = end + 1;
    if (at_event_end_) complete = at;
  }
  return complete;
}

}  // namespace pegaflow::router
