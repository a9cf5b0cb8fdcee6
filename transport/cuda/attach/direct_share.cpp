#include "transport/cuda/attach/direct_share.h"

#include <algorithm>
#include <vector>

#include "transport/cuda/cuda_error.h"

namespace pegaflow::cuda {
namespace {

constexpr std::uint64_t kMostBytes = 64 << 20;  ///< Per round: 1.2 ms at 55 GB/s.
constexpr std::uint64_t kLeastBytes = 8 << 20;
constexpr int kRounds = 4;  ///< The first warms up.

/// Two events that measure the time of the work queued between them.
class Stopwatch {
 public:
  explicit Stopwatch(Driver& driver) : driver_(driver) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    for (const EventHandle event : {begin_, end_}) {
      if (event != nullptr) driver_.destroy_event(event);
    }
  }
  Result<void> make() {
    PEGA_TRY(check(driver_, driver_.create_event(true, begin_), "create an event"));
    return check(driver_, driver_.create_event(true, end_), "create an event");
  }
  /// Returns the milliseconds that the copies take behind `ahead`. The others are submitted while
  /// that one is copied, so that the time of the calls is not measured.
  Result<float> time(const Transfer& ahead, std::span<const Transfer> transfers, Stream stream) {
    PEGA_TRY(check(driver_, driver_.copy(Direction::kToDevice, &ahead, 1, stream),
                   "copy from the pool"));
    PEGA_TRY(check(driver_, driver_.record(begin_, stream), "record an event"));
    PEGA_TRY(check(driver_,
                   driver_.copy(Direction::kToDevice, transfers.data(), transfers.size(), stream),
                   "copy from the pool"));
    PEGA_TRY(check(driver_, driver_.record(end_, stream), "record an event"));
    PEGA_TRY(check(driver_, driver_.synchronize(stream), "wait for a copy"));
    float milliseconds = 0;
    PEGA_TRY(check(driver_, driver_.elapsed_ms(begin_, end_, milliseconds), "time a copy"));
    return milliseconds;
  }

 private:
  Driver& driver_;
  EventHandle begin_ = nullptr;
  EventHandle end_ = nullptr;
};

}  // namespace

Result<std::optional<double>> measure_direct_share(
    Driver& driver, Stream stream, std::span<std::byte> pool, std::uint64_t register_bytes,
    DeviceAddress staging, std::uint64_t staging_bytes, std::uint64_t segment_bytes) {
  // Within one range, since no copy may cross from one into the next.
  const std::uint64_t range = std::min<std::uint64_t>(pool.size(), register_bytes);
  const std::uint64_t bytes =
      std::min({kMostBytes, range, staging_bytes}) / segment_bytes * segment_bytes;
  if (bytes < kLeastBytes) return std::optional<double>();

  const std::uint64_t count = bytes / segment_bytes;
  const std::uint64_t places = range / segment_bytes;
  std::vector<Transfer> scattered;
  for (std::uint64_t i = 0; i < count; ++i) {
    // Far apart, each place once: a stride of places / count, from the back.
    const std::uint64_t place = (count - 1 - i) * (places / count);
    scattered.push_back(
        {pool.data() + place * segment_bytes, staging + i * segment_bytes, segment_bytes});
  }
  const Transfer whole{pool.data(), staging, bytes};
  Stopwatch watch(driver);
  PEGA_TRY(watch.make());
  float best_whole = 0;
  float best_scattered = 0;
  for (int round = 0; round < kRounds; ++round) {
    PEGA_TRY_LET(const float one, watch.time(whole, {&whole, 1}, stream));
    PEGA_TRY_LET(const float many, watch.time(whole, scattered, stream));
    if (round == 0) continue;
    best_whole = best_whole == 0 ? one : std::min(best_whole, one);
    best_scattered = best_scattered == 0 ? many : std::min(best_scattered, many);
  }
  if (!(best_scattered > 0)) return std::optional<double>();
  return std::optional<double>(static_cast<double>(best_whole) /
                               static_cast<double>(best_scattered));
}

}  // namespace pegaflow::cuda
