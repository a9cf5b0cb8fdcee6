/// \file
/// `pegaflow-perf miss`: the cost of lookups and claims of missing keys on a node with peers,
/// beside a node without.

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "harness/server_process.h"
#include "perf/lib/command.h"
#include "perf/lib/keys.h"
#include "perf/lib/workload.h"
#include "perf/server/loopback_nodes.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kPeerBlocks = 4096;  ///< Blocks of each peer; never requested.
constexpr std::uint64_t kFirstMissing = std::uint64_t{1} << 40;
constexpr std::size_t kCalls = 16;  ///< Requests of each kind per round.
/// The connector's deadline for a claim; --peer-deadline is below it for that reason.
constexpr double kConnectorWaitsMs = 20;

struct MissOptions {
  CommonOptions common;
  std::int64_t peers = 7;
  std::int64_t keys = 640;
  std::int64_t rounds = 50;
};

/// The requests of a scheduler: when a prompt arrives, and before it allocates blocks.
enum class Question : std::uint8_t { kLookup, kClaim };
constexpr std::array kQuestions = {Question::kLookup, Question::kClaim};

/// A node that is measured, and the client of one engine there.
struct Asked {
  std::size_t peers = 0;
  harness::ServerProcess server;
  std::unique_ptr<harness::WireClient> client;
};

/// One round of one kind of request: the microseconds of each, and processor time per request.
struct Round {
  std::vector<double> us;
  double own_cpu_us = 0;
  double peers_cpu_us = 0;  ///< All peers together.
};

class Nodes {
 public:
  static Result<std::unique_ptr<Nodes>> start(const MissOptions& options) {
    std::unique_ptr<Nodes> nodes(new Nodes(options));
    progress(fmt::format("start {} peers", options.peers));
    for (const std::string& address : nodes->addresses_) {
      PEGA_TRY_LET(harness::ServerProcess server, nodes->serve({"--peer-listen", address}));
      // In the namespace of the requests, so that the peers look their keys up.
      PEGA_TRY_LET(auto client, nodes->connect(server));
      std::uint64_t job = 1;
      PEGA_TRY(fill(*client, nodes->keys_, kPeerBlocks, job));
      nodes->peers_.push_back(
          {.peers = 0, .server = std::move(server), .client = std::move(client)});
    }
    return nodes;
  }

  /// Starts a node with the first `peers` of all peers.
  Result<Asked> start_asked(std::size_t peers, std::vector<std::string> arguments) {
    if (peers != 0) {
      arguments.push_back("--peers");
      arguments.push_back(fmt::format("{}", fmt::join(std::span(addresses_).first(peers), ",")));
    }
    PEGA_TRY_LET(harness::ServerProcess server, serve(std::move(arguments)));
    PEGA_TRY_LET(auto client, connect(server));
    for (std::size_t i = 0; i < peers; ++i) PEGA_TRY(wait_until_ready(server, addresses_[i]));
    return Asked{.peers = peers, .server = std::move(server), .client = std::move(client)};
  }

  /// Requests missing keys, new ones each time. Returns the microseconds.
  Result<double> ask(Asked& asked, Question question) {
    const std::vector<BlockKey> keys = keys_.range(next_key_, key_count_);
    next_key_ += key_count_;
    const auto begin = Clock::now();
    const Result<std::uint32_t> found =
        question == Question::kLookup
            ? lookup(*asked.client, keys)
            : asked.client->claim(Id128::random(), keys)
                  .map([](const harness::WireClient::Found& claimed) { return claimed.blocks; });
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    if (!found) return tl::unexpected<Error>(found.error());
    if (*found != 0) return fail(Errc::kInternal, "{} missing keys were found", *found);
    return us;
  }

  Result<Round> ask_often(Asked& asked, Question question) {
    Round round;
    PEGA_TRY_LET(const Duration own, asked.server.process().cpu_time());
    PEGA_TRY_LET(const Duration others, cpu_of_peers(asked));
    for (std::size_t i = 0; i < kCalls; ++i) {
      PEGA_TRY_LET(const double us, ask(asked, question));
      round.us.push_back(us);
    }
    PEGA_TRY_LET(const Duration own_end, asked.server.process().cpu_time());
    PEGA_TRY_LET(const Duration others_end, cpu_of_peers(asked));
    const auto each = [](Duration time) {
      return std::chrono::duration<double, std::micro>(time).count() / kCalls;
    };
    round.own_cpu_us = each(own_end - own);
    round.peers_cpu_us = each(others_end - others);
    return round;
  }

  [[nodiscard]] const harness::Child& peer(std::size_t which) const {
    return peers_[which].server.process();
  }
  [[nodiscard]] const std::string& address(std::size_t which) const { return addresses_[which]; }

 private:
  explicit Nodes(const MissOptions& options)
      : program_(options.common.server),
        key_count_(static_cast<std::size_t>(options.keys)),
        keys_(static_cast<std::uint64_t>(options.common.seed)),
        addresses_(loopback_addresses(static_cast<std::size_t>(options.peers))),
        io_(kj::setupAsyncIo()) {}

  Result<harness::ServerProcess> serve(std::vector<std::string> arguments) {
    return harness::ServerProcess::start({.program = program_,
                                          .pool_size = std::to_string(pool_bytes_for(kPeerBlocks)),
                                          .arguments = std::move(arguments)});
  }
  Result<std::unique_ptr<harness::WireClient>> connect(const harness::ServerProcess& server) {
    PEGA_TRY_LET(auto client, harness::WireClient::connect(io_, server.socket_path()));
    PEGA_TRY(client->register_worker("perf", kSmallPageBytes, 1024));
    return client;
  }
  [[nodiscard]] Result<Duration> cpu_of_peers(const Asked& asked) const {
    Duration sum{};
    for (std::size_t i = 0; i < asked.peers; ++i) {
      PEGA_TRY_LET(const Duration one, peer(i).cpu_time());
      sum += one;
    }
    return sum;
  }

  std::string program_;
  std::size_t key_count_;
  KeySource keys_;
  std::vector<std::string> addresses_;
  kj::AsyncIoContext io_;
  std::vector<Asked> peers_;  ///< They have no peers of their own.
  std::uint64_t next_key_ = kFirstMissing;
};

/// A sample of /metrics that must exist.
Result<double> sample(const harness::ServerProcess& server, const std::string& name) {
  PEGA_TRY_LET(const harness::ServerProcess::Metrics metrics, server.metrics());
  const auto found = metrics.find(name);
  if (found == metrics.end()) return fail(Errc::kInternal, "the server has no metric {}", name);
  return found->second;
}

/// Every peer must have responded to every request: a lost response is cheaper.
Result<void> expect_answers(const Nodes& nodes, const Asked& asked) {
  for (std::size_t i = 0; i < asked.peers; ++i) {
    for (const char* const what : {"late", "losses"}) {
      PEGA_TRY_LET(const double times,
                   sample(asked.server, fmt::format("pegaflow_peer_{}_total{{peer=\"{}\"}}", what,
                                                    nodes.address(i))));
      if (times == 0) continue;
      return fail(Errc::kTimeout, "peer {} did not respond to every request: {} {}",
                  nodes.address(i), what, times);
    }
  }
  return {};
}

struct Kind {
  Question question;
  std::size_t peers;
  Rounds latency;  ///< Beside a node without peers.
  Rounds cpu;      ///< Beside a node without peers.
  std::vector<double> peers_cpu_us;
};

Result<void> report(const Kind& kind, std::int64_t keys, std::vector<Figure>& figures) {
  const std::string what = fmt::format("{} of {} missing keys, {} peer{}",
                                       kind.question == Question::kLookup ? "lookup" : "claim",
                                       keys, kind.peers, kind.peers == 1 ? "" : "s");
  const Params params = {{"keys", keys}, {"peers", static_cast<std::int64_t>(kind.peers)}};
  PEGA_TRY_LET(const Rounds::Comparison latency, kind.latency.compare());
  for (const double fraction : {0.5, 0.99}) {
    figures.push_back(
        {.run = fmt::format("{}, p{:g}", what, fraction * 100),
         .params = params,
         .figure = latency.figure.quantile(fraction),
         .unit = "us",
         .bound = latency.bound.quantile(fraction),
         .bound_name = "a node without peers",
         .target = std::nullopt,
         .n = latency.figure.count(),
         .spread = fraction == 0.5
                       ? fmt::format("ratio {:.2f} to {:.2f} in {} rounds", latency.ratio_low,
                                     latency.ratio_high, latency.rounds)
                       : ""});
  }
  PEGA_TRY_LET(const Rounds::Comparison cpu, kind.cpu.compare());
  figures.push_back(
      {.run = what + ", CPU of the node",
       .params = params,
       .figure = cpu.figure.median(),
       .unit = "us",
       .bound = cpu.bound.median(),
       .bound_name = "a node without peers",
       .target = std::nullopt,
       .n = cpu.rounds,
       .spread = fmt::format("ratio {:.2f} to {:.2f}", cpu.ratio_low, cpu.ratio_high)});
  PEGA_TRY_LET(const Samples others, Samples::of(kind.peers_cpu_us));
  figures.push_back(
      {.run = what + ", CPU of all peers together",
       .params = params,
       .figure = others.median(),
       .unit = "us",
       .n = others.count(),
       .spread = fmt::format("p10 {} to p90 {} us", format_number(others.quantile(0.1)),
                             format_number(others.quantile(0.9)))});
  return {};
}

/// Claims while one peer is stopped: their latency, and the number that waits for it.
Result<void> stand_still(Nodes& nodes, const MissOptions& options, std::vector<Figure>& figures) {
  constexpr std::size_t kClaims = 200;
  const auto peers = static_cast<std::size_t>(options.peers);
  // With the default deadlines.
  PEGA_TRY_LET(Asked asked, nodes.start_asked(peers, {}));
  PEGA_TRY(nodes.ask(asked, Question::kClaim));
  const std::string late =
      fmt::format("pegaflow_peer_late_total{{peer=\"{}\"}}", nodes.address(peers - 1));
  PEGA_TRY_LET(const double late_before, sample(asked.server, late));
  const harness::Child& still = nodes.peer(peers - 1);
  if (::kill(still.pid(), SIGSTOP) != 0) return fail_errno(errno, "stop a peer");
  std::vector<double> ms;
  for (std::size_t i = 0; i < kClaims; ++i) {
    PEGA_TRY_LET(const double us, nodes.ask(asked, Question::kClaim));
    ms.push_back(us / 1000);
  }
  PEGA_TRY_LET(const double late_after, sample(asked.server, late));
  std::vector<std::string> longest;
  std::sort(ms.begin(), ms.end(), std::greater<>());
  for (std::size_t i = 0; i < 4; ++i) longest.push_back(format_number(ms[i]));
  PEGA_TRY_LET(const Samples samples, Samples::of(std::move(ms)));
  const Params params = {{"keys", options.keys}, {"peers", options.peers}};
  figures.push_back({.run = fmt::format("claims that wait for a stopped peer, one of {}", peers),
                     .params = params,
                     .figure = late_after - late_before,
                     .unit = "claims",
                     .bound = 3,
                     .bound_name = "timeouts until a peer counts as lost",
                     .n = kClaims,
                     .spread = "one run"});
  figures.push_back(
      {.run = "the longest of them",
       .params = params,
       .figure = samples.quantile(1),
       .unit = "ms",
       .bound = kConnectorWaitsMs,
       .bound_name = "the connector's deadline for a claim",
       .n = kClaims,
       .spread = fmt::format("then {}, {} and {}; p50 of all {} ms", longest[1], longest[2],
                             longest[3], format_number(samples.median()))});
  return {};
}

}  // namespace

Outcome run_miss(int argc, const char* const* argv) {
  MissOptions options;
  OptionTable table("pegaflow-perf miss",
                    "Measures lookups and claims of missing keys over the bare wire: on a node "
                    "without peers, with one, and with --peers of them, all on this machine over "
                    "loopback sockets. Then measures claims while one peer is stopped.");
  declare(table, options.common);
  table.integer("peers", options.peers, 1, 64, "Largest number of peers.");
  table.integer("keys", options.keys, 1, 8192, "Keys of a request; 640 are 10 Ki tokens.");
  table.integer("rounds", options.rounds, 1, 1000,
                "Rounds; each has 16 lookups and 16 claims on each node.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;
  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));

  PEGA_TRY_LET(const auto nodes, Nodes::start(options));
  std::vector<Asked> asked;
  std::vector<Kind> kinds;
  for (const std::size_t peers : {std::size_t{0}, std::size_t{1}, std::size_t(options.peers)}) {
    if (!asked.empty() && asked.back().peers == peers) continue;
    // On a busy machine a response is late, not lost.
    std::vector<std::string> arguments;
    if (peers != 0) arguments = {"--peer-deadline", "10s"};
    PEGA_TRY_LET(Asked one, nodes->start_asked(peers, std::move(arguments)));
    asked.push_back(std::move(one));
    if (peers == 0) continue;
    for (const Question question : kQuestions) {
      kinds.push_back(
          {.question = question, .peers = peers, .latency = {}, .cpu = {}, .peers_cpu_us = {}});
    }
  }

  progress("request missing keys");
  for (std::int64_t round = 0; round <= options.rounds; ++round) {
    for (const Question question : kQuestions) {
      PEGA_TRY_LET(const Round alone, nodes->ask_often(asked.front(), question));
      for (Kind& kind : kinds) {
        if (kind.question != question) continue;
        Asked& one = kind.peers == 1 ? asked[1] : asked.back();
        PEGA_TRY_LET(const Round with, nodes->ask_often(one, question));
        if (round == 0) continue;  // Warms up.
        kind.latency.add(with.us, alone.us);
        kind.cpu.add({with.own_cpu_us}, {alone.own_cpu_us});
        kind.peers_cpu_us.push_back(with.peers_cpu_us);
      }
    }
  }
  for (const Asked& one : asked) PEGA_TRY(expect_answers(*nodes, one));
  std::vector<Figure> figures;
  for (const Kind& kind : kinds) PEGA_TRY(report(kind, options.keys, figures));
  progress("one peer is stopped");
  PEGA_TRY(stand_still(*nodes, options, figures));
  return Report{.title = "pegaflow-perf miss, nodes on this machine",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
