// libFuzzer: any bytes at either end of a connection of the socket lane.
//
// The first byte chooses: which end (1), whether a valid greeting goes before (2), whether the rest
// arrives in two parts (4), at a reader whether a valid response's header goes before (8). A reader
// changes no byte outside the slots of its requests; an owner sends only whole responses out of the
// regions that it lends.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include <sys/socket.h>

#include "base/assert.h"
#include "base/clock.h"
#include "transport/checksum.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/requester.h"
#include "transport/tcp/responder.h"
#include "transport/tcp/wire.h"

namespace pegaflow::tcp {
namespace {

constexpr Id128 kHolder{11, 22};
constexpr std::size_t kPlaces = 3;
constexpr std::size_t kPlaceBytes = 40;
constexpr std::size_t kGuardBytes = 64;

struct Pair {
  Pair() {
    int fds[2] = {-1, -1};
    PEGA_ASSERT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0,
                "socketpair");
    ours = UniqueFd(fds[0]);
    played = UniqueFd(fds[1]);
  }
  void send(std::span<const std::byte> bytes) const {
    (void)::send(played.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  template <typename Message>
  void send_message(const Message& message) const {
    send(std::as_bytes(std::span(&message, 1)));
  }
  UniqueFd ours;
  UniqueFd played;
};

/// Sends the input in one part or two, and takes each.
template <typename Take>
void feed(const Pair& pair, std::span<const std::byte> input, bool in_two_parts, Take&& take) {
  const std::size_t first = in_two_parts ? input.size() / 2 : input.size();
  pair.send(input.first(first));
  if (!take()) return;
  pair.send(input.subspan(first));
  take();
}

void at_reader(std::uint8_t how, std::span<const std::byte> input) {
  Pair pair;
  std::vector<std::byte> memory(kGuardBytes + kPlaces * (kPlaceBytes + kGuardBytes), std::byte{7});
  const auto place = [&](std::size_t i) {
    return std::span(memory).subspan(kGuardBytes + i * (kPlaceBytes + kGuardBytes), kPlaceBytes);
  };
  SteadyClock clock;
  Requester requester(std::move(pair.ours), kHolder, {.pieces = 4}, clock.now());
  PEGA_ASSERT(requester.send_requests(), "greet");
  for (std::uint32_t i = 0; i < kPlaces; ++i) {
    requester.request(
        {.operation = {.batch = 1, .first_chunk = i, .size_bytes = kPlaceBytes}, .place = place(i)},
        clock.now());
  }
  std::array<int, kPlaces> ended{};
  const Requester::Ended on_ended = [&](const Piece& piece, std::optional<Errc>) {
    ++ended.at(piece.operation.first_chunk);
    // From now on the slot belongs to another read.
    std::fill(piece.place.begin(), piece.place.end(), std::byte{7});
  };
  if ((how & 2U) != 0) {
    pair.send_message(Welcome{.holder_high = kHolder.high, .holder_low = kHolder.low});
    if ((how & 8U) != 0) {
      pair.send_message(
          Response{.request_id = 1, .slot = 0, .size_bytes = kPlaceBytes, .checksum = 1});
    }
  }
  feed(pair, input, (how & 4U) != 0, [&] {
    for (int round = 0; round < 4; ++round) {
      if (!requester.receive(clock.now(), on_ended)) return false;
    }
    return true;
  });
  for (const Piece& piece : requester.close()) {
    ++ended.at(piece.operation.first_chunk);
    std::fill(piece.place.begin(), piece.place.end(), std::byte{7});
  }
  for (const int times : ended) PEGA_ASSERT(times == 1, "a piece ended {} times", times);
  for (const std::byte byte : memory) PEGA_ASSERT(byte == std::byte{7}, "a byte was changed");
}

void at_holder(std::uint8_t how, std::span<const std::byte> input) {
  Pair pair;
  static std::vector<std::byte> memory(1 << 16, std::byte{9});
  static std::vector<std::byte> secret(1 << 10, std::byte{8});
  static SteadyClock clock;
  static RegionTable* const regions = [] {
    auto* const table = new RegionTable();
    const RegionId lent = table->add(memory).value();
    PEGA_ASSERT(table->add(secret), "a second region");
    PEGA_ASSERT(table->lend(lent, TimePoint::max()), "lend");
    return table;
  }();
  Responder responder(std::move(pair.ours), *regions, kHolder, clock);
  if ((how & 2U) != 0)
    pair.send_message(Hello{.wanted_high = kHolder.high, .wanted_low = kHolder.low});
  std::vector<std::byte> sent;
  feed(pair, input, (how & 4U) != 0, [&] {
    for (int round = 0; round < 50; ++round) {
      const bool open = static_cast<bool>(responder.serve());
      std::array<std::byte, 65536> some{};
      for (ssize_t got = 1; got > 0;) {
        got = ::recv(pair.played.get(), some.data(), some.size(), 0);
        if (got > 0) sent.insert(sent.end(), some.begin(), some.begin() + got);
      }
      if (!open) return false;
      if (!responder.wants_to_send()) break;
    }
    return true;
  });

  std::span<const std::byte> rest(sent);
  if (rest.empty()) return;
  PEGA_ASSERT(rest.size() >= sizeof(Welcome) && message_of<Welcome>(rest).magic == kMagic,
              "no welcome");
  rest = rest.subspan(sizeof(Welcome));
  while (rest.size() >= sizeof(Response)) {
    const auto response = message_of<Response>(rest);
    PEGA_ASSERT(response.magic == kMagic, "an invalid response");
    PEGA_ASSERT(response.verdict == Verdict::kGood || response.size_bytes == 0,
                "bytes of a rejection");
    rest = rest.subspan(sizeof(Response));
    if (response.size_bytes > rest.size()) return;  // More than the iterations above have fetched.
    const auto bytes = rest.first(response.size_bytes);
    PEGA_ASSERT(bytes.empty() || response.checksum == PageChecksum::of(bytes), "a wrong checksum");
    for (const std::byte byte : bytes)
      PEGA_ASSERT(byte == std::byte{9}, "a byte outside of the lent region");
    rest = rest.subspan(bytes.size());
  }
}

}  // namespace
}  // namespace pegaflow::tcp

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const auto input = std::as_bytes(std::span(data + 1, size - 1));
  if ((data[0] & 1U) != 0) {
    pegaflow::tcp::at_reader(data[0], input);
  } else {
    pegaflow::tcp::at_holder(data[0], input);
  }
  return 0;
}
