// libFuzzer: any order of inputs to the state machine of an event stream, and any text as
// addresses.
//
// Whatever comes, the stream holds no more than its limits, asks for replays only where it may, and
// accepts nothing once it is gone.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/assert.h"
#include "index/events/kv_event_sources.h"
#include "index/events/source.h"

namespace pegaflow::index {
namespace {

constexpr std::size_t kHeld = 8;

KvBatch batch_of(std::uint8_t content) {
  KvBatch batch;
  batch.timestamp = static_cast<double>(content >> 2U);
  batch.wire_bytes = 10;
  batch.undecodable = content % 32 == 31;
  batch.hashes = {content};
  KvEvent event;
  event.kind = static_cast<EventKind>(content % 3);
  event.group_kind = static_cast<GroupKind>(content / 3 % 3);
  event.group = content % 4;
  event.block_size = 16;
  event.hashes = batch.hashes;
  batch.events.push_back(event);
  return batch;
}

class Driver {
 public:
  explicit Driver(std::uint8_t choice)
      : can_replay_(choice % 2 == 0),
        source_({.can_replay = can_replay_, .held_batches = kHeld, .window = 4}) {}

  void input(std::uint8_t what, std::uint8_t number, std::uint8_t content) {
    switch (what % 12) {
      case 0:
        return source_.connected(now_);
      case 1:
        return source_.disconnected(now_);
      case 2:
      case 3:
      case 4:
        return source_.live(number % 32, batch_of(content), now_);
      case 5:
      case 6:
        return source_.replayed(ticket_, number % 32, batch_of(content), now_);
      case 7:
        return source_.replay_ended(ticket_, content % 2 == 0, now_);
      case 8:
        return source_.overflowed(now_);
      case 9:
        return source_.answered(number * 16U, content * 16U, number * 8U, now_);
      case 10:
        now_ += std::chrono::milliseconds(content * 20);
        return source_.tick(now_);
      default:
        if (content == 255) return source_.remove(now_);
        return source_.restarted("a new id", now_);
    }
  }

  void take() {
    const bool was_gone = source_.trust() == Trust::kGone && was_gone_;
    for (SourceAction action; source_.next(action);) {
      PEGA_ASSERT(!was_gone, "an action of a source that is gone");
      PEGA_ASSERT(action.kind != SourceAction::Kind::kReplay || can_replay_, "no replay endpoint");
      if (action.kind == SourceAction::Kind::kReplay) ticket_ = action.ticket;
      for (const KvEvent& event : action.batch.events) {
        PEGA_ASSERT(event.medium == Medium::kGpu && event.group_kind != GroupKind::kOther ||
                        event.kind == EventKind::kCleared,
                    "an event that must not be indexed");
      }
    }
    was_gone_ = source_.trust() == Trust::kGone;
    PEGA_ASSERT(source_.held_batches() <= kHeld, "{} batches held", source_.held_batches());
    PEGA_ASSERT((source_.held_batches() == 0) == (source_.held_bytes() == 0), "bytes of nothing");
    PEGA_ASSERT(!source_.reason().empty(), "a state without a reason");
    PEGA_ASSERT(source_.held_batches() == 0 || source_.next_deadline(), "batches wait for nothing");
  }

 private:
  bool can_replay_;
  Source source_;
  TimePoint now_{};
  std::uint64_t ticket_ = 0;
  bool was_gone_ = false;
};

void run(std::span<const std::uint8_t> input) {
  if (input.empty()) return;
  if (input[0] >= 0xf0) {
    const auto text = input.subspan(1);
    const std::string_view json(reinterpret_cast<const char*>(text.data()), text.size());
    const auto sources = input[0] >= 0xf8 ? parse_server_info(json, "10.0.0.7")
                                          : parse_kv_event_sources(json, "10.0.0.7");
    if (!sources) return;
    for (const EventAddress& address : *sources) {
      PEGA_ASSERT(address.endpoint.starts_with("tcp://10.0.0.7:"), "dials {}", address.endpoint);
      PEGA_ASSERT(check_event_endpoint(address.endpoint), "{}", address.endpoint);
    }
    return;
  }
  Driver driver(input[0]);
  for (std::size_t i = 1; i + 2 < input.size(); i += 3) {
    driver.input(input[i], input[i + 1], input[i + 2]);
    driver.take();
  }
}

}  // namespace
}  // namespace pegaflow::index

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pegaflow::index::run(std::span(data, size));
  return 0;
}
