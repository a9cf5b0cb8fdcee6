#pragma once
/// \file
/// Tests of cards at the start: do they read what was written, and how fast?

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "base/clock.h"
#include "base/error.h"
#include "transport/fabric.h"
#include "transport/memory.h"

namespace pegaflow::network {

/// Memory for check_reads(), of the kind that is to be read.
struct TestMemory {
  Memory memory{};  ///< kTestBytes.
  /// Copy all of its bytes, and return when that is done.
  std::function<Result<void>(std::span<const std::byte>)> write{};
  std::function<Result<void>(std::span<std::byte>)> read{};
};

inline constexpr std::size_t kTestBytes = std::size_t{1} << 20;

/// Reads parts of `source` into `target` through two fabrics of this process, and compares the
/// bytes: a card may refuse to read a GPU, or return other bytes. Each call of `make` opens a
/// fabric over the card that is tested. Both memories are empty of others' data; they hold random
/// bytes afterwards. Errors: those of `make` and of Fabric::register_region(); kTimeout, kPeerLost
/// or another code of a chunk when the card does not read; kCorrupt when it reads other bytes or
/// writes elsewhere.
Result<void> check_reads(
    const std::function<Result<std::unique_ptr<Fabric>>(Fabric::CompletionSink)>& make,
    const TestMemory& source, const TestMemory& target, const Clock& clock, Duration patience);

/// The bytes of one read of read_rate().
inline constexpr std::size_t kRateBytes = std::size_t{8} << 20;

/// How many bytes a second are read from `source` into `target`, both of kRateBytes, in pieces as
/// of blocks: the better one of two reads, behind one that is not measured. `make` as above, for
/// all cards that will be used. Errors: those of `make` and of Fabric::register_region(), and the
/// code of a chunk that fails.
Result<double> read_rate(
    const std::function<Result<std::unique_ptr<Fabric>>(Fabric::CompletionSink)>& make,
    const Memory& source, const Memory& target, const Clock& clock, Duration patience);

}  // namespace pegaflow::network
