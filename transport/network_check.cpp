#include "transport/network_check.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace pegaflow::network {
namespace {

struct Piece {
  std::size_t offset;
  std::size_t bytes;
};
/// Pieces as of blocks, of guards, and at odd places; what lies between them is not read.
constexpr std::array kPieces = {Piece{0, 65536},      Piece{131072, 524288}, Piece{720896, 8},
                                Piece{720912, 8},     Piece{724992, 4096},   Piece{786433, 12345},
                                Piece{917504, 131072}};
static_assert(kPieces.back().offset + kPieces.back().bytes == kTestBytes);

/// The pieces of a block's segments, for rates.
constexpr std::size_t kRatePiece = std::size_t{64} << 10;

/// The result of the only batch.
class Outcome {
 public:
  Fabric::CompletionSink sink() {
    return [this](Fabric::Completion&& completion) {
      if (!std::exchange(is_set_, true)) first_.set_value(std::move(completion));
    };
  }
  /// Waits until the batch has completed. One that is late is not quiesced then; the fabric's
  /// destructor waits for that.
  Fabric::Completion take() { return first_.get_future().get(); }

 private:
  bool is_set_ = false;  // Used by the fabric's thread alone.
  std::promise<Fabric::Completion> first_;
};

constexpr std::size_t piece_bytes() {
  std::size_t sum = 0;
  for (const Piece& piece : kPieces) sum += piece.bytes;
  return sum;
}

std::vector<std::byte> random_bytes(std::mt19937_64& random) {
  std::vector<std::byte> bytes(kTestBytes);
  std::ranges::generate(bytes, [&random] { return static_cast<std::byte>(random()); });
  return bytes;
}

}  // namespace

Result<void> check_reads(
    const std::function<Result<std::unique_ptr<Fabric>>(Fabric::CompletionSink)>& make,
    const TestMemory& source, const TestMemory& target, const Clock& clock, Duration patience) {
  std::mt19937_64 random(std::random_device{}());
  const std::vector<std::byte> sent = random_bytes(random);
  std::vector<std::byte> expected = random_bytes(random);
  PEGA_TRY(source.write(sent));
  PEGA_TRY(target.write(expected));

  Outcome outcome;  // Outlives the fabrics.
  PEGA_TRY_LET(const std::unique_ptr<Fabric> owner, make([](Fabric::Completion&&) {}));
  PEGA_TRY_LET(const RegionId from, owner->register_region(source.memory));
  PEGA_TRY(owner->lend(from, TimePoint::max()));
  PEGA_TRY_LET(const std::unique_ptr<Fabric> reader, make(outcome.sink()));
  PEGA_TRY_LET(const RegionId to, reader->register_region(target.memory));
  PEGA_TRY_LET(const Fabric::PeerId peer, reader->connect(owner->describe()));
  Fabric::Batch batch{.ticket = 1, .peer = peer, .deadline = clock.now() + patience, .chunks = {}};
  for (const Piece& piece : kPieces) {
    batch.chunks.push_back({.remote_region = from,
                            .remote_offset = piece.offset,
                            .local_region = to,
                            .local_offset = piece.offset,
                            .size_bytes = piece.bytes});
    std::copy_n(sent.begin() + static_cast<std::ptrdiff_t>(piece.offset), piece.bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(piece.offset));
  }
  PEGA_TRY(reader->read(std::move(batch)));
  const Fabric::Completion done = outcome.take();
  for (const std::optional<Errc>& chunk : done.chunks) {
    if (!chunk) continue;
    return fail(*chunk, "a test read of {} bytes failed: {}", piece_bytes(), done.detail);
  }

  std::vector<std::byte> arrived(kTestBytes);
  PEGA_TRY(target.read(arrived));
  const auto differ = std::ranges::mismatch(arrived, expected);
  if (differ.in1 == arrived.end()) return {};
  return fail(Errc::kCorrupt, "a test read returned other bytes from place {} on",
              differ.in1 - arrived.begin());
}

Result<double> read_rate(
    const std::function<Result<std::unique_ptr<Fabric>>(Fabric::CompletionSink)>& make,
    const Memory& source, const Memory& target, const Clock& clock, Duration patience) {
  std::array<Outcome, 3> outcomes;  // Outlive the fabrics.
  PEGA_TRY_LET(const std::unique_ptr<Fabric> owner, make([](Fabric::Completion&&) {}));
  PEGA_TRY_LET(const RegionId from, owner->register_region(source));
  PEGA_TRY(owner->lend(from, TimePoint::max()));
  PEGA_TRY_LET(const std::unique_ptr<Fabric> reader, make([&outcomes](Fabric::Completion&& done) {
                 outcomes.at(done.ticket).sink()(std::move(done));
               }));
  PEGA_TRY_LET(const RegionId to, reader->register_region(target));
  PEGA_TRY_LET(const Fabric::PeerId peer, reader->connect(owner->describe()));
  double best = 0;
  for (std::size_t ticket = 0; ticket < outcomes.size(); ++ticket) {
    const TimePoint begin = clock.now();
    Fabric::Batch batch{.ticket = ticket, .peer = peer, .deadline = begin + patience, .chunks = {}};
    for (std::size_t at = 0; at < kRateBytes; at += kRatePiece) {
      batch.chunks.push_back({.remote_region = from,
                              .remote_offset = at,
                              .local_region = to,
                              .local_offset = at,
                              .size_bytes = kRatePiece});
    }
    PEGA_TRY(reader->read(std::move(batch)));
    const Fabric::Completion done = outcomes.at(ticket).take();
    const double seconds = std::chrono::duration<double>(clock.now() - begin).count();
    for (const std::optional<Errc>& chunk : done.chunks) {
      if (chunk) return fail(*chunk, "a test read of {} bytes failed: {}", kRateBytes, done.detail);
    }
    if (ticket != 0) best = std::max(best, static_cast<double>(kRateBytes) / seconds);
  }
  return best;
}

}  // namespace pegaflow::network
