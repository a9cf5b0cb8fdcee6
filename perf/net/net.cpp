/// \file
/// `pegaflow-perf net`: the rate of pages from another node, beside plain sockets.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <iostream>
#include <mutex>
#include <optional>
#include <utility>

#include "base/units.h"
#include "perf/lib/command.h"
#include "perf/net/net_holder.h"
#include "perf/net/net_lane.h"
#include "perf/net/net_memory.h"
#include "perf/net/net_perftest.h"
#include "perf/net/net_plain.h"
#include "transport/tcp/socket.h"

namespace pegaflow::perf {
namespace {

using SteadyTime = std::chrono::steady_clock;

/// Larger than the caches of the cores, as a pool is.
constexpr std::uint64_t kLeastMemory = std::uint64_t{64} << 20;
/// Outstanding operations of `ucx_perftest`, as in UCX's documentation of its bandwidth test.
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
  /// About a tenth of a second on an ordinary machine.
  std::uint64_t round_bytes = std::uint64_t{256} << 20;
  std::uint64_t piece_bytes = 0;
  std::uint64_t window_bytes = 0;
  bool check = false;
  NetLane lane;
  std::vector<std::string> their_rails;
  std::string their_memory;
  std::string no_bound_because;  ///< Detected, not an option.
  std::vector<std::string> pages = {"64kb", "2mb"};
};

/// Completions that were not taken yet.
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

/// The measuring end: a lane and plain sockets to the same holder.
class Puller {
 public:
  static Result<std::unique_ptr<Puller>> connect(const std::string& address,
                                                 const NetOptions& options,
                                                 std::uint64_t memory_bytes) {
    std::unique_ptr<Puller> puller(new Puller(options));
    PEGA_TRY_LET(std::shared_ptr<cuda::Gpu> gpu, gpu_of(options.lane));
    PEGA_TRY_LET(puller->memory_, NetMemory::create(gpu, memory_bytes));
    const auto seed = static_cast<std::uint64_t>(options.common.seed);
    PEGA_TRY_LET(NetConnection connection, ask_holder(address, {.backend = options.lane.backend,
                                                                .memory_bytes = memory_bytes,
                                                                .seed = seed}));
    puller->host_ = address.substr(0, address.rfind(':'));
    if (puller->host_.starts_with('[')) {
      puller->host_ = puller->host_.substr(1, puller->host_.size() - 2);
    }
    puller->connection_ = std::move(connection);
    if (gpu == nullptr && puller->their_memory() != "host") {
      // UCX over TCP reads a peer's GPU memory only if it may use a GPU here.
      if (auto any = open_gpu(0)) gpu = std::move(*any);
    }
    PEGA_TRY_LET(const tcp::SocketAddress near,
                 tcp::SocketAddress::near_end(puller->connection_->socket.get()));
    const auto connections = static_cast<unsigned>(options.connections);
    PEGA_TRY_LET(puller->fabric_, make_lane(
                                      options.lane, to_string(near.with_port(0)), puller->clock_,
                                      [at = puller.get()](Fabric::Completion&& done) {
                                        at->inbox_.put(std::move(done));
                                      },
                                      gpu));
    PEGA_TRY_LET(puller->region_, puller->fabric_->register_region(puller->memory_->memory()));
    PEGA_TRY_LET(puller->peer_, puller->fabric_->connect(puller->connection_->offer.fabric));
    if (options.lane.backend == "tcp") {
      const std::string& plain = puller->connection_->offer.plain;
      PEGA_TRY_LET(puller->plain_, PlainReceiver::connect(plain, connections));
      PEGA_TRY_LET(puller->one_plain_, PlainReceiver::connect(plain, 1));
    }
    return puller;
  }

  /// Reads `bytes` from `at` on, in batches of `batch` pages with `depth` batches in flight.
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
    PEGA_TRY(plain_->receive(memory_->host_bytes(), bytes));
    return SteadyTime::now() - begin;
  }
  /// Reads one page through one plain socket, to the same place.
  Result<Duration> plain_page(std::uint64_t page_bytes, std::uint64_t at) {
    const auto begin = SteadyTime::now();
    PEGA_TRY(one_plain_->receive(memory_->host_bytes().subspan(at % memory_bytes(), page_bytes),
                                 page_bytes, at));
    return SteadyTime::now() - begin;
  }

  /// Runs `ucx_perftest` between the same NICs. It has one buffer at each end, which stays in the
  /// caches.
  [[nodiscard]] Result<Perftest> perftest(std::uint64_t size_bytes, std::uint64_t count,
                                          unsigned outstanding) const {
    PEGA_TRY_LET(const std::uint16_t port, ask_perftest(*connection_));
    return run_perftest(options_.lane, host_, port, size_bytes, count, outstanding);
  }

  Result<void> clear() { return memory_->clear(); }
  /// Errors: kCorrupt when the first `bytes` differ from the holder's.
  [[nodiscard]] Result<void> compare(std::uint64_t bytes) {
    return memory_->compare(static_cast<std::uint64_t>(options_.common.seed), bytes);
  }
  [[nodiscard]] const std::string& their_memory() const { return connection_->offer.memory; }
  [[nodiscard]] std::uint64_t memory_bytes() const { return memory_->size_bytes(); }

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
      if (chunk) return fail(*chunk, "a page was not read: {}", done.detail);
    }
    return {};
  }

  NetOptions options_;
  SteadyClock clock_;
  Inbox inbox_;
  std::unique_ptr<NetMemory> memory_;
  std::optional<NetConnection> connection_;
  std::string host_;
  std::unique_ptr<Fabric> fabric_;  // Destroyed before the memory that it writes to.
  RegionId region_{};
  Fabric::PeerId peer_{};
  std::uint64_t last_ticket_ = 0;
  std::optional<PlainReceiver> plain_;
  std::optional<PlainReceiver> one_plain_;
};

/// The samples of alternating rounds.
class Series {
 public:
  /// `bound` is empty when nothing bounds the figure.
  void add(const std::vector<double>& figure, std::vector<double> bound) {
    figures_.insert(figures_.end(), figure.begin(), figure.end());
    has_bound_ = !bound.empty();
    if (has_bound_) rounds_.add(figure, std::move(bound));
  }
  /// Sets the median, its bound, n, and the spread: of the ratios, or of the figure itself.
  Result<void> put_into(Figure& to, bool ratios) const {
    PEGA_TRY_LET(const Samples samples, Samples::of(figures_));
    to.figure = samples.median();
    to.n = samples.count();
    to.spread = fmt::format("p10 {} to p90 {} {}", format_number(samples.quantile(0.1)),
                            format_number(samples.quantile(0.9)), to.unit);
    if (!has_bound_) {
      to.bound_name.clear();
      to.target.reset();
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
  // Whole batches, and at least twice as many as are in flight.
  const std::uint64_t bytes =
      batch_bytes * std::max<std::uint64_t>(options.round_bytes / batch_bytes,
                                            2 * static_cast<std::uint64_t>(options.depth));
  const auto ours = [&](bool check) -> Result<double> {
    if (check) PEGA_TRY(puller.clear());
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
    // Alternating, and each side begins equally often.
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
  std::optional<double> target;
  if (page_bytes >= 64 << 10 && !ucx) target = 0.8;
  if (page_bytes >= 2 << 20) target = 0.9;
  Figure figure{.run = fmt::format("get, pages of {} in batches of {}", format_bytes(page_bytes),
                                   options.batch),
                .params = std::move(params),
                .unit = "GB/s",
                .bound_name = ucx ? fmt::format("ucx_perftest -t ucp_get -O {}", kOutstanding)
                                  : "as many plain sockets",
                .side = Side::kAtLeast,
                .target = target,
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
    // Both use the same pages, and new ones in the next round, so that none is in a cache.
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
                .side = Side::kAtMost,
                .target = std::nullopt,
                .spread = {}};
  PEGA_TRY(series.put_into(figure, false));
  figures.push_back(std::move(figure));
  return {};
}

Result<void> listen_forever(const std::string& text, const NetLane& lane) {
  PEGA_TRY_LET(const tcp::SocketAddress address, tcp::SocketAddress::parse(text, false));
  PEGA_TRY_LET(const UniqueFd listener, tcp::listen_at(address));
  PEGA_TRY_LET(const tcp::SocketAddress bound, tcp::SocketAddress::near_end(listener.get()));
  std::cout << "listening at " << to_string(bound) << '\n' << std::flush;
  return hold_net(listener.get(), lane);
}

void declare(OptionTable& table, NetOptions& options) {
  declare(table, options.common);
  table.text("listen", options.listen,
             "Be the other end at this HOST:PORT until killed. Any host that connects may read "
             "memory that is allocated for it, and nothing else.");
  table.text("backend", options.lane.backend, "tcp, the socket lane, or ucx, the RDMA lane.");
  table.list("rails", options.lane.rails,
             "With ucx: NICs and ports of this end, such as mlx5_0:1. Default: all with a link.");
  table.list("their-rails", options.their_rails,
             "With ucx and without an address: NICs of the other end. Default: --rails.");
  table.text("memory", options.lane.memory,
             "Memory of this end: host, or with ucx cuda or cuda:N, that of a GPU. UCX and, over "
             "NICs, the NIC have to support it: see --ucx-library.");
  table.text("their-memory", options.their_memory,
             "With ucx and without an address: memory of the other end. Default: --memory.");
  table.flag("ucx-over-tcp", options.lane.ucx_over_tcp,
             "Test --backend ucx without a NIC: UCX over TCP, where --rails are network "
             "interfaces such as lo. Any host that reaches one can read all memory of this "
             "program.");
  table.text("ucx-library", options.lane.ucx_library,
             "With ucx: the file libucp.so.0 of the UCX to measure, with its other libraries "
             "beside it. The default is the one that the system finds.");
  table.integer("connections", options.connections, 1, 64,
                "Sockets of the lane, and plain sockets.");
  table.integer("batch", options.batch, 1, 4096, "Pages of a batch.");
  table.integer("depth", options.depth, 1, 64,
                "Batches in flight; with 1, each waits for the last byte of the one before.");
  table.integer("rounds", options.rounds, 1, 1000, "Rounds for each page size.");
  table.bytes("bytes", options.round_bytes, 4096, std::uint64_t{1} << 40,
              "Least bytes of a round.");
  table.bytes("piece", options.piece_bytes, 0, 1 << 30,
              "Bytes that the lane requests at a time; 0: the lane's default.");
  table.bytes("window", options.window_bytes, 0, 1 << 30,
              "Bytes in flight of one connection or NIC; 0: the lane's default.");
  table.flag("check", options.check, "Compare all bytes after every round, not only the first.");
  table.list("pages", options.pages, "Page sizes from 4kb to 64mb.");
}

/// Removes the address of the other end from the command line: the one word without dashes.
std::string take_address(std::vector<const char*>& words) {
  if (words.size() < 2 || words[1][0] == '-') return {};
  std::string address = words[1];
  words.erase(words.begin() + 1);
  return address;
}

/// Errors: kInvalidArgument when options exclude each other.
Result<void> check_ends(const NetOptions& options, const std::string& address) {
  const bool is_alone = address.empty() && options.listen.empty();
  if ((!options.their_rails.empty() || !options.their_memory.empty()) &&
      (options.lane.backend != "ucx" || !is_alone)) {
    return fail(
        Errc::kInvalidArgument,
        "--their-rails and --their-memory need --backend ucx and both ends on this machine");
  }
  if (!options.their_memory.empty()) PEGA_TRY(parse_memory(options.their_memory));
  if (!options.listen.empty() && !address.empty()) {
    return fail(Errc::kInvalidArgument, "--listen is for the other end, not with `net {}`",
                address);
  }
  return {};
}

/// The page sizes of a run, and the memory that each end needs for them.
struct Pages {
  std::vector<std::uint64_t> sizes;
  std::uint64_t memory_bytes = kLeastMemory;
};

Result<Pages> pages_of(const NetOptions& options) {
  Pages pages;
  for (const std::string& text : options.pages) {
    PEGA_TRY_LET(const std::uint64_t size, parse_bytes(text));
    if (size < 4096 || size > 64 << 20) {
      return fail(Errc::kInvalidArgument, "--pages: {} is not from 4kb to 64mb", text);
    }
    pages.sizes.push_back(size);
    // Whole batches fit, so that no two pages of them share a place.
    const std::uint64_t batch = size * static_cast<std::uint64_t>(options.batch);
    pages.memory_bytes =
        std::max(pages.memory_bytes, batch * static_cast<std::uint64_t>(options.depth));
  }
  return pages;
}

/// The holder that is measured.
struct OtherEnd {
  std::optional<NetChild> child;  ///< When both ends run here.
  std::string address;
  std::string link;  ///< How the ends are connected, for the report.
};

/// Starts a holder here unless `address` names one.
Result<OtherEnd> find_other_end(const NetOptions& options, const std::string& address) {
  if (!address.empty()) return OtherEnd{.child = {}, .address = address, .link = "to " + address};
  NetLane theirs = options.lane;
  if (!options.their_rails.empty()) theirs.rails = options.their_rails;
  if (!options.their_memory.empty()) theirs.memory = options.their_memory;
  PEGA_TRY_LET(NetChild child, NetChild::start(theirs));
  OtherEnd other{.child = {}, .address = child.address(), .link = "between NICs here"};
  if (options.lane.backend != "ucx") {
    const std::string& why = child.loopback_because();
    other.link = why.empty() ? "between two namespaces" : "over loopback";
    progress(other.link +
             (why.empty() ? ", joined by a virtual cable" : ", no namespaces: " + why));
  }
  other.child.emplace(std::move(child));
  return other;
}

/// Measures one page size. Sets `no_bound_because` when the bound of --backend ucx does not run.
Result<void> measure_size(NetOptions& options, const OtherEnd& other, std::uint64_t size,
                          std::uint64_t memory_bytes, std::vector<Figure>& figures) {
  progress("pages of " + format_bytes(size));
  // A multiple of the page: where a batch wraps around, no page crosses the end.
  const std::uint64_t fitting = (memory_bytes + size - 1) / size * size;
  PEGA_TRY_LET(const auto puller, Puller::connect(other.address, options, fitting));
  if (options.lane.memory != "host" || puller->their_memory() != "host") {
    options.no_bound_because = "ucx_perftest is run with host memory only";
  }
  if (options.lane.backend == "ucx" && options.no_bound_because.empty()) {
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
                         {"memory", options.lane.memory},
                         {"their_memory", puller->their_memory()},
                         {"rails", static_cast<std::int64_t>(options.lane.rails.size())},
                         {"link", other.link}};
  PEGA_TRY(measure_rate(*puller, options, size, params, figures));
  return measure_latency(*puller, options, size, params, figures);
}

}  // namespace

Outcome run_net(int argc, const char* const* argv) {
  NetOptions options;
  std::vector<const char*> words(argv, argv + argc);
  const std::string address = take_address(words);
  OptionTable table(
      "pegaflow-perf net",
      "Measures reads of pages from the memory of another node over the socket lane, beside plain "
      "sockets that carry the same bytes, or with --backend ucx over the RDMA lane, beside "
      "`ucx_perftest -t ucp_get` over the same NICs. `net ADDRESS` measures against `net --listen` "
      "there. Without an address both ends run here: sockets in two network namespaces joined by "
      "a virtual cable (as root; else over loopback), NICs with each other. The lanes only get, "
      "they do not put. In terms of ucx_perftest, --pages is -s, --batch x --depth is -O, and "
      "--rounds and --bytes are -n.");
  declare(table, options);
  PEGA_TRY_LET(const OptionTable::Next next,
               table.parse(static_cast<int>(words.size()), words.data(), std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  options.lane.connections = static_cast<unsigned>(options.connections);
  options.lane.piece_bytes = options.piece_bytes;
  options.lane.window_bytes = options.window_bytes;
  PEGA_TRY_LET(options.lane, with_rails(options.lane));
  PEGA_TRY(check_ends(options, address));
  if (!options.listen.empty()) {
    PEGA_TRY(listen_forever(options.listen, options.lane));
    return std::nullopt;
  }
  PEGA_TRY_LET(const Pages pages, pages_of(options));
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  PEGA_TRY_LET(const OtherEnd other, find_other_end(options, address));
  std::vector<Figure> figures;
  for (const std::uint64_t size : pages.sizes) {
    PEGA_TRY(measure_size(options, other, size, pages.memory_bytes, figures));
  }
  return Report{.title = "pegaflow-perf net, " + other.link,
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
