/// \file
/// `pegaflow-perf hold-pins`: a client with many pins that its parent kills.

#include <charconv>
#include <string_view>

#include <unistd.h>

#include "harness/wire_client.h"
#include "perf/lib/command.h"
#include "perf/lib/keys.h"
#include "perf/lib/workload.h"

namespace pegaflow::perf {
namespace {

Result<std::uint64_t> number(std::string_view text) {
  std::uint64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) {
    return fail(Errc::kInvalidArgument, "'{}' is not a number", text);
  }
  return value;
}

}  // namespace

Result<void> run_hold_pins(std::span<const char* const> arguments) {
  if (arguments.size() != 4) {
    return fail(Errc::kInvalidArgument, "hold-pins: the arguments are SOCKET SEED PINS DESCRIPTOR");
  }
  PEGA_TRY_LET(const std::uint64_t seed, number(arguments[1]));
  PEGA_TRY_LET(const std::uint64_t pins, number(arguments[2]));
  PEGA_TRY_LET(const std::uint64_t descriptor, number(arguments[3]));
  kj::AsyncIoContext io = kj::setupAsyncIo();
  PEGA_TRY_LET(const auto client, harness::WireClient::connect(io, arguments[0]));
  PEGA_TRY(client->register_worker("pins", kSmallPageBytes, 1024));
  const KeySource keys(seed);
  constexpr std::uint64_t kKeysPerClaim = 8192;
  for (std::uint64_t first = 0; first < pins; first += kKeysPerClaim) {
    const std::uint64_t count = std::min(kKeysPerClaim, pins - first);
    const Id128 token = Id128::random();
    PEGA_TRY_LET(const harness::WireClient::Found claimed,
                 client->claim(token, keys.range(first, count)));
    if (claimed.blocks != count) {
      return fail(Errc::kInternal, "{} of {} blocks were claimed", claimed.blocks, count);
    }
    PEGA_TRY(client->open_each(token, claimed.blocks, first));
  }
  if (::write(static_cast<int>(descriptor), "h", 1) != 1)
    return fail_errno(errno, "report to the parent");
  while (true) ::pause();
}

}  // namespace pegaflow::perf
