// The cost of a chunk for the requesting thread, beside its bytes: planning and posting.
//
// Times are CPU seconds of this thread, because a shared machine preempts it. Neither lane moves
// bytes here: rails are simulated, and the owner on the socket lane lends nothing, so that each
// response is one header. System calls are reported separately.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <time.h>

#include <fmt/core.h>

#include "base/assert.h"
#include "base/clock.h"
#include "transport/dealer.h"
#include "transport/tcp/limits.h"
#include "transport/tcp/reader.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow {
namespace {

constexpr Fabric::PeerId kPeer{1};
constexpr std::uint64_t kRegionBytes = std::uint64_t{256} << 20;
constexpr std::uint64_t kChunks = 64;
constexpr std::uint64_t kBatches = 200;  ///< Per sample.
constexpr int kSamples = 40;
constexpr double kBound = 1;  ///< Microseconds per chunk.

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

/// User and kernel time of this thread so far, in ticks: meaningful only over a second or more.
struct Ticks {
  double user_us = 0;
  double system_us = 0;
};
Ticks ticks() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  const auto us = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_usec);
  };
  return {.user_us = us(usage.ru_utime), .system_us = us(usage.ru_stime)};
}

/// A batch of scattered chunks, like slots of a pool that has been in use for long.
Fabric::Batch batch_of(std::uint64_t ticket, std::uint64_t chunk_bytes, TimePoint deadline,
                       RegionId theirs, RegionId ours) {
  Fabric::Batch batch{.ticket = ticket, .peer = kPeer, .deadline = deadline, .chunks = {}};
  for (std::uint64_t i = 0; i < kChunks; ++i) {
    const std::uint64_t at = (ticket * 37 + i * 2) % (kRegionBytes / chunk_bytes) * chunk_bytes;
    batch.chunks.push_back({.remote_region = theirs,
                            .remote_offset = at,
                            .local_region = ours,
                            .local_offset = at,
                            .size_bytes = chunk_bytes});
  }
  return batch;
}

/// `ours`: the share of the samples that is compared with the bound.
void print(const std::string& name, std::vector<double> samples, double ours = 1) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double part) {
    return samples[static_cast<std::size_t>(part * static_cast<double>(samples.size() - 1))];
  };
  fmt::print("{:54} {:6.3f} us  bound {:.1f}  ratio {:5.2f}  n={} p10 {:.3f} p90 {:.3f}\n", name,
             at(0.5) * ours, kBound, at(0.5) * ours / kBound, samples.size(), at(0.1) * ours,
             at(0.9) * ours);
}

// ---- RDMA: the cost of the rails' dealer

void deal_batches(std::size_t rails, std::uint64_t chunk_bytes) {
  constexpr RegionId kOurs{0};
  constexpr RegionId kTheirs{7};
  const SteadyClock clock;
  rails::Dealer dealer({.rails = rails}, clock);
  dealer.add_region(kOurs, kRegionBytes);
  dealer.add_peer(kPeer, {{.region = kTheirs, .size_bytes = kRegionBytes}});
  // The window of a rail in the lane.
  const auto room = [](Fabric::PeerId) {
    return rails::Dealer::Room{.operations = 192,
                               .bytes = std::uint64_t{16} << 20,
                               .background_operations = 48,
                               .background_bytes = std::uint64_t{4} << 20};
  };
  std::uint64_t ticket = 0;
  std::vector<double> samples;
  for (int sample = 0; sample < kSamples; ++sample) {
    double spent = 0;
    for (std::uint64_t i = 0; i < kBatches; ++i) {
      Fabric::Batch batch =
          batch_of(++ticket, chunk_bytes, clock.now() + std::chrono::seconds(1), kTheirs, kOurs);
      const double begin = cpu_us();
      dealer.add(std::move(batch));
      for (std::size_t rail = 0; dealer.has_work() || !dealer.has_completions();
           rail = (rail + 1) % rails) {
        std::vector<rails::Outcome> outcomes;
        for (rails::Operation& operation : dealer.deal(rail, room)) {
          outcomes.push_back({.operation = operation, .detail = {}});
        }
        dealer.ended(outcomes);
      }
      const auto completions = dealer.take_completions();
      spent += cpu_us() - begin;
      PEGA_ASSERT(completions.size() == 1 && completions[0].ticket == ticket &&
                      std::none_of(completions[0].chunks.begin(), completions[0].chunks.end(),
                                   [](const auto& error) { return error.has_value(); }),
                  "batch {} failed", ticket);
    }
    samples.push_back(spent / static_cast<double>(kBatches * kChunks));
  }
  print(fmt::format("rails: deal and end a chunk of {} KiB, {} rails", chunk_bytes >> 10, rails),
        std::move(samples));
}

// ---- sockets: requests and responses, with their system calls

void ask_holder(std::uint64_t chunk_bytes) {
  const SteadyClock clock;
  std::vector<std::byte> theirs(kRegionBytes);
  std::vector<std::byte> ours(kRegionBytes);
  const auto holder = TcpFabric::create({}, clock, [](Fabric::Completion&&) {}).value();
  const RegionId not_lent = holder->register_region(theirs).value();
  const FabricDescriptor there = holder->describe();

  auto poller = tcp::Poller::create().value();
  tcp::RegionTable regions;
  const RegionId place = regions.add(ours).value();
  std::uint64_t answered = 0;
  const TcpFabric::Options lane;
  tcp::Reader reader({.connections = lane.connections,
                      .piece_bytes = lane.piece_bytes,
                      .window = {.bytes = lane.window_bytes},
                      .connect_timeout = lane.connect_timeout,
                      .stall_timeout = lane.stall_timeout,
                      .user_timeout = lane.stall_timeout},
                     poller, regions, clock, [&](Fabric::Completion&& done) {
                       for (const auto& chunk : done.chunks) {
                         PEGA_ASSERT(chunk == Errc::kGone, "a chunk without a lease was served");
                       }
                       answered += done.chunks.size();
                     });
  const std::string_view address(reinterpret_cast<const char*>(there.address.data()),
                                 there.address.size());
  reader.connect(kPeer, {.address = tcp::SocketAddress::parse(address).value(),
                         .incarnation = there.incarnation,
                         .regions = there.regions});
  std::uint64_t ticket = 0;
  std::vector<double> samples;
  const Ticks before = ticks();
  for (int sample = 0; sample <= kSamples; ++sample) {
    answered = 0;
    double spent = 0;
    for (std::uint64_t i = 0; i < kBatches; ++i) {
      Fabric::Batch batch =
          batch_of(++ticket, chunk_bytes, clock.now() + std::chrono::minutes(1), not_lent, place);
      const double begin = cpu_us();
      reader.read(std::move(batch));
      while (answered < (i + 1) * kChunks) {
        for (const epoll_event& event : poller.wait(100)) {
          reader.on_event(event.data.u64, event.events);
        }
        reader.on_time(clock.now());
      }
      spent += cpu_us() - begin;
    }
    // The first sample dials.
    if (sample > 0) samples.push_back(spent / static_cast<double>(kBatches * kChunks));
  }
  const Ticks after = ticks();
  reader.finish();
  const double user = after.user_us - before.user_us;
  const double share = user / (user + after.system_us - before.system_us);
  print(fmt::format("sockets: request a chunk of {} KiB, receive the response", chunk_bytes >> 10),
        std::move(samples), share);
  fmt::print("    and {:.1f} times as much in system calls\n", 1 / share - 1);
}

}  // namespace
}  // namespace pegaflow

int main() {
  for (const std::uint64_t chunk_bytes : {std::uint64_t{64} << 10, std::uint64_t{256} << 10}) {
    for (const std::size_t rails : {std::size_t{1}, std::size_t{4}}) {
      pegaflow::deal_batches(rails, chunk_bytes);
    }
    pegaflow::ask_holder(chunk_bytes);
  }
  return 0;
}
