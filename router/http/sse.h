#pragma once
/// \file
/// Where events of a stream end (text/event-stream).

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pegaflow::router {

/// Follows a stream of events, in whatever pieces it comes.
///
/// Lines end with LF or CRLF; nothing of the stream is kept but the beginning of the present line.
/// Thread-bound.
class SseTracker {
 public:
  /// Takes the next bytes. Returns how many of them, from the first on, complete events: 0 when no
  /// event ends in `bytes`.
  std::size_t feed(std::string_view bytes);

  /// Events that ended, comments and the closing one left out.
  [[nodiscard]] std::uint64_t events() const noexcept { return events_; }
  /// Whether the stream's own end came: `data: [DONE]`, or Anthropic's `message_stop`.
  [[nodiscard]] bool is_finished() const noexcept { return finished_; }

 private:
  void end_line();

  std::string line_;             // At most kKept bytes of the line that has not ended.
  bool line_is_empty_ = true;    // Of the present line; a CR does not count.
  bool event_has_data_ = false;  // A data line since the last event.
  bool event_is_last_ = false;
  bool at_event_end_ = false;  // The line that just ended was the blank one.
  bool finished_ = false;
  std::uint64_t events_ = 0;
};

}  // namespace pegaflow::router
