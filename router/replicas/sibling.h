#pragma once
/// \file
/// Another router of the fleet, as this one sees it.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/id128.h"
#include "index/placement/record.h"
#include "router/replicas/replica_message.h"

namespace pegaflow::router {

/// Bytes that may pass in a time: `rate` a second, and `burst` at once. A value.
class ByteBudget {
 public:
  ByteBudget(double rate, double burst) : rate_(rate), burst_(burst), left_(burst) {}

  /// False when the bytes exceed what is left.
  bool take(std::size_t bytes, TimePoint now) {
    const double passed = std::chrono::duration<double>(now - at_).count();
    left_ = std::min(burst_, left_ + std::max(0.0, passed) * rate_);
    at_ = now;
    if (static_cast<double>(bytes) > left_) return false;
    left_ -= static_cast<double>(bytes);
    return true;
  }

 private:
  double rate_;
  double burst_;
  double left_;
  TimePoint at_{};
};

/// One address of --replicas. Owned by ReplicaSet; thread-bound.
struct Sibling {
  enum class State : std::uint8_t {
    kConnecting,  ///< No message came yet.
    kLive,
    kSilent,     ///< It was live, and its heartbeats have stopped.
    kSelf,       ///< The address is this router's own.
    kDuplicate,  ///< Another address leads to the same router.
  };

  std::string address;         ///< HOST:PORT.
  index::RouterId number = 0;  ///< Its name in the accounts of the placement.
  State state = State::kConnecting;
  std::string reason = "no message came yet";
  ReplicaHeader last{};  ///< Header of the last message that was used.
  TimePoint heard{};     ///< When it came.
  std::uint16_t http_port = 0;
  std::uint64_t texts = 0;  ///< Texts that it knows.

  std::uint64_t messages = 0;  ///< Used.
  std::uint64_t lost = 0;      ///< Numbers that never came.
  std::array<std::uint64_t, kRefusals> refused{};
  std::uint64_t placements = 0;
  std::uint64_t learned = 0;          ///< Texts.
  std::uint64_t unlearned = 0;        ///< Texts beyond the rate.
  std::uint64_t unknown_engines = 0;  ///< Records about engines that this router does not have.
  /// The texts that it may teach: learning takes time of the router's only thread.
  ByteBudget budget{8e6, 16e6};
};

[[nodiscard]] constexpr std::string_view to_string(Sibling::State state) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"connecting", "live", "silent", "self",
                                                      "duplicate"};
  return kNames[static_cast<std::size_t>(state)];
}

}  // namespace pegaflow::router
