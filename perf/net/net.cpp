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
#include "harness/engine_memory.h"
#include "perf/lib/command.h"
#include "perf/net/net_holder.h"
#include "perf/net/net_lane.h"
#include "perf/net/net_perftest.h"
#include "perf/net/net_plain.h"
#include "transport/tcp/socket.h"

namespace pegaflow::perf {
namespace {

using SteadyTime = std::chrono::steady_clock;

/// Larger than the caches of the cores, as a pool is.
constexpr std::uint64_t kLeastMemory = std::uint64_t{64} << 20;
/// Of `ucx_perftest`: as many as UCX's own documentation takes for a bandwidth.
constexpr unsigned kOutstanding = 16;
constexpr std::size_t kLatencySamples = 200;
constexpr Duration kPatience = std::chrono::seconds(30);

struct NetOptions {
  CommonOptions common;
  std::string listen;
  std::int64_t connections = 4;
  std::int64_t batch = 64;
  std::int64_t depth = 2;
  std::int64_t rounds = 10;
  /// Some tenth of a second on an ordinary machine.
  std::uint64_t round_bytes = std::uint64_t{256} << 20;
  std::uint64_t piece_bytes = 0;
  std::uint64_t window_bytes = 0;
  bool check = false;
  NetLane lane;
  std::vector<std::string> their_rails;
  std::string no_bound_because;  ///< Found out, not chosen.
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
    PEGA_TRY_LET(puller->memory_, harness::Mapping::anonymous(memory_bytes));
    PEGA_TRY_LET(puller->expected_, harness::Mapping::anonymous(memory_bytes));
    const auto seed = static_cast<std::uint64_t>(options.common.seed);
    fill_net_pattern(puller->expected_->bytes(), seed);
    PEGA_TRY_LET(NetConnection connection, ask_holder(address, {.backend = options.lane.backend,
                                                                .memory_bytes = memory_bytes,
                                                                .seed = seed}));
    puller->host_ = address.substr(0, address.rfind(':'));
    if (puller->host_.starts_with('[')) {
      puller->host_ = puller->host_.substr(1, puller->host_.size() - 2);
    }
    puller->connection_ = std::move(connection);
    PEGA_TRY_LET(const tcp::SocketAddress near,
                 tcp::SocketAddress::near_end(puller->connection_->socket.get()));
    const auto connections = static_cast<unsigned>(options.connections);
    PEGA_TRY_LET(puller->fabric_,
                 make_lane(options.lane, to_string(near.with_port(0)), puller->clock_,
                           [at = puller.get()](Fabric::Completion&& done) {
                             at->inbox_.put(std::move(done));
                           }));
    PEGA_TRY_LET(puller->region_, puller->fabric_->register_region(puller->memory_->bytes()));
    PEGA_TRY_LET(puller->peer_, puller->fabric_->connect(puller->connection_->offer.fabric));
    if (options.lane.backend == "tcp") {
      const std::string& plain = puller->connection_->offer.plain;
      PEGA_TRY_LET(puller->plain_, PlainReceiver::connect(plain, connections));
      PEGA_TRY_LET(puller->one_plain_, PlainReceiver::connect(plain, 1));
    }
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

  /// `ucx_perftest` between the same cards. It has one buffer at each end, which the caches keep.
  [[nodiscard]] Result<Perftest> perftest(std::uint64_t size_bytes, std::uint64_t count,
                                          unsigned outstanding) const {
    PEGA_TRY_LET(const std::uint16_t port, ask_perftest(*connection_));
    return run_perftest(options_.lane, host_, port, size_bytes, count, outstanding);
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
  std::optional<harness::Mapping> memory_;
  std::optional<harness::Mapping> expected_;
  std::optional<NetConnection> connection_;
  std::string host_;
  std::unique_ptr<Fabric> fabric_;  // Ends before the memory that it writes to.
  RegionId region_{};
  Fabric::PeerId peer_{};
  std::uint64_t last_ticket_ = 0;
  std::optional<PlainReceiver> plain_;
  std::optional<PlainReceiver> one_plain_;
};

/// What alternating rounds gave.
class Series {
 public:
  /// `bound` is empty where there is none.
  void add(const std::vector<double>& figure, std::vector<double> bound) {
    figures_.insert(figures_.end(), figure.begin(), figure.end());
    has_bound_ = !bound.empty();
    if (has_bound_) rounds_.add(figure, std::move(bound));
  }
  /// The median, its bound, n and spread: of the ratios, or of the figure itself.
  Result<void> put_into(Figure& to, bool ratios) const {
    PEGA_TRY_LET(const Samples samples, Samples::of(figures_));
    to.figure = samples.median();
    to.n = samples.count();
    to.spread = fmt::format("p10 {} to p90 {} {}", format_number(samples.quantile(0.1)),
                            format_number(samples.quantile(0.9)), to.unit);
    if (!has_bound_) {
      to.bound_name.clear();
      to.reach.reset();
      return {};
    }
    PEGA_TRY_LET(const Rounds::Comparison compared, rounds_.compare());
    to.bound = compared.bound.median();
    if (ratios) {
      to.spread = fmt::format("ratio {:.2f} to {:.2f} (p10 to p90 of the rounds)",
                              compared.ratio_low, compared.ratio_high);
    }
    return {};
  }

 private:
  Rounds rounds_;
  std::vector<double> figures_;
  bool has_bound_ = false;
};

Result<void> measure_rate(Puller& puller, const NetOptions& options, std::uint64_t page_bytes,
                          Params params, std::vector<Figure>& figures) {
  const bool ucx = options.lane.backend == "ucx";
  const auto batch = static_cast<std::uint64_t>(options.batch);
  const std::uint64_t batch_bytes = page_bytes * batch;
  // Whole batches, and at least as many as are under way at once.
  const std::uint64_t bytes =
      batch_bytes * std::max<std::uint64_t>(options.round_bytes / batch_bytes,
                                            2 * static_cast<std::uint64_t>(options.depth));
  const auto ours = [&](bool check) -> Result<double> {
    if (check) puller.clear();
    PEGA_TRY_LET(const Duration took,
                 puller.pull(bytes, page_bytes, batch, static_cast<std::uint64_t>(options.depth)));
    if (check) PEGA_TRY(puller.compare(std::min(bytes, puller.memory_bytes())));
    return gigabytes_per_second(bytes, took);
  };
  const auto bound = [&]() -> Result<std::vector<double>> {
    if (!options.no_bound_because.empty()) return std::vector<double>{};
    if (ucx) {
      PEGA_TRY_LET(const Perftest run,
                   puller.perftest(page_bytes, bytes / page_bytes, kOutstanding));
      return std::vector<double>{run.gigabytes_per_second};
    }
    PEGA_TRY_LET(const Duration took, puller.plain(bytes));
    return std::vector<double>{gigabytes_per_second(bytes, took)};
  };
  PEGA_TRY(ours(true));  // Also warms both sides up.
  if (!ucx) PEGA_TRY(bound());
  Series series;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    // In turns, and each first as often as the other.
    double figure = 0;
    std::vector<double> beside;
    for (const bool first : {round % 2 == 0, round % 2 != 0}) {
      if (first) {
        PEGA_TRY_LET(figure, ours(options.check));
      } else {
        PEGA_TRY_LET(beside, bound());
      }
    }
    series.add({figure}, std::move(beside));
  }
  params.emplace_back("batch", options.batch);
  params.emplace_back("depth", options.depth);
  std::optional<double> reach;
  if (page_bytes >= 64 << 10 && !ucx) reach = 0.8;
  if (page_bytes >= 2 << 20) reach = 0.9;
  Figure figure{.run = fmt::format("get, pages of {} in batches of {}", format_bytes(page_bytes),
                                   options.batch),
                .params = std::move(params),
                .unit = "GB/s",
                .bound_name = ucx ? fmt::format("ucx_perftest -t ucp_get -O {}", kOutstanding)
                                  : "as many plain sockets",
                .side = Reach::kAtLeast,
                .reach = reach,
                .spread = {}};
  PEGA_TRY(series.put_into(figure, true));
  figures.push_back(std::move(figure));
  return {};
}

Result<void> measure_latency(Puller& puller, const NetOptions& options, std::uint64_t page_bytes,
                             Params params, std::vector<Figure>& figures) {
  const bool ucx = options.lane.backend == "ucx";
  Series series;
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
    if (!options.no_bound_because.empty()) {
      series.add(figure, {});
      continue;
    }
    if (ucx) {
      PEGA_TRY_LET(const Perftest run, puller.perftest(page_bytes, each, 1));
      bound.push_back(run.p50_us);
    }
    for (std::size_t i = 0; i < each && !ucx; ++i) {
      PEGA_TRY_LET(const Duration took, puller.plain_page(page_bytes, place(i) * page_bytes));
      bound.push_back(microseconds(took));
    }
    series.add(figure, std::move(bound));
  }
  Figure figure{.run = fmt::format("get of one page of {}, p50", format_bytes(page_bytes)),
                .params = std::move(params),
                .unit = "us",
                .bound_name = ucx ? "ucx_perftest -t ucp_get -O 1" : "one plain socket",
                .side = Reach::kAtMost,
                .reach = std::nullopt,
                .spread = {}};
  PEGA_TRY(series.put_into(figure, false));
  figures.push_back(std::move(figure));
  return {};
}

Result<void> listen_for_ever(const std::string& text, const NetLane& lane) {
  PEGA_TRY_LET(const tcp::SocketAddress address, tcp::SocketAddress::parse(text, false));
  PEGA_TRY_LET(const UniqueFd listener, tcp::listen_at(address));
  PEGA_TRY_LET(const tcp::SocketAddress bound, tcp::SocketAddress::near_end(listener.get()));
  std::cout << "listening at " << to_string(bound) << std::endl;
  return hold_net(listener.get(), lane);
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
      "the same bytes, or with --backend ucx by the RDMA lane, beside `ucx_perftest -t ucp_get` "
      "over the same cards. `net ADDRESS` measures against `net --listen` there; without an "
      "address both ends run here: sockets in two network namespaces joined by a virtual cable "
      "(as root; else over loopback), cards with each other. The lanes have get only, no put. For "
      "who knows ucx_perftest: --pages is its -s, --batch x --depth its -O, --rounds and --bytes "
      "its -n.");
  declare(table, options.common);
  table.text("listen", options.listen,
             "Be the other end, at this HOST:PORT, until ended. Whoever connects may read memory "
             "that is made for it, and nothing else.");
  table.text("backend", options.lane.backend, "tcp, the socket lane; or ucx, the RDMA lane.");
  table.list(
      "rails", options.lane.rails,
      "With ucx: cards and ports of this end, as mlx5_0:1. Without it all whose link is up.");
  table.list("their-rails", options.their_rails,
             "With ucx and without an address: those of the other end. Without it the same.");
  table.flag(
      "ucx-over-tcp", options.lane.ucx_over_tcp,
      "A test of --backend ucx without a card: UCX over TCP, where --rails are network "
      "interfaces, as lo. Whoever reaches one can make this program read any of its memory.");
  table.integer("connections", options.connections, 1, 64, "Sockets, of the lane and plain.");
  table.integer("batch", options.batch, 1, 4096, "Pages that are asked for at once.");
  table.integer("depth", options.depth, 1, 64,
                "Batches under way: with one, each waits for the last byte of the one before.");
  table.integer("rounds", options.rounds, 1, 1000, "Alternations for each page size.");
  table.bytes("bytes", options.round_bytes, 4096, std::uint64_t{1} << 40,
              "What a round moves at least.");
  table.bytes("piece", options.piece_bytes, 0, 1 << 30,
              "What the lane asks for with one question; 0: its own choice.");
  table.bytes("window", options.window_bytes, 0, 1 << 30,
              "What a connection or a card asks for ahead at most; 0: its own choice.");
  table.flag("check", options.check,
             "Compare all bytes after every round, not only after the first.");
  table.list("pages", options.pages, "Page sizes, 4kb to 64mb.");
  PEGA_TRY_LET(const OptionTable::Next next,
               table.parse(static_cast<int>(words.size()), words.data(), std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  options.lane.connections = static_cast<unsigned>(options.connections);
  options.lane.piece_bytes = options.piece_bytes;
  options.lane.window_bytes = options.window_bytes;
  PEGA_TRY_LET(options.lane, with_rails(options.lane));
  const bool ucx = options.lane.backend == "ucx";
  if (!options.their_rails.empty() && (!ucx || !address.empty() || !options.listen.empty())) {
    return fail(Errc::kInvalidArgument, "--their-rails is for both ends here, with --backend ucx");
  }
  if (!options.listen.empty()) {
    if (!address.empty()) {
      return fail(Errc::kInvalidArgument, "--listen is the other end of `net {}`", address);
    }
    PEGA_TRY(listen_for_ever(options.listen, options.lane));
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
    NetLane theirs = options.lane;
    if (!options.their_rails.empty()) theirs.rails = options.their_rails;
    PEGA_TRY_LET(NetChild started, NetChild::start(theirs));
    child.emplace(std::move(started));
    address = child->address();
    if (ucx) {
      way = "between cards here";
    } else {
      way = child->loopback_because().empty() ? "between two namespaces" : "over loopback";
      progress(child->loopback_because().empty()
                   ? way + ", joined by a virtual cable"
                   : way + ", no namespaces: " + child->loopback_because());
    }
  }
  std::vector<Figure> figures;
  for (const std::uint64_t size : sizes) {
    progress("pages of " + format_bytes(size));
    // A multiple of the page: where a batch goes round, no page hangs over the end.
    const std::uint64_t fitting = (memory_bytes + size - 1) / size * size;
    PEGA_TRY_LET(const auto puller, Puller::connect(address, options, fitting));
    if (ucx && options.no_bound_because.empty()) {
      if (const Result<Perftest> tried = puller->perftest(size, 4, 1); !tried) {
        options.no_bound_because = to_string(tried.error());
        progress("no bound: " + options.no_bound_because);
      }
    }
    const Params params = {{"page_bytes", static_cast<std::int64_t>(size)},
                           {"connections", options.connections},
                           {"piece_bytes", static_cast<std::int64_t>(options.piece_bytes)},
                           {"window_bytes", static_cast<std::int64_t>(options.window_bytes)},
                           {"lane", options.lane.backend},
                           {"rails", static_cast<std::int64_t>(options.lane.rails.size())},
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
