// The test of a card at the start, with cards that fail it.
#include "transport/network_check.h"

#include <algorithm>
#include <ranges>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/patience.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow::testing {
namespace {

enum class Fault : std::uint8_t { kNone, kOtherByte, kRefusesReads, kRefusesMemory, kHangs };

/// Memory of the test; the copies of the second one fail when the test says so.
struct Bytes {
  std::vector<std::byte> bytes = std::vector<std::byte>(network::kTestBytes);
  Result<void> copied{};

  network::TestMemory memory() {
    return {.memory = bytes,
            .write =
                [this](std::span<const std::byte> from) {
                  std::ranges::copy(from, bytes.begin());
                  return copied;
                },
            .read =
                [this](std::span<std::byte> to) {
                  std::ranges::copy(bytes, to.begin());
                  return copied;
                }};
  }
};

/// Forwards to a fabric over sockets, as a card with a fault.
class FaultyFabric final : public Fabric {
 public:
  FaultyFabric(std::unique_ptr<Fabric> fabric, Fault fault)
      : fabric_(std::move(fabric)), fault_(fault) {}
  Result<RegionId> register_region(const Memory& memory) override {
    if (fault_ == Fault::kRefusesMemory) return fail(Errc::kRefused, "no dma-buf");
    return fabric_->register_region(memory);
  }
  Result<void> lend(RegionId region, TimePoint until) override {
    // Of memory that is not lent no byte is read.
    return fault_ == Fault::kRefusesReads ? Result<void>() : fabric_->lend(region, until);
  }
  void unregister_region(RegionId region) override { fabric_->unregister_region(region); }
  [[nodiscard]] FabricDescriptor describe() const override { return fabric_->describe(); }
  Result<PeerId> connect(const FabricDescriptor& peer) override { return fabric_->connect(peer); }
  Result<void> disconnect(PeerId peer) override { return fabric_->disconnect(peer); }
  Result<void> read(Batch batch) override { return fabric_->read(std::move(batch)); }
  Result<void> cancel(std::uint64_t ticket) override { return fabric_->cancel(ticket); }

 private:
  const std::unique_ptr<Fabric> fabric_;
  const Fault fault_;
};

struct Card {
  Fault fault = Fault::kNone;
  Bytes source{};
  Bytes target{};
  std::size_t place = 0;  ///< The byte that the fault changes.

  Result<void> check() {
    static const SteadyClock clock;
    const auto make = [this](Fabric::CompletionSink sink) -> Result<std::unique_ptr<Fabric>> {
      auto faulty = [this, sink = std::move(sink)](Fabric::Completion&& completion) {
        if (fault == Fault::kOtherByte) {
          target.bytes[place] ^= std::byte{1};
        }
        // A card that hangs is late, and may write to the memory for as long as it likes.
        if (fault == Fault::kHangs) {
          for (std::optional<Errc>& chunk : completion.chunks) chunk = Errc::kTimeout;
          completion.quiesced = false;
        }
        sink(std::move(completion));
      };
      PEGA_TRY_LET(auto fabric, TcpFabric::create({}, clock, std::move(faulty)));
      return std::make_unique<FaultyFabric>(std::move(fabric), fault);
    };
    return network::check_reads(make, source.memory(), target.memory(), clock, kHang);
  }
  Error error() {
    const Result<void> result = check();
    REQUIRE_FALSE(result);
    return result.error();
  }
};

TEST_SUITE("check_reads") {
  TEST_CASE("a card that reads what was written passes, each time with other bytes") {
    Card card;
    CHECK(card.check());
    const std::vector<std::byte> first = card.source.bytes;
    CHECK(card.check());
    CHECK(card.source.bytes != first);
    // It has read most of them.
    const auto same = std::ranges::count_if(
        std::views::iota(std::size_t{0}, first.size()),
        [&](std::size_t i) { return card.target.bytes[i] == card.source.bytes[i]; });
    CHECK(same > static_cast<std::ptrdiff_t>(first.size() / 2));
  }

  TEST_CASE("a wrong byte in what was read fails it, and so does one beside it") {
    // The first and the last byte that are read, one of a piece of 8, and bytes between pieces.
    for (const std::size_t place :
         {std::size_t{0}, network::kTestBytes - 1, std::size_t{720912}, std::size_t{720904},
          std::size_t{65536}, std::size_t{786432}, std::size_t{917503}}) {
      CAPTURE(place);
      Card card{.fault = Fault::kOtherByte, .place = place};
      const Error error = card.error();
      CHECK(error.code == Errc::kCorrupt);
      CHECK(error.detail ==
            fmt::format("a test read returned other bytes from place {} on", place));
    }
  }

  TEST_CASE("a card that refuses to read the memory, or to register it, fails with its reason") {
    Card reads{.fault = Fault::kRefusesReads};
    const Error gone = reads.error();
    CHECK(gone.code == Errc::kGone);
    CHECK(gone.detail.starts_with("a test read of 737353 bytes failed: "));
    Card memory{.fault = Fault::kRefusesMemory};
    CHECK(memory.error().detail == "no dma-buf");
  }

  TEST_CASE("a card that never ends its reads fails it in time") {
    Card card{.fault = Fault::kHangs};
    CHECK(card.error().code == Errc::kTimeout);
  }

  TEST_CASE("memory that cannot be filled or read fails it") {
    Card card;
    card.target.copied = fail(Errc::kIo, "the GPU is broken");
    CHECK(card.error().code == Errc::kIo);
    card.target.copied = {};
    card.source.copied = fail(Errc::kIo, "the GPU is broken");
    CHECK(card.error().detail == "the GPU is broken");
  }
}

TEST_SUITE("read_rate") {
  Result<double> rate_of(Fault fault, std::vector<std::byte> & target) {
    static const SteadyClock clock;
    std::vector<std::byte> source(network::kRateBytes, std::byte{7});
    target.assign(network::kRateBytes, std::byte{0});
    const auto make = [&](Fabric::CompletionSink sink) -> Result<std::unique_ptr<Fabric>> {
      PEGA_TRY_LET(auto fabric, TcpFabric::create({}, clock, std::move(sink)));
      return std::make_unique<FaultyFabric>(std::move(fabric), fault);
    };
    return network::read_rate(make, std::span(source), std::span(target), clock, kHang);
  }

  TEST_CASE("a rate is that of reads of all bytes") {
    std::vector<std::byte> target;
    CHECK(rate_of(Fault::kNone, target).value() > 0);
    CHECK(std::ranges::count(target, std::byte{7}) ==
          static_cast<std::ptrdiff_t>(network::kRateBytes));
  }

  TEST_CASE("a card that does not read has no rate") {
    std::vector<std::byte> target;
    CHECK(rate_of(Fault::kRefusesReads, target).error().code == Errc::kGone);
    CHECK(rate_of(Fault::kRefusesMemory, target).error().code == Errc::kRefused);
  }
}

}  // namespace
}  // namespace pegaflow::testing
