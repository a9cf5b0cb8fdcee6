#pragma once
/// \file
/// The ends of events in a stream (text/event-stream).

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pegaflow::router {

/// Tracks the events of a stream that arrives in arbitrary pieces.
///
/// Lines end with LF or CRLF. The tracker keeps only the beginning of the current line.
/// Thread-bound.
class SseTracker {
 public:
  /// Consumes the next bytes. Returns the length of their prefix that ends with the last complete
  /// event: 0 when no event ends in `bytes`.
  std::size_t feed(std::string_view bytes);

  /// Complete events, without comments and the closing event.
  [[nodiscard]] std::uint64_t events() const noexcept { return events_; }
  /// Whether the closing event has arrived: `data: [DONE]`, or Anthropic's `message_stop`.
  [[nodiscard]] bool is_finished() const noexcept { return finished_; }

 private:
  void end_line();

  std::string line_;             // At most kKept bytes of the current line.
  bool line_is_empty_ = true;    // Describes the current line; a CR does not count.
  bool event_has_data_ = false;  // A data line has arrived since the last event.
  bool event_is_last_ = false;
  bool at_event_end_ = false;  // The line that just ended was blank.
  bool finished_ = false;
  std::uint64_t events_ = 0;
};

}  // namespace pegaflow::router
