#pragma once
/// \file
/// The requirements for every Fabric, whatever its transport. A backend's test includes this file
/// once and names its type: `TEST_CASE_TEMPLATE_INVOKE(fabric_conformance, TcpBackend);`. The type
/// has `static std::unique_ptr<Fabric> make(Fabric::CompletionSink)`.

#include <algorithm>
#include <atomic>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include <doctest/doctest.h>

#include "tests/support/fabric_node.h"
#include "tests/support/seed.h"

namespace pegaflow::testing {

constexpr std::uint64_t kHolderSeed = 1;
constexpr std::uint64_t kReaderSeed = 2;

/// Two nodes; the second reads from the first.
template <typename Backend>
struct FabricPair {
  explicit FabricPair(std::size_t holder_bytes = 4 << 20, std::size_t reader_bytes = 4 << 20)
      : holder(&Backend::make, holder_bytes, kHolderSeed),
        reader(&Backend::make, reader_bytes, kReaderSeed) {
    REQUIRE(holder.fabric->lend(holder.region, late()));
    peer = reader.fabric->connect(holder.fabric->describe()).value();
  }

  [[nodiscard]] Fabric::Chunk chunk(std::uint64_t from, std::uint64_t to,
                                    std::uint64_t size) const {
    return {.remote_region = holder.region,
            .remote_offset = from,
            .local_region = reader.region,
            .local_offset = to,
            .size_bytes = size};
  }
  /// Whether the reader has the holder's bytes in that range.
  [[nodiscard]] bool came(const Fabric::Chunk& chunk) const {
    for (std::uint64_t i = 0; i < chunk.size_bytes; ++i) {
      if (reader.memory[chunk.local_offset + i] !=
          pattern_at(kHolderSeed, chunk.remote_offset + i)) {
        return false;
      }
    }
    return true;
  }
  /// As many contiguous chunks of `size` as fit.
  [[nodiscard]] std::vector<Fabric::Chunk> all_chunks(std::uint64_t size) const {
    std::vector<Fabric::Chunk> chunks;
    for (std::uint64_t at = 0; at + size <= std::min(holder.memory.size(), reader.memory.size());
         at += size) {
      chunks.push_back(chunk(at, at, size));
    }
    return chunks;
  }

  FabricNode holder;
  FabricNode reader;
  Fabric::PeerId peer{};
};

inline bool all_good(const Fabric::Completion& completion) {
  return std::none_of(completion.chunks.begin(), completion.chunks.end(),
                      [](const auto& chunk) { return chunk.has_value(); });
}

/// Pages that are unmapped when this is destroyed.
class MappedPages {
 public:
  explicit MappedPages(std::size_t bytes)
      : bytes_(static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
               bytes) {}
  ~MappedPages() { ::munmap(bytes_.data(), bytes_.size()); }
  MappedPages(const MappedPages&) = delete;
  MappedPages& operator=(const MappedPages&) = delete;
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

TEST_CASE_TEMPLATE_DEFINE("a fabric", Backend, fabric_conformance) {
  using Chunk = Fabric::Chunk;

  SUBCASE("reads the right bytes, at odd offsets and of odd sizes, and touches no others") {
    FabricPair<Backend> pair;
    std::mt19937_64 random(seed());
    std::vector<std::byte> expected = pair.reader.memory;
    for (int round = 0; round < 20; ++round) {
      std::vector<Chunk> chunks;
      std::uint64_t to = random() % 100;
      while (chunks.size() < 60) {
        const std::uint64_t size = 1 + (random() % 3 == 0 ? random() % 300000 : random() % 5000);
        if (to + size > expected.size()) break;
        const std::uint64_t from = random() % (pair.holder.memory.size() - size + 1);
        chunks.push_back(pair.chunk(from, to, size));
        for (std::uint64_t i = 0; i < size; ++i)
          expected[to + i] = pattern_at(kHolderSeed, from + i);
        to += size + random() % 3;
      }

      const Fabric::Completion completion = pair.reader.read(pair.peer, chunks);

      REQUIRE(completion.chunks.size() == chunks.size());
      CHECK_MESSAGE(all_good(completion), completion.detail);
      REQUIRE(pair.reader.memory == expected);
    }
  }

  SUBCASE("serves many batches at once, from several threads and in both directions") {
    FabricPair<Backend> pair;
    REQUIRE(pair.reader.fabric->lend(pair.reader.region, late()));
    const auto back = pair.holder.fabric->connect(pair.reader.fabric->describe());
    REQUIRE(back);
    // The upper half of each memory is read into; the other node reads the lower half.
    constexpr std::uint64_t kHalf = 2 << 20;
    constexpr std::uint64_t kPage = 16 << 10;
    std::atomic<int> refused{0};
    std::vector<std::thread> threads;
    for (const bool forth : {true, false}) {
      for (std::uint64_t part = 0; part < 2; ++part) {
        threads.emplace_back([&, forth, part] {
          FabricNode& me = forth ? pair.reader : pair.holder;
          FabricNode& other = forth ? pair.holder : pair.reader;
          for (std::uint64_t page = part; page < kHalf / kPage; page += 2) {
            Fabric::Batch batch{.ticket = page + 1,
                                .peer = forth ? pair.peer : *back,
                                .priority = page % 3 == 0 ? Fabric::Priority::kBackground
                                                          : Fabric::Priority::kForeground,
                                .deadline = late(),
                                .chunks = {Chunk{.remote_region = other.region,
                                                 .remote_offset = page * kPage,
                                                 .local_region = me.region,
                                                 .local_offset = kHalf + page * kPage,
                                                 .size_bytes = kPage}}};
            if (!me.fabric->read(batch)) ++refused;
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();

    REQUIRE(refused == 0);
    for (std::uint64_t page = 0; page < kHalf / kPage; ++page) {
      CHECK(all_good(pair.reader.inbox.take(page + 1)));
      CHECK(all_good(pair.holder.inbox.take(page + 1)));
    }
    bool right = true;
    for (std::uint64_t i = 0; i < kHalf; ++i) {
      right = right && pair.reader.memory[kHalf + i] == pattern_at(kHolderSeed, i) &&
              pair.holder.memory[kHalf + i] == pattern_at(kReaderSeed, i);
    }
    CHECK(right);
  }

  SUBCASE("reads a region only while its owner lends it") {
    FabricNode holder(&Backend::make, 1 << 16, kHolderSeed);
    FabricNode reader(&Backend::make, 1 << 16, kReaderSeed);
    const auto peer = reader.fabric->connect(holder.fabric->describe()).value();
    const Chunk chunk{
        .remote_region = holder.region, .local_region = reader.region, .size_bytes = 4096};

    CHECK(reader.read(peer, {chunk}).chunks[0] == Errc::kGone);
    REQUIRE(holder.fabric->lend(holder.region, late()));
    CHECK(all_good(reader.read(peer, {chunk})));
    REQUIRE(holder.fabric->lend(holder.region, TimePoint::min()));
    CHECK(reader.read(peer, {chunk}).chunks[0] == Errc::kGone);
    REQUIRE(holder.fabric->lend(holder.region, late()));
    holder.fabric->unregister_region(holder.region);
    CHECK(reader.read(peer, {chunk}).chunks[0] == Errc::kGone);
    CHECK(holder.fabric->lend(holder.region, late()).error().code == Errc::kInvalidArgument);
    CHECK(holder.fabric->describe().regions.empty());
    CHECK(holder.fabric->register_region({}).error().code == Errc::kInvalidArgument);
  }

  SUBCASE("refuses memory of a GPU that it was not created for, and works on") {
    FabricPair<Backend> pair;

    const auto region = pair.holder.fabric->register_region(Memory::cuda(1 << 20, 4096, 3));

    REQUIRE_FALSE(region);
    CHECK(region.error().code == Errc::kRefused);
    CHECK(region.error().detail.find("GPU 3") != std::string::npos);
    CHECK(pair.holder.fabric->describe().regions.size() == 1);
    CHECK(all_good(pair.reader.read(pair.peer, {pair.chunk(0, 0, 4096)})));
  }

  SUBCASE("reports each chunk that is out of range, and reads the others") {
    FabricPair<Backend> pair;
    const std::uint64_t end = pair.holder.memory.size();
    std::vector<Chunk> chunks = {pair.chunk(0, 0, 5000),          pair.chunk(end - 10, 9000, 11),
                                 pair.chunk(end + 1, 9000, 1),    pair.chunk(0, end - 1, 2),
                                 pair.chunk(0, 9000, 0),          pair.chunk(0, 9000, UINT64_MAX),
                                 pair.chunk(UINT64_MAX, 9000, 2), pair.chunk(0, UINT64_MAX, 2),
                                 pair.chunk(end - 10, 7000, 10)};
    chunks.push_back(pair.chunk(0, 9000, 1));
    chunks.back().remote_region = RegionId{77};
    chunks.push_back(pair.chunk(0, 9000, 1));
    chunks.back().local_region = RegionId{77};

    const Fabric::Completion completion = pair.reader.read(pair.peer, chunks);

    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const bool good = i == 0 || i == 8;
      CHECK(completion.chunks[i] ==
            (good ? std::nullopt : std::optional<Errc>(Errc::kInvalidArgument)));
      if (good) CHECK(pair.came(chunks[i]));
    }
    CHECK(pair.reader.memory[9000] == pattern_at(kReaderSeed, 9000));
    CHECK(pair.reader.read(Fabric::PeerId{4711}, {chunks[0]}).chunks[0] == Errc::kInvalidArgument);
    CHECK(
        pair.reader.fabric->read({.ticket = 5, .peer = pair.peer, .deadline = late(), .chunks = {}})
            .error()
            .code == Errc::kInvalidArgument);
  }

  SUBCASE("reads from no other incarnation than the one in the description") {
    FabricPair<Backend> pair;
    FabricDescriptor before = pair.holder.fabric->describe();
    before.incarnation = Id128::random();
    const auto peer = pair.reader.fabric->connect(before);
    REQUIRE(peer);

    const Chunk chunk = pair.chunk(0, 0, 4096);
    // A lane that must unpack an address to respond does not respond to strangers.
    const auto outcome = pair.reader.read(*peer, {chunk}).chunks[0];
    CHECK((outcome == Errc::kGone || outcome == Errc::kPeerLost));

    CHECK(pair.reader.memory[0] == pattern_at(kReaderSeed, 0));
    CHECK(all_good(pair.reader.read(pair.peer, {chunk})));
  }

  SUBCASE("rejects invalid descriptions") {
    FabricPair<Backend> pair;
    FabricDescriptor other = pair.holder.fabric->describe();
    other.backend = "pigeon";
    CHECK(pair.reader.fabric->connect(other).error().code == Errc::kRefused);
    other = pair.holder.fabric->describe();
    other.incarnation = {};
    CHECK(pair.reader.fabric->connect(other).error().code == Errc::kInvalidArgument);
    other = pair.holder.fabric->describe();
    other.address.clear();
    CHECK(pair.reader.fabric->connect(other).error().code == Errc::kInvalidArgument);
  }

  SUBCASE("completes a batch whose deadline has passed") {
    FabricPair<Backend> pair;
    REQUIRE(pair.reader.fabric->read({.ticket = 1,
                                      .peer = pair.peer,
                                      .deadline = std::chrono::steady_clock::now(),
                                      .chunks = pair.all_chunks(64 << 10)}));
    const Fabric::Completion completion = pair.reader.inbox.take(1);
    for (const auto& chunk : completion.chunks) CHECK(chunk == Errc::kTimeout);
    CHECK(all_good(pair.reader.read(pair.peer, {pair.chunk(0, 0, 4096)})));
  }

  SUBCASE("completes all batches when the holder dies in the middle, and reports no wrong bytes") {
    for (int round = 0; round < 5; ++round) {
      FabricPair<Backend> pair;
      const std::vector<Chunk> chunks = pair.all_chunks(64 << 10);
      // Four times the same places, one batch after the other.
      for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) {
        REQUIRE(pair.reader.fabric->read(
            {.ticket = ticket, .peer = pair.peer, .deadline = late(), .chunks = chunks}));
      }
      if (round > 0) (void)pair.reader.inbox.take(1);

      pair.holder.fabric.reset();

      // All of them before a place is checked: they share the places.
      for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) (void)pair.reader.inbox.take(ticket);
      for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) {
        const Fabric::Completion completion = pair.reader.inbox.take(ticket);
        REQUIRE(completion.chunks.size() == chunks.size());
        for (std::size_t i = 0; i < chunks.size(); ++i) {
          const auto& result = completion.chunks[i];
          if (result) CHECK(*result == Errc::kPeerLost);
          if (!result) CHECK(pair.came(chunks[i]));
        }
      }
      CHECK(pair.reader.read(pair.peer, {chunks[0]}).chunks[0] == Errc::kPeerLost);
    }
  }

  SUBCASE("never writes into a place whose batch was cancelled and quiesced") {
    FabricPair<Backend> pair;
    std::mt19937_64 random(seed());
    const std::vector<Chunk> chunks = pair.all_chunks(256 << 10);
    for (std::uint64_t round = 0; round < 30; ++round) {
      const std::uint64_t ticket = 2 * round + 1;
      const std::uint64_t sibling = ticket + 1;
      // The sibling reads the first page, the cancelled batch all others.
      REQUIRE(pair.reader.fabric->read({.ticket = ticket,
                                        .peer = pair.peer,
                                        .deadline = late(),
                                        .chunks = {chunks.begin() + 1, chunks.end()}}));
      REQUIRE(pair.reader.fabric->read(
          {.ticket = sibling, .peer = pair.peer, .deadline = late(), .chunks = {chunks[0]}}));
      for (std::uint64_t i = random() % 200; i > 0; --i) std::this_thread::yield();

      REQUIRE(pair.reader.fabric->cancel(ticket));
      const Fabric::Completion completion = pair.reader.inbox.take(ticket);
      for (std::size_t i = 0; i < completion.chunks.size(); ++i) {
        const auto& result = completion.chunks[i];
        if (result) CHECK(*result == Errc::kCancelled);
        if (!result) CHECK(pair.came(chunks[i + 1]));
      }
      // The places are reused now.
      const std::span<std::byte> places = std::span(pair.reader.memory).subspan(256 << 10);
      std::fill(places.begin(), places.end(), static_cast<std::byte>(round));
      CHECK_MESSAGE(all_good(pair.reader.inbox.take(sibling)), "the sibling is read");
      CHECK(pair.came(chunks[0]));
      CHECK(all_good(pair.reader.read(pair.peer, {pair.chunk(4096, 0, 100000)})));
      CHECK(std::all_of(places.begin(), places.end(),
                        [round](std::byte byte) { return byte == static_cast<std::byte>(round); }));
    }
    REQUIRE(pair.reader.fabric->cancel(987654321));  // An unknown ticket.
  }

  SUBCASE("lets the foreground overtake the background") {
    FabricPair<Backend> pair(32 << 20, 33 << 20);
    bool overtook = false;
    // The background may end before the foreground is requested; then the order proves nothing.
    for (std::uint64_t attempt = 0; attempt < 50 && !overtook; ++attempt) {
      const std::uint64_t background = 2 * attempt + 1;
      const std::uint64_t foreground = background + 1;
      REQUIRE(pair.reader.fabric->read({.ticket = background,
                                        .peer = pair.peer,
                                        .priority = Fabric::Priority::kBackground,
                                        .deadline = late(),
                                        .chunks = pair.all_chunks(64 << 10)}));
      REQUIRE(pair.reader.fabric->read({.ticket = foreground,
                                        .peer = pair.peer,
                                        .deadline = late(),
                                        .chunks = {pair.chunk(0, 32 << 20, 64 << 10)}}));
      CHECK(all_good(pair.reader.inbox.take(background)));
      CHECK(all_good(pair.reader.inbox.take(foreground)));
      overtook = pair.reader.inbox.completed(foreground) < pair.reader.inbox.completed(background);
    }
    CHECK(overtook);
  }

  SUBCASE("touches no memory of a region that was unregistered") {
    for (const bool at_reader : {true, false}) {
      for (std::uint64_t round = 1; round <= 10; ++round) {
        FabricPair<Backend> pair;
        FabricNode& owner = at_reader ? pair.reader : pair.holder;
        auto pages = std::make_unique<MappedPages>(4 << 20);
        fill_pattern(pages->bytes(), kHolderSeed);
        const RegionId region = owner.fabric->register_region(pages->bytes()).value();
        REQUIRE(owner.fabric->lend(region, late()));
        const auto peer = pair.reader.fabric->connect(pair.holder.fabric->describe()).value();
        std::vector<Chunk> chunks = pair.all_chunks(128 << 10);
        for (Chunk& chunk : chunks) (at_reader ? chunk.local_region : chunk.remote_region) = region;
        for (std::uint64_t ticket = 1; ticket <= 3; ++ticket) {
          REQUIRE(pair.reader.fabric->read(
              {.ticket = ticket, .peer = peer, .deadline = late(), .chunks = chunks}));
        }
        if (round % 2 == 0) (void)pair.reader.inbox.take(1);

        owner.fabric->unregister_region(region);
        pages.reset();  // A read or a write would end this process now.

        for (std::uint64_t ticket = 1; ticket <= 3; ++ticket) {
          for (const auto& result : pair.reader.inbox.take(ticket).chunks) {
            if (result) CHECK(*result == (at_reader ? Errc::kCancelled : Errc::kGone));
          }
        }
        owner.fabric->unregister_region(region);  // Again, and one that was never registered.
        owner.fabric->unregister_region(RegionId{4711});
      }
    }
  }

  SUBCASE("reads lent bytes while another region of the same peer ends") {
    for (const bool unregister : {true, false}) {
      for (std::uint64_t round = 1; round <= 10; ++round) {
        FabricPair<Backend> pair;
        std::vector<std::byte> other(4 << 20);
        const RegionId ends = pair.holder.fabric->register_region(other).value();
        REQUIRE(pair.holder.fabric->lend(ends, late()));
        const auto peer = pair.reader.fabric->connect(pair.holder.fabric->describe()).value();
        const std::vector<Chunk> kept = pair.all_chunks(128 << 10);
        std::vector<Chunk> ended = kept;
        for (Chunk& chunk : ended) {
          chunk.remote_region = ends;
          chunk.local_offset = 0;
        }
        // Separate places, so that the kept bytes can be checked.
        std::vector<std::byte> place(128 << 10);
        const RegionId aside = pair.reader.fabric->register_region(place).value();
        for (Chunk& chunk : ended) chunk.local_region = aside;
        for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) {
          REQUIRE(pair.reader.fabric->read({.ticket = ticket,
                                            .peer = peer,
                                            .deadline = late(),
                                            .chunks = ticket % 2 == 0 ? kept : ended}));
        }
        if (round % 2 == 0) (void)pair.reader.inbox.take(1);

        if (unregister) {
          pair.holder.fabric->unregister_region(ends);
        } else {
          REQUIRE(pair.holder.fabric->lend(ends, TimePoint::min()));
        }

        for (std::uint64_t ticket = 1; ticket <= 4; ++ticket) {
          const Fabric::Completion completion = pair.reader.inbox.take(ticket);
          if (ticket % 2 == 0) CHECK_MESSAGE(all_good(completion), completion.detail);
          for (const auto& result : completion.chunks) {
            if (result) CHECK(*result == Errc::kGone);
          }
        }
        CHECK(std::all_of(kept.begin(), kept.end(),
                          [&](const Chunk& chunk) { return pair.came(chunk); }));
      }
    }
  }

  SUBCASE(
      "cancels batches in flight when a peer is disconnected, or when the fabric is destroyed") {
    for (const bool end : {true, false}) {
      FabricPair<Backend> pair;
      const std::vector<Chunk> chunks = pair.all_chunks(64 << 10);
      for (std::uint64_t ticket = 1; ticket <= 3; ++ticket) {
        REQUIRE(pair.reader.fabric->read(
            {.ticket = ticket, .peer = pair.peer, .deadline = late(), .chunks = chunks}));
      }
      if (end) {
        pair.reader.fabric.reset();
        CHECK(pair.reader.inbox.quiesced() == 3);
      } else {
        REQUIRE(pair.reader.fabric->disconnect(pair.peer));
      }
      for (std::uint64_t ticket = 1; ticket <= 3; ++ticket) (void)pair.reader.inbox.take(ticket);
      for (std::uint64_t ticket = 1; ticket <= 3; ++ticket) {
        const Fabric::Completion completion = pair.reader.inbox.take(ticket);
        for (std::size_t i = 0; i < chunks.size(); ++i) {
          const auto& result = completion.chunks[i];
          if (result) CHECK(*result == Errc::kCancelled);
          if (!result) CHECK(pair.came(chunks[i]));
        }
      }
      if (!end) {
        CHECK(pair.reader.read(pair.peer, {chunks[0]}).chunks[0] == Errc::kInvalidArgument);
        REQUIRE(pair.reader.fabric->disconnect(pair.peer));  // Unknown peers are fine.
      }
    }
  }
}

}  // namespace pegaflow::testing
