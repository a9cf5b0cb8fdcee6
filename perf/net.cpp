/// \file
/// `pegaflow-perf net`: how fast pages come from another node, beside plain sockets.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <iostream>
#include <mutex>
#include <optional>
#include <utility>

#include "base/units.h"
#include "perf/command.h"
#include "perf/engine_memory.h"
#include "perf/net_holder.h"
#include "perf/net_plain.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow::perf {
namespace {

using SteadyTime = std::chrono::steady_clock;

/// Larger than the caches of the cores, as a pool is.
constexpr std::uint64_t kLeastMemory = std::uint64_t{64} << 20;
/// What a round moves at least: some tenth of a second on an ordinary machine.
constexpr std::uint64_t kRoundBytes = std::uint64_t{256} << 20;
constexpr std::size_t kLatencySamples = 200;
constexpr Duration kPatience = std::chrono::seconds(30);

struct NetOptions {
  CommonOptions common;
  std::string listen;
  std::int64_t connections = 4;
  std::int64_t batch = 64;
  std::int64_t depth = 2;
  std::int64_t rounds = 10;
  std::uint64_t piece_bytes = TcpFabric::Options().piece_bytes;
  std::uint64_t window_bytes = TcpFabric::Options().window_bytes;
  bool check = false;
  std::vector<std::string> pages = {"64kb", "2mb"};
};

/// What has completed and was not taken yet.
class Inbox {
 public:
  void put(Fabric::Completion&& completion) {
    const std::lock_guard lock(mutex_);
    completions_.push_back(std::move(completion));
    changed_.notify_one();
  }
  Fabric::Completion take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !completions_.empty(); });
    Fabric::Completion first = std::move(completions_.front());
    completions_.erase(completions_.begin());
    return first;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Fabric::Completion> completions_;
};

double gigabytes_per_second(std::uint64_t bytes, Duration took) {
  return static_cast<double>(bytes) / std::chrono::duration<double>(took).count() / 1e9;
}

double microseconds(Duration took) { return std::chrono::duration<double>(took).count() * 1e6; }

/// The end that measures: a lane and plain sockets to the same holder.
class Puller {
 public:
  static Result<std::unique_ptr<Puller>> connect(const std::string& address,
                                                 const NetOptions& options,
                                                 std::uint64_t memory_bytes) {
    std::unique_ptr<Puller> puller(new Puller(options));
    PEGA_TRY_LET(puller->memory_, Mapping::anonymous(memory_bytes));
    PEGA_TRY_LET(puller->expected_, Mapping::anonymous(memory_bytes));
    const auto seed = static_cast<std::uint64_t>(options.common.seed);
    fill_net_pattern(puller->expected_->bytes(), seed);
    PEGA_TRY_LET(NetConnection connection,
                 ask_holder(address, {.memory_bytes = memory_bytes, .seed = seed}));
    puller->connection_ = std::move(connection);
    PEGA_TRY_LET(const tcp::SocketAddress near,
                 tcp::SocketAddress::near_end(puller->connection_->socket.get()));
    const auto connections = static_cast<unsigned>(options.connections);
    PEGA_TRY_LET(puller->fabric_,
                 TcpFabric::create({.listen = to_string(near.with_port(0)),
                                    .connections = connections,
                                    .piece_bytes = options.piece_bytes,
                                    .window_bytes = options.window_bytes},
                                   puller->clock_, [at = puller.get()](Fabric::Completion&& done) {
                                     at->inbox_.put(std::move(done));
                                   }));
    PEGA_TRY_LET(puller->region_, puller->fabric_->register_region(puller->memory_->bytes()));
    PEGA_TRY_LET(puller->peer_, puller->fabric_->connect(puller->connection_->offer.fabric));
    const std::string& plain = puller->connection_->offer.plain;
    PEGA_TRY_LET(puller->plain_, PlainReceiver::connect(plain, connections));
    PEGA_TRY_LET(puller->one_plain_, PlainReceiver::connect(plain, 1));
    return puller;
  }

  /// Pulls `bytes` in pages, `batch` of them at a time and `depth` batches under way, from `at` on.
  Result<Duration> pull(std::uint64_t bytes, std::uint64_t page_bytes, std::uint64_t batch,
                        std::uint64_t depth, std::uint64_t at = 0) {
    const std::uint64_t batches = bytes / (page_bytes * batch);
    const auto begin = SteadyTime::now();
    std::uint64_t asked = 0;
    for (std::uint64_t done = 0; done < batches; ++done) {
      while (asked < batches && asked < done + depth) {
        PEGA_TRY(ask(at + asked * page_bytes * batch, page_bytes, batch));
        ++asked;
      }
      PEGA_TRY(take());
    }
    return SteadyTime::now() - begin;
  }
  Result<Duration> plain(std::uint64_t bytes) {
    const auto begin = SteadyTime::now();
    PEGA_TRY(plain_->receive(memory_->bytes(), bytes));
    return SteadyTime::now() - begin;
  }
  /// One page through one plain socket, from a place to the same one.
  Result<Duration> plain_page(std::uint64_t page_bytes, std::uint64_t at) {
    const auto begin = SteadyTime::now();
    PEGA_TRY(one_plain_->receive(memory_->bytes().subspan(at % memory_bytes(), page_bytes),
                                 page_bytes, at));
    return SteadyTime::now() - begin;
  }

  void clear() { std::memset(memory_->bytes().data(), 0, memory_->bytes().size()); }
  /// Errors: kCorrupt when the first `bytes` are not those of the holder.
  [[nodiscard]] Result<void> compare(std::uint64_t bytes) const {
    if (std::memcmp(memory_->bytes().data(), expected_->bytes().data(), bytes) == 0) return {};
    const auto differ =
        std::mismatch(memory_->bytes().begin(), memory_->bytes().end(), expected_->bytes().begin());
    return fail(Errc::kCorrupt, "byte {} of the memory is not the holder's",
                differ.first - memory_->bytes().begin());
  }
  [[nodiscard]] std::uint64_t memory_bytes() const { return memory_->bytes().size(); }

 private:
  explicit Puller(const NetOptions& options) : options_(options) {}

  Result<void> ask(std::uint64_t at, std::uint64_t page_bytes, std::uint64_t batch) {
    std::vector<Fabric::Chunk> chunks(batch);
    for (Fabric::Chunk& chunk : chunks) {
      const std::uint64_t offset = at % memory_bytes();
      chunk = {.remote_region = connection_->offer.fabric.regions.front().region,
               .remote_offset = offset,
               .local_region = region_,
               .local_offset = offset,
               .size_bytes = page_bytes};
      at += page_bytes;
    }
    return fabric_->read({.ticket = ++last_ticket_,
                          .peer = peer_,
                          .deadline = clock_.now() + kPatience,
                          .chunks = std::move(chunks)});
  }
  Result<void> take() {
    const Fabric::Completion done = inbox_.take();
    for (const std::optional<Errc>& chunk : done.chunks) {
      if (chunk) return fail(*chunk, "a page did not come: {}", done.detail);
    }
    return {};
  }

  NetOptions options_;
  SteadyClock clock_;
  Inbox inbox_;
  std::optional<Mapping> memory_;
  std::optional<Mapping> expected_;
  std::optional<NetConnection> connection_;
  std::unique_ptr<TcpFabric> fabric_;  // Ends before the memory that it writes to.
  RegionId region_{};
  Fabric::PeerId peer_{};
  std::uint64_t last_ticket_ = 0;
  std::optional<PlainReceiver> plain_;
  std::optional<PlainReceiver> one_plain_;
};

std::string spread_of(const Rounds::Comparison& compared) {
  return fmt::format("ratio {:.2f} to {:.2f} (p10 to p90 of the rounds)", compared.ratio_low,
                     compared.ratio_high);
}

Result<void> measure_rate(Puller& puller, const NetOptions& options, std::uint64_t page_bytes,
                          Params params, std::vector<Figure>& figures) {
  const auto batch = static_cast<std::uint64_t>(options.batch);
  const std::uint64_t batch_bytes = page_bytes * batch;
  // Whole batches, and at least as many as are under way at once.
  const std::uint64_t bytes =
      batch_bytes * std::max<std::uint64_t>(kRoundBytes / batch_bytes,
                                            2 * static_cast<std::uint64_t>(options.depth));
  const auto ours = [&](bool check) -> Result<double> {
    if (check) puller.clear();
    PEGA_TRY_LET(const Duration took,
                 puller.pull(bytes, page_bytes, batch, static_cast<std::uint64_t>(options.depth)));
    if (check) PEGA_TRY(puller.compare(std::min(bytes, puller.memory_bytes())));
    return gigabytes_per_second(bytes, took);
  };
  const auto bound = [&]() -> Result<double> {
    PEGA_TRY_LET(const Duration took, puller.plain(bytes));
    return gigabytes_per_second(bytes, took);
  };
  PEGA_TRY(ours(true));  // Also warms both sides up.
  PEGA_TRY(bound());
  Rounds rounds;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    // In turns, and each first as often as the other.
    double figure = 0;
    double beside = 0;
    for (const bool first : {round % 2 == 0, round % 2 != 0}) {
      if (first) {
        PEGA_TRY_LET(figure, ours(options.check));
      } else {
        PEGA_TRY_LET(beside, bound());
      }
    }
    rounds.add({figure}, {beside});
  }
  PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
  params.emplace_back("batch", options.batch);
  params.emplace_back("depth", options.depth);
  std::optional<double> reach;
  if (page_bytes >= 64 << 10) reach = 0.8;
  if (page_bytes >= 2 << 20) reach = 0.9;
  figures.push_back({.run = fmt::format("get, pages of {} in batches of {}",
                                        format_bytes(page_bytes), options.batch),
                     .params = std::move(params),
                     .figure = compared.figure.median(),
                     .unit = "GB/s",
                     .bound = compared.bound.median(),
                     .bound_name = "as many plain sockets",
                     .side = Reach::kAtLeast,
                     .reach = reach,
                     .n = compared.rounds,
                     .spread = spread_of(compared)});
  return {};
}

Result<void> measure_latency(Puller& puller, const NetOptions& options, std::uint64_t page_bytes,
                             Params params, std::vector<Figure>& figures) {
  Rounds rounds;
  const std::size_t each = std::max<std::size_t>(
      kLatencySamples / static_cast<std::size_t>(options.rounds), std::size_t{1});
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    std::vector<double> figure;
    std::vector<double> bound;
    // The same pages for both, and others in the next round: neither finds its own in a cache.
    const auto place = [&](std::size_t sample) {
      return static_cast<std::uint64_t>(round) * each + sample;
    };
    for (std::size_t i = 0; i < each; ++i) {
      PEGA_TRY_LET(const Duration took,
                   puller.pull(page_bytes, page_bytes, 1, 1, place(i) * page_bytes));
      figure.push_back(microseconds(took));
    }
    for (std::size_t i = 0; i < each; ++i) {
      PEGA_TRY_LET(const Duration took, puller.plain_page(page_bytes, place(i) * page_bytes));
      bound.push_back(microseconds(took));
    }
    rounds.add(std::move(figure), std::move(bound));
  }
  PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
  figures.push_back(
      {.run = fmt::format("get of one page of {}, p50", format_bytes(page_bytes)),
       .params = std::move(params),
       .figure = compared.figure.median(),
       .unit = "us",
       .bound = compared.bound.median(),
       .bound_name = "one plain socket",
       .side = Reach::kAtMost,
       .reach = std::nullopt,
       .n = compared.figure.count(),
       .spread = fmt::format("p10 {:.0f} to p90 {:.0f} us", compared.figure.quantile(0.1),
                             compared.figure.quantile(0.9))});
  return {};
}

Result<void> listen_for_ever(const std::string& text) {
  PEGA_TRY_LET(const tcp::SocketAddress address, tcp::SocketAddress::parse(text, false));
  PEGA_TRY_LET(const UniqueFd listener, tcp::listen_at(address));
  PEGA_TRY_LET(const tcp::SocketAddress bound, tcp::SocketAddress::near_end(listener.get()));
  std::cout << "listening at " << to_string(bound) << std::endl;
  return hold_net(listener.get());
}

}  // namespace

Outcome run_net(int argc, const char* const* argv) {
  NetOptions options;
  // The other end is the one word without dashes; everything else is an option.
  std::vector<const char*> words(argv, argv + argc);
  std::string address;
  if (words.size() > 1 && words[1][0] != '-') {
    address = words[1];
    words.erase(words.begin() + 1);
  }
  OptionTable table(
      "pegaflow-perf net",
      "Pages from the memory of another node by the socket lane, beside plain sockets that carry "
      "the same bytes. `net ADDRESS` measures against `net --listen` there; without an address "
      "both "
      "ends run here, in two network namespaces joined by a virtual cable (as root; else over "
      "loopback). The lane has get only, no put.");
  declare(table, options.common);
  table.text("listen", options.listen,
             "Be the other end, at this HOST:PORT, until ended. Whoever connects may read memory "
             "that is made for it, and nothing else.");
  table.integer("connections", options.connections, 1, 64, "Sockets, of the lane and plain.");
  table.integer("batch", options.batch, 1, 4096, "Pages that are asked for at once.");
  table.integer("depth", options.depth, 1, 64,
                "Batches under way: with one, each waits for the last byte of the one before.");
  table.integer("rounds", options.rounds, 1, 1000, "Alternations for each page size.");
  table.bytes("piece", options.piece_bytes, 4096, 4 << 20,
              "What the lane asks for with one question; the default is the lane's.");
  table.bytes("window", options.window_bytes, 4096, 1 << 30,
              "What a connection of the lane asks for ahead; the default is the lane's.");
  table.flag("check", options.check,
             "Compare all bytes after every round, not only after the first.");
  table.list("pages", options.pages, "Page sizes, 4kb to 64mb.");
  PEGA_TRY_LET(const OptionTable::Next next,
               table.parse(static_cast<int>(words.size()), words.data(), std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  if (!options.listen.empty()) {
    if (!address.empty()) {
      return fail(Errc::kInvalidArgument, "--listen is the other end of `net {}`", address);
    }
    PEGA_TRY(listen_for_ever(options.listen));
    return std::nullopt;
  }
  std::vector<std::uint64_t> sizes;
  std::uint64_t memory_bytes = kLeastMemory;
  for (const std::string& text : options.pages) {
    PEGA_TRY_LET(const std::uint64_t size, parse_bytes(text));
    if (size < 4096 || size > 64 << 20) {
      return fail(Errc::kInvalidArgument, "--pages {}: not from 4kb to 64mb", text);
    }
    sizes.push_back(size);
    // Whole batches fit, so that none of them has two pages in one place.
    const std::uint64_t batch = size * static_cast<std::uint64_t>(options.batch);
    memory_bytes = std::max(memory_bytes, batch * static_cast<std::uint64_t>(options.depth));
  }
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));

  std::optional<NetChild> child;
  std::string way = "to " + address;
  if (address.empty()) {
    PEGA_TRY_LET(NetChild started, NetChild::start());
    child.emplace(std::move(started));
    address = child->address();
    way = child->loopback_because().empty() ? "between two namespaces" : "over loopback";
    progress(child->loopback_because().empty()
                 ? way + ", joined by a virtual cable"
                 : way + ", no namespaces: " + child->loopback_because());
  }
  std::vector<Figure> figures;
  for (const std::uint64_t size : sizes) {
    progress("pages of " + format_bytes(size));
    // A multiple of the page: where a batch goes round, no page hangs over the end.
    const std::uint64_t fitting = (memory_bytes + size - 1) / size * size;
    PEGA_TRY_LET(const auto puller, Puller::connect(address, options, fitting));
    const Params params = {{"page_bytes", static_cast<std::int64_t>(size)},
                           {"connections", options.connections},
                           {"piece_bytes", static_cast<std::int64_t>(options.piece_bytes)},
                           {"window_bytes", static_cast<std::int64_t>(options.window_bytes)},
                           {"lane", std::string("tcp")},
                           {"way", way}};
    PEGA_TRY(measure_rate(*puller, options, size, params, figures));
    PEGA_TRY(measure_latency(*puller, options, size, params, figures));
  }
  return Report{.title = "pegaflow-perf net, " + way,
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
