/// \file
/// `pegaflow-perf cells`: copies of blocks that tensor-parallel sizes share.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <numeric>
#include <random>

#include "base/page_layout.h"
#include "base/units.h"
#include "harness/engine_memory.h"
#include "harness/pattern.h"
#include "harness/server_process.h"
#include "harness/wire_client.h"
#include "perf/lib/command.h"
#include "perf/lib/cores.h"
#include "perf/lib/inbox.h"
#include "perf/lib/keys.h"
#include "transport/host/host_device.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
using Direction = Device::Direction;

constexpr std::uint64_t kRoundBytes = std::uint64_t{128} << 20;
/// Engines of 1, 2 and 4 ranks share blocks of four cells.
constexpr std::uint64_t kGrid = 4;
constexpr std::uint64_t kTokens = 16;
/// The layouts of one device: that of an engine without pegaflow.tp_sizes, and that of cells.
constexpr std::size_t kWhole = 0;
constexpr std::size_t kCells = 1;

struct CellsOptions {
  CommonOptions common;
  std::int64_t layers = 32;
  std::int64_t rounds = 20;
  std::int64_t threads = 1;
  std::vector<std::string> pieces = {"16kb", "8kb", "4kb", "2kb", "1kb", "512", "256"};
};

/// The blocks of one rank.
struct Shape {
  std::uint64_t layers = 0;
  std::uint64_t piece_bytes = 0;  ///< The heads of a cell, of one token if `by_token`, else of all.
  bool by_token = false;          ///< Tokens outside of heads (NHD); else heads outside (HND).
  std::uint64_t own = 0;          ///< The cells of the rank.

  [[nodiscard]] std::uint64_t rows() const { return by_token ? kTokens : 1; }
  [[nodiscard]] std::uint64_t layer_bytes() const { return rows() * own * piece_bytes; }
  [[nodiscard]] std::uint64_t page_bytes() const { return layers * layer_bytes(); }
  [[nodiscard]] std::string text() const {
    return fmt::format("pieces of {}, {}, TP {}", format_bytes(piece_bytes),
                       by_token ? "NHD" : "HND", kGrid / own);
  }
};

/// The page of a rank's cells: cell after cell, in each the layers one after the other.
Result<PageLayout> cut_into_cells(const PageLayout& whole, const Shape& shape) {
  std::vector<Segment> pieces;
  for (std::uint64_t cell = 0; cell < shape.own; ++cell) {
    for (const Segment& layer : whole.segments()) {
      for (std::uint64_t row = 0; row < shape.rows(); ++row) {
        pieces.push_back({.base = layer.base + (row * shape.own + cell) * shape.piece_bytes,
                          .block_stride_bytes = layer.block_stride_bytes,
                          .size_bytes = shape.piece_bytes});
      }
    }
  }
  return PageLayout::create(std::move(pieces), whole.block_count());
}

/// Where a byte of a page of cells lies in the page without cells.
std::uint64_t place_in_whole(const Shape& shape, std::uint64_t place) {
  const std::uint64_t inside = place % shape.piece_bytes;
  std::uint64_t piece = place / shape.piece_bytes;
  const std::uint64_t row = piece % shape.rows();
  piece /= shape.rows();
  const std::uint64_t layer = piece % shape.layers;
  const std::uint64_t cell = piece / shape.layers;
  return layer * shape.layer_bytes() + (row * shape.own + cell) * shape.piece_bytes + inside;
}

/// One rank on a server of its own, whose device has both layouts of the same memory.
class CellsBench {
 public:
  static Result<std::unique_ptr<CellsBench>> start(const CellsOptions& options,
                                                   const Shape& shape) {
    PEGA_TRY_LET(harness::ServerProcess server,
                 harness::ServerProcess::start({.program = options.common.server,
                                                .pool_size = std::to_string(2 * kRoundBytes)}));
    PEGA_TRY_LET(harness::EngineMemory memory,
                 harness::EngineMemory::create({.segments = shape.layers,
                                                .segment_bytes = shape.layer_bytes(),
                                                .blocks = kRoundBytes / shape.page_bytes()}));
    PEGA_TRY_LET(PageLayout cells, cut_into_cells(memory.layout(), shape));
    // Both sides of a round use the same cores. Created after the server, which may use any.
    PEGA_TRY_LET(SameCores cores, SameCores::create());
    PEGA_TRY_LET(auto device, HostDevice::create({.threads = static_cast<int>(options.threads)}));
    return std::unique_ptr<CellsBench>(new CellsBench(options, shape, std::move(server),
                                                      std::move(memory), std::move(cells),
                                                      std::move(cores), std::move(device)));
  }

  Result<void> measure(std::vector<Figure>& figures) {
    kj::AsyncIoContext io = kj::setupAsyncIo();
    PEGA_TRY_LET(const auto client, harness::WireClient::connect(io, server_.socket_path()));
    PEGA_TRY_LET(const harness::WireClient::Registered registered,
                 client->register_worker("cells", shape_.page_bytes(), order_.size()));
    PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
                 client->reserve(client->job(1), KeySource(seed_).range(0, order_.size())));
    PEGA_TRY_LET(const harness::Mapping pool,
                 harness::Mapping::shared(registered.pool.get(), registered.pool_bytes));
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (slots.at(i) == harness::WireClient::kNoFrame)
        return fail(Errc::kOutOfCapacity, "no slot for block {}", i);
      copies_.push_back({.block = order_[i], .pool_offset = slots[i] * kSlotAlignment});
    }
    const PageLayout layouts[] = {memory_.layout(), cells_layout_};
    PEGA_TRY(device_->attach(layouts, pool.bytes(),
                             [this](Device::Completion&& done) { inbox_.put(std::move(done)); }));
    Result<void> held = check(pool.bytes());
    for (const Direction direction : {Direction::kSave, Direction::kLoad}) {
      if (held) held = measure_direction(direction, figures);
    }
    device_->detach();  // Before the pool is unmapped, also after an error.
    if (held) held = client->abandon(client->job(1));
    return held;
  }

 private:
  CellsBench(const CellsOptions& options, const Shape& shape, harness::ServerProcess server,
             harness::EngineMemory memory, PageLayout cells, SameCores cores,
             std::unique_ptr<HostDevice> device)
      : options_(options),
        shape_(shape),
        seed_(static_cast<std::uint64_t>(options.common.seed)),
        server_(std::move(server)),
        memory_(std::move(memory)),
        cells_layout_(std::move(cells)),
        cores_(std::move(cores)),
        device_(std::move(device)),
        order_(memory_.blocks()) {
    std::iota(order_.begin(), order_.end(), 0U);
    // As after hours of serving.
    std::shuffle(order_.begin(), order_.end(), std::mt19937_64(seed_));
  }

  /// GB/s of one batch of all blocks.
  Result<double> rate(Direction direction, std::size_t layout) {
    Device::Batch batch{
        .ticket = ++ticket_, .direction = direction, .copies = copies_, .layout = layout};
    const auto begin = Clock::now();
    PEGA_TRY(device_->submit(std::move(batch)));
    const Device::Completion done = inbox_.take();
    const std::chrono::duration<double> took = Clock::now() - begin;
    if (done.error) return tl::unexpected<Error>(*done.error);
    return static_cast<double>(copies_.size() * shape_.page_bytes()) / took.count() / 1e9;
  }

  /// Saves all blocks cell by cell, and loads them into other blocks; compares every byte. Also the
  /// warm-up: it touches every page of both sides.
  Result<void> check(std::span<std::byte> pool) {
    memory_.fill_all(seed_);
    PEGA_TRY(rate(Direction::kSave, kCells));
    std::vector<std::byte> whole(shape_.page_bytes());
    for (const Device::Copy& copy : copies_) {
      memory_.copy(copy.block, whole.data(), Direction::kSave);
      for (std::uint64_t at = 0; at < whole.size(); at += shape_.piece_bytes) {
        if (std::memcmp(pool.data() + copy.pool_offset + at,
                        whole.data() + place_in_whole(shape_, at), shape_.piece_bytes) != 0) {
          return fail(Errc::kCorrupt, "byte {} of the page of block {} is not of its cell", at,
                      copy.block);
        }
      }
    }
    memory_.clear();
    PEGA_TRY(rate(Direction::kLoad, kCells));
    for (const Device::Copy& copy : copies_) {
      if (!memory_.holds(copy.block, harness::pattern_seed(seed_, copy.block))) {
        return fail(Errc::kCorrupt, "block {} is not what was saved", copy.block);
      }
    }
    return rate(Direction::kSave, kWhole).map([](double) {});
  }

  Result<void> measure_direction(Direction direction, std::vector<Figure>& figures) {
    Rounds rounds;
    for (std::int64_t round = 0; round < options_.rounds; ++round) {
      PEGA_TRY(
          cores_.use(static_cast<std::size_t>(round), static_cast<std::size_t>(options_.threads)));
      // The side that comes first alternates.
      const std::size_t first = round / 2 % 2 == 0 ? kCells : kWhole;
      PEGA_TRY_LET(const double one, rate(direction, first));
      PEGA_TRY_LET(const double other, rate(direction, 1 - first));
      if (first == kCells) rounds.add({one}, {other});
      if (first == kWhole) rounds.add({other}, {one});
    }
    PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
    const bool is_large = shape_.piece_bytes >= 8192;
    const double small_target = shape_.piece_bytes >= 2048 ? 0.9 : 0.85;
    figures.push_back(
        {.run =
             fmt::format("{}, {}", direction == Direction::kSave ? "save" : "load", shape_.text()),
         .params = {{"piece_bytes", static_cast<std::int64_t>(shape_.piece_bytes)},
                    {"page_bytes", static_cast<std::int64_t>(shape_.page_bytes())},
                    {"tp", static_cast<std::int64_t>(kGrid / shape_.own)},
                    {"layout", shape_.by_token ? "NHD" : "HND"},
                    {"threads", options_.threads}},
         .figure = compared.figure.median(),
         .unit = "GB/s",
         .bound = compared.bound.median(),
         .bound_name = "without cells",
         .side = Side::kAtLeast,
         .target = is_large ? 0.97 : small_target,
         .n = compared.rounds,
         .spread = fmt::format("ratio {:.2f} to {:.2f}", compared.ratio_low, compared.ratio_high)});
    return {};
  }

  const CellsOptions& options_;
  const Shape shape_;
  const std::uint64_t seed_;
  const harness::ServerProcess server_;
  harness::EngineMemory memory_;
  const PageLayout cells_layout_;
  const SameCores cores_;
  const std::unique_ptr<HostDevice> device_;
  std::vector<std::uint32_t> order_;  ///< The blocks, shuffled.
  std::vector<Device::Copy> copies_;
  Inbox inbox_;
  std::uint64_t ticket_ = 0;
};

}  // namespace

Outcome run_cells(int argc, const char* const* argv) {
  CellsOptions options;
  OptionTable table("pegaflow-perf cells",
                    "Measures copies of blocks that engines of 1, 2 and 4 ranks share "
                    "(pegaflow.tp_sizes), beside those of engines of one size, between the same "
                    "memory and the pool of a real server.");
  declare(table, options.common);
  table.integer("layers", options.layers, 1, 256, "Layers of a block.");
  table.integer("rounds", options.rounds, 1, 1000, "Rounds of 128 MiB for each case.");
  table.integer("threads", options.threads, 1, 64, "Copy threads of the engine.");
  table.list("pieces", options.pieces,
             "Sizes of the pieces of a block, powers of two from 64 to 64kb: the heads of one cell "
             "and layer, from 2kb on of all 16 tokens (HND), below of each token (NHD).");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  std::vector<std::uint64_t> sizes;
  for (const std::string& text : options.pieces) {
    PEGA_TRY_LET(const std::uint64_t bytes, parse_bytes(text));
    if (bytes < 64 || bytes > 65536 || (bytes & (bytes - 1)) != 0) {
      return fail(Errc::kInvalidArgument, "--pieces: {} is not a power of two from 64 to 64kb",
                  text);
    }
    sizes.push_back(bytes);
  }
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  std::vector<Figure> figures;
  for (const std::uint64_t bytes : sizes) {
    // A rank of size 4 has one cell, whose heads lie together as without the option.
    for (const std::uint64_t own : {kGrid, kGrid / 2}) {
      const Shape shape{.layers = static_cast<std::uint64_t>(options.layers),
                        .piece_bytes = bytes,
                        .by_token = bytes < 2048,
                        .own = own};
      if (shape.page_bytes() > kRoundBytes / 2 || shape.page_bytes() % kSlotAlignment != 0) {
        return fail(Errc::kInvalidArgument,
                    "--layers {}, --pieces {}: a page of {} bytes is not a multiple of 4 KiB of at "
                    "most 64 MiB",
                    options.layers, bytes, shape.page_bytes());
      }
      progress(shape.text());
      PEGA_TRY_LET(const auto bench, CellsBench::start(options, shape));
      PEGA_TRY(bench->measure(figures));
    }
  }
  return Report{.title = "pegaflow-perf cells",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
