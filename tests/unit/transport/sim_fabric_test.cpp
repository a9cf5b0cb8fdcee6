// The simulated lane in virtual time, and the share of four rails' speed that a fabric reaches.
#include "transport/sim/sim_fabric.h"

#include <numeric>
#include <random>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/support/fabric_node.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// Two nodes in virtual time; the second reads from the first.
struct Rig {
  explicit Rig(const SimFabric::Options& reader_options = {}, std::size_t bytes = 1 << 20,
               std::uint64_t chance = seed())
      : network(clock, chance), holder_memory(bytes), reader_memory(bytes) {
    fill_pattern(holder_memory, 1);
    holder = SimFabric::create({}, network, [](Fabric::Completion&&) {}).value();
    reader = SimFabric::create(reader_options, network, [this](Fabric::Completion&& done) {
               if (!done.chunks.empty()) answers.emplace_back(clock.now(), done);
               if (done.quiesced) ++quiesced;
             }).value();
    from = holder->register_region(holder_memory).value();
    to = reader->register_region(reader_memory).value();
    REQUIRE(holder->lend(from, TimePoint::max()));
    connect();
  }
  void connect() {
    peer = reader->connect(holder->describe()).value();
    run_for(milliseconds(1));
  }
  /// A read of `size` bytes from `at` on, to the same place.
  void read(std::uint64_t ticket, std::uint64_t at, std::uint64_t size,
            Duration patience = seconds(100)) {
    REQUIRE(reader->read({.ticket = ticket,
                          .peer = peer,
                          .deadline = clock.now() + patience,
                          .chunks = {{.remote_region = from,
                                      .remote_offset = at,
                                      .local_region = to,
                                      .local_offset = at,
                                      .size_bytes = size}}}));
  }
  /// Runs events one by one, until `time` has passed or `enough` batches are quiesced.
  void run_for(Duration time, std::size_t enough = SIZE_MAX) {
    const TimePoint end = clock.now() + time;
    while (quiesced < enough && network.next_time() <= end) {
      clock.advance(std::max(Duration::zero(), network.next_time() - clock.now()));
      network.run();
    }
    if (quiesced < enough) clock.advance(end - clock.now());
  }

  ManualClock clock;
  SimNetwork network;
  std::vector<std::byte> holder_memory;
  std::vector<std::byte> reader_memory;
  // These outlive the reader, which completes open batches in its destructor.
  std::vector<std::pair<TimePoint, Fabric::Completion>> answers;
  std::size_t quiesced = 0;
  std::unique_ptr<SimFabric> holder;
  std::unique_ptr<SimFabric> reader;
  RegionId from{};
  RegionId to{};
  Fabric::PeerId peer{};
};

/// Returns the time of a read of `batches` of 1 MiB, in eighths, over these rails; `is_warm`: after
/// another one.
Duration pull(const std::vector<double>& rails, std::uint64_t batches, bool is_warm) {
  constexpr std::uint64_t kBatch = 1 << 20;
  constexpr std::uint64_t kMemory = 2 << 20;
  Rig rig({.rails_bytes_per_s = rails, .piece_bytes = kBatch / 8, .window_bytes = 2 * kBatch},
          kMemory);
  if (is_warm) {
    for (std::uint64_t i = 0; i < 8; ++i) rig.read(1000 + i, i % 2 * kBatch, kBatch);
    rig.run_for(seconds(10), 8);
    REQUIRE(rig.quiesced == 8);
    rig.quiesced = 0;
    rig.answers.clear();
  }
  const TimePoint begin = rig.clock.now();
  for (std::uint64_t i = 0; i < batches; ++i) rig.read(i, i % 2 * kBatch, kBatch);
  rig.run_for(seconds(10), batches);
  REQUIRE(rig.quiesced == batches);
  for (const auto& [when, done] : rig.answers) CHECK_FALSE(done.chunks[0]);
  return rig.clock.now() - begin;
}

TEST_SUITE("SimFabric") {
  TEST_CASE("a slow rail costs nothing: four, one at a tenth, are 0.95 of the other three") {
    constexpr double kRate = 1.25e9;
    struct Case {
      std::uint64_t batches;
      bool is_warm;
    };
    for (const Case& each : {Case{1, true}, Case{2, true}, Case{4, true}, Case{8, true},
                             Case{64, true}, Case{4, false}, Case{8, false}, Case{64, false}}) {
      const double three =
          static_cast<double>(pull({kRate, kRate, kRate}, each.batches, each.is_warm).count());
      for (std::size_t slow = 0; slow < 4; ++slow) {
        std::vector<double> rails(4, kRate);
        rails[slow] = kRate / 10;
        const double four = static_cast<double>(pull(rails, each.batches, each.is_warm).count());
        const std::string what = fmt::format("{} batches, {}, rail {} slow: {:.3f}", each.batches,
                                             each.is_warm ? "warm" : "cold", slow, three / four);
        CHECK_MESSAGE(three / four >= 0.95, what);
      }
    }
  }

  TEST_CASE("equal rails are used equally, and together") {
    const double one = static_cast<double>(pull({1e9}, 64, true).count());
    const double four = static_cast<double>(pull({1e9, 1e9, 1e9, 1e9}, 64, true).count());
    CHECK(one / four >= 3.9);
  }

  TEST_CASE("equal seeds give equal sequences of events, different seeds different ones") {
    const auto course = [](std::uint64_t chance) {
      Rig rig({}, 1 << 20, chance);
      rig.network.set_faults({.broken = 0.1, .slow = 0.5, .slowest = milliseconds(10)});
      for (std::uint64_t i = 0; i < 20; ++i) rig.read(i, i * 4096, 4096);
      rig.run_for(seconds(1), 20);
      std::vector<std::pair<Duration, std::uint64_t>> seen;
      for (const auto& [when, done] : rig.answers) {
        seen.emplace_back(when.time_since_epoch(), done.ticket);
      }
      return seen;
    };
    CHECK(course(1) == course(1));
    CHECK(course(1) != course(2));
  }

  TEST_CASE("a batch completes at its deadline, and is quiesced when its card no longer writes") {
    Rig rig;
    rig.network.set_faults({.slow = 1, .slowest = seconds(5)});
    std::size_t late = 0;
    for (std::uint64_t ticket = 1; ticket <= 20; ++ticket) {
      rig.answers.clear();
      rig.quiesced = 0;
      std::fill(rig.reader_memory.begin(), rig.reader_memory.end(), std::byte{0});
      rig.read(ticket, 0, 4096, milliseconds(100));
      rig.run_for(milliseconds(100));
      REQUIRE(rig.answers.size() == 1);
      const std::span place = std::span(rig.reader_memory).first(4096);
      CHECK((rig.quiesced == 0) == rig.reader->is_written(place));
      if (rig.quiesced == 1) continue;
      ++late;
      CHECK(rig.answers[0].second.chunks[0] == Errc::kTimeout);
      CHECK_FALSE(rig.answers[0].second.quiesced);
      rig.run_for(seconds(6), 1);
      CHECK(rig.quiesced == 1);
      CHECK_FALSE(rig.reader->is_written(place));
      CHECK_MESSAGE(rig.reader_memory[4095] == pattern_at(1, 4095), "it was written late");
    }
    CHECK(late >= 10);
    CHECK(rig.reader->batches() == 0);
  }

  TEST_CASE("a cut path ends reads after the stall timeout and heals; a lost peer does not") {
    Rig rig;
    rig.network.cut(*rig.reader, *rig.holder);
    rig.read(1, 0, 4096);
    rig.run_for(seconds(1));
    CHECK(rig.answers.empty());
    rig.run_for(seconds(2));
    REQUIRE(rig.answers.size() == 1);
    CHECK(rig.answers[0].second.chunks[0] == Errc::kPeerLost);

    rig.network.heal(*rig.reader, *rig.holder);
    rig.read(2, 0, 4096);
    rig.run_for(seconds(1));
    CHECK(rig.answers.at(1).second.chunks[0] == Errc::kPeerLost);
    rig.connect();
    rig.read(3, 0, 4096);
    rig.run_for(seconds(1));
    CHECK_FALSE(rig.answers.at(2).second.chunks[0]);
  }

  TEST_CASE(
      "a broken path is dialed again, wrong bytes are reported, and the others not delivered") {
    Rig rig({.rails_bytes_per_s = {10e9, 10e9}});
    rig.network.set_faults({.broken = 0.3, .corrupt = 0.2});
    std::size_t good = 0;
    std::size_t corrupt = 0;
    constexpr std::ptrdiff_t kBytes = 128 << 10;
    for (std::uint64_t ticket = 1; ticket <= 200; ++ticket) {
      rig.answers.clear();
      rig.quiesced = 0;
      std::fill(rig.reader_memory.begin(), rig.reader_memory.end(), std::byte{0});
      rig.read(ticket, 0, kBytes);
      rig.run_for(seconds(1), 1);
      REQUIRE(rig.answers.size() == 1);
      const auto& result = rig.answers[0].second.chunks[0];
      if (result == Errc::kPeerLost) rig.connect();
      if (result) {
        CHECK((*result == Errc::kCorrupt || *result == Errc::kPeerLost));
      } else {
        CHECK(std::equal(rig.reader_memory.begin(), rig.reader_memory.begin() + kBytes,
                         rig.holder_memory.begin()));
      }
      good += result ? 0 : 1;
      corrupt += result == Errc::kCorrupt ? 1 : 0;
    }
    CHECK(good > 20);
    CHECK(corrupt > 5);
  }

  TEST_CASE("the cards of a stopped process continue, and it learns of their results later") {
    Rig rig;
    rig.read(1, 0, 4096, milliseconds(10));
    rig.run_for(Duration(1));
    rig.reader->freeze(seconds(3));
    rig.run_for(seconds(2));
    CHECK(rig.answers.empty());
    CHECK(rig.reader_memory[4095] == pattern_at(1, 4095));
    rig.run_for(seconds(2));
    REQUIRE(rig.answers.size() == 1);
    // Long after its deadline: bytes that have arrived count.
    CHECK_FALSE(rig.answers[0].second.chunks[0]);
  }

  TEST_CASE("invalid options are rejected, and calls beyond the limits return kBusy") {
    ManualClock clock;
    SimNetwork network(clock, 1);
    const auto make = [&network](const SimFabric::Options& options) {
      return SimFabric::create(options, network, [](Fabric::Completion&&) {});
    };
    CHECK(make({.rails_bytes_per_s = {}}).error().code == Errc::kInvalidArgument);
    CHECK(make({.rails_bytes_per_s = {0.5}}).error().code == Errc::kInvalidArgument);
    CHECK(make({.window_bytes = 4096}).error().code == Errc::kInvalidArgument);
    Rig rig({.batches = 1, .chunks = 1, .peers = 1});
    CHECK(rig.reader->connect(rig.holder->describe()).error().code == Errc::kBusy);
    rig.read(1, 0, 4096);
    const Fabric::Chunk chunk{
        .remote_region = rig.from, .local_region = rig.to, .size_bytes = 4096};
    CHECK(
        rig.reader
            ->read({.ticket = 2, .peer = rig.peer, .deadline = TimePoint::max(), .chunks = {chunk}})
            .error()
            .code == Errc::kBusy);
    CHECK(rig.reader
              ->read({.ticket = 2,
                      .peer = rig.peer,
                      .deadline = TimePoint::max(),
                      .chunks = {chunk, chunk}})
              .error()
              .code == Errc::kInvalidArgument);
  }
}

}  // namespace
}  // namespace pegaflow::testing
