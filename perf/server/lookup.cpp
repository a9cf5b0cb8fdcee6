/// \file
/// `pegaflow-perf lookup`: the cost of a lookup, beside an echo of the same bytes.

#include <functional>
#include <iostream>
#include <thread>

#include "client/cache_session.h"
#include "harness/server_process.h"
#include "perf/lib/command.h"
#include "perf/lib/echo.h"
#include "perf/lib/workload.h"
#include "perf/server/kind_chains.h"

namespace pegaflow::perf {
namespace {

constexpr std::size_t kManyKeys = 8192;  // 128 Ki tokens; the limit of one call.
constexpr double kMicrosecondsPerMillisecond = 1000;

/// Microseconds that `call` takes.
template <typename Call>
double timed(Call&& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

/// Every lookup must find all its keys: a miss is cheaper than a hit.
Result<void> expect_all(const Result<std::uint32_t>& found, std::size_t keys) {
  if (!found) return tl::unexpected<Error>(found.error());
  if (*found != keys) return fail(Errc::kInternal, "{} of {} keys were found", *found, keys);
  return {};
}

struct Lookups {
  Rounds::Comparison and_back;  // Beside an echo that returns all bytes.
  Rounds::Comparison there;     // Beside an echo whose response is as short as a lookup's.
  Rounds::Comparison cpu;  // Processor time of the server, and of the echo that returns all bytes.
};

/// The two programs that are compared.
struct Contest {
  harness::WireClient& client;
  const harness::Child& server;
  EchoClient& echo;
  const harness::Child& echo_server;
};

/// The keys of a call, by its number: new ones each time, so that the server's index is as cold as
/// with real prompts.
using DrawKeys = std::function<std::vector<BlockKey>(std::uint64_t)>;

/// Returns the microseconds of each call, and the mean processor time of `process` per call.
template <typename Call>
Result<std::pair<std::vector<double>, double>> run_calls(const harness::Child& process,
                                                         const DrawKeys& keys, std::size_t calls,
                                                         std::uint64_t& draw, Call&& call) {
  std::vector<double> samples;
  PEGA_TRY_LET(const Duration begin, process.cpu_time());
  for (std::size_t i = 0; i < calls; ++i) {
    const std::vector<BlockKey> asked = keys(draw++);
    Result<void> answered;
    samples.push_back(timed([&] { answered = call(asked); }));
    PEGA_TRY(answered);
  }
  PEGA_TRY_LET(const Duration end, process.cpu_time());
  const double cpu_us = std::chrono::duration<double, std::micro>(end - begin).count();
  return std::pair(std::move(samples), cpu_us / static_cast<double>(calls));
}

/// Alternates rounds of lookups, of echoes with a long response and of echoes with a short one.
Result<Lookups> compare(Contest contest, const DrawKeys& keys, std::size_t count,
                        std::size_t rounds, std::size_t calls) {
  const auto lookup = [&](const std::vector<BlockKey>& asked) {
    return expect_all(perf::lookup(contest.client, asked), count);
  };
  const auto expect_bytes = [](std::size_t came, std::size_t sent) -> Result<void> {
    if (came != sent) return fail(Errc::kInternal, "the echo lost {} bytes", sent - came);
    return {};
  };
  const auto back = [&](const std::vector<BlockKey>& asked) {
    return expect_bytes(contest.echo.back(std::as_bytes(std::span(asked))),
                        asked.size() * sizeof(BlockKey));
  };
  const auto there = [&](const std::vector<BlockKey>& asked) {
    return expect_bytes(contest.echo.count(std::as_bytes(std::span(asked))),
                        asked.size() * sizeof(BlockKey));
  };
  Rounds beside_back;
  Rounds beside_there;
  Rounds cpu;
  std::uint64_t draw = 0;
  for (std::size_t round = 0; round <= rounds; ++round) {
    PEGA_TRY_LET(auto ours, run_calls(contest.server, keys, calls, draw, lookup));
    PEGA_TRY_LET(auto echoed, run_calls(contest.echo_server, keys, calls, draw, back));
    PEGA_TRY_LET(auto brief, run_calls(contest.echo_server, keys, calls, draw, there));
    if (round == 0) continue;  // Warms up caches, socket buffers and the processor.
    cpu.add({ours.second}, {echoed.second});
    beside_there.add(ours.first, std::move(brief.first));
    beside_back.add(std::move(ours.first), std::move(echoed.first));
  }
  PEGA_TRY_LET(Rounds::Comparison with_back, beside_back.compare());
  PEGA_TRY_LET(Rounds::Comparison with_there, beside_there.compare());
  PEGA_TRY_LET(Rounds::Comparison with_cpu, cpu.compare());
  return Lookups{
      .and_back = std::move(with_back), .there = std::move(with_there), .cpu = std::move(with_cpu)};
}

std::string spread_of(const Rounds::Comparison& compared) {
  return fmt::format("ratio {:.2f} to {:.2f} in {} rounds", compared.ratio_low, compared.ratio_high,
                     compared.rounds);
}

std::string spread_of(const Samples& samples, double scale) {
  return fmt::format("p10 {} to p90 {}", format_number(samples.quantile(0.1) / scale),
                     format_number(samples.quantile(0.9) / scale));
}

void report_many(const std::string& what, const Lookups& found, const Params& params,
                 std::vector<Figure>& figures) {
  constexpr double kScale = kMicrosecondsPerMillisecond;
  for (const double fraction : {0.5, 0.9, 0.99}) {
    const bool is_median = fraction == 0.5;
    Figure figure{.run = fmt::format("{}, p{:g}", what, fraction * 100),
                  .params = params,
                  .figure = found.and_back.figure.quantile(fraction) / kScale,
                  .unit = "ms",
                  .bound = found.and_back.bound.quantile(fraction) / kScale,
                  .bound_name = "echo of the same bytes",
                  .target = std::nullopt,
                  .n = found.and_back.figure.count(),
                  .spread = is_median ? spread_of(found.and_back) : ""};
    if (is_median) figure.target = 2;
    figures.push_back(std::move(figure));
  }
  figures.push_back({.run = what + ", p99",
                     .params = params,
                     .figure = found.and_back.figure.quantile(0.99) / kScale,
                     .unit = "ms",
                     .bound = 1,
                     .bound_name = "1 ms, on an idle machine only",
                     .n = found.and_back.figure.count(),
                     .spread = spread_of(found.and_back.figure, kScale)});
  figures.push_back({.run = what + ", p50",
                     .params = params,
                     .figure = found.there.figure.median() / kScale,
                     .unit = "ms",
                     .bound = found.there.bound.median() / kScale,
                     .bound_name = "the bytes one way, a short answer",
                     .target = std::nullopt,
                     .n = found.there.figure.count(),
                     .spread = spread_of(found.there)});
  figures.push_back({.run = what + ", CPU of the server",
                     .params = params,
                     .figure = found.cpu.figure.median() / kScale,
                     .unit = "ms",
                     .bound = found.cpu.bound.median() / kScale,
                     .bound_name = "CPU of the echo's server",
                     .target = std::nullopt,
                     .n = found.cpu.rounds,
                     .spread = spread_of(found.cpu)});
}

/// Lookups of one key through the client library, as by a scheduler: a ticket, then its result.
Result<Samples> ask_session(CacheSession& session, const KeySource& keys, std::uint64_t blocks,
                            std::size_t calls) {
  constexpr std::size_t kWarmUp = 200;
  std::vector<double> samples;
  for (std::size_t i = 0; i < calls + kWarmUp; ++i) {
    const BlockKey key = keys.key(i * 7919 % blocks);  // A prime: a new block each time.
    std::optional<Result<CacheSession::Answer>> answer;
    Result<void> asked;
    const double us = timed([&] {
      const Result<CacheSession::Ticket> ticket = session.lookup({&key, 1});
      if (!ticket) {
        asked = tl::unexpected<Error>(ticket.error());
        return;
      }
      answer = session.take(*ticket, std::chrono::seconds(1));
    });
    PEGA_TRY(asked);
    if (!answer) return fail(Errc::kTimeout, "a lookup of one key took over a second");
    if (!*answer) return tl::unexpected<Error>(answer->error());
    if ((*answer)->blocks != 1) return fail(Errc::kInternal, "a sealed key was not found");
    if (i >= kWarmUp) samples.push_back(us);
  }
  return Samples::of(std::move(samples));
}

Result<Samples> ask_client(const std::string& socket, const KeySource& keys, std::uint64_t blocks,
                           std::size_t calls) {
  PEGA_TRY_LET(const auto session,
               CacheSession::start({.socket_path = socket,
                                    .instance = "perf",
                                    .build = "pegaflow-perf",
                                    .lookup_deadline = std::chrono::seconds(1)}));
  if (!session->wait_for(LinkState::kReady, std::chrono::seconds(5))) {
    return fail(Errc::kPeerLost, "the client library did not connect: {}",
                session->status().detail);
  }
  return ask_session(*session, keys, blocks, calls);
}

void report_one(const Lookups& wire, const Samples& client, const Params& params,
                std::vector<Figure>& figures) {
  figures.push_back({.run = "lookup of one key, bare wire, p50",
                     .params = params,
                     .figure = wire.and_back.figure.median(),
                     .unit = "us",
                     .bound = wire.and_back.bound.median(),
                     .bound_name = "echo of the same bytes",
                     .target = std::nullopt,
                     .n = wire.and_back.figure.count(),
                     .spread = spread_of(wire.and_back)});
  figures.push_back(
      {.run = "lookup of one key, C++ client, p50",
       .params = params,
       .figure = client.median(),
       .unit = "us",
       .bound = 60,
       .bound_name = "60 us, on an idle machine only",
       .n = client.count(),
       .spread = spread_of(client, 1) + ", p99 " + format_number(client.quantile(0.99))});
}

/// All figures, alternating with the echoes of the same keys.
Result<std::vector<Figure>> measure(Contest contest, const std::string& socket,
                                    const KeySource& keys, std::int64_t blocks,
                                    std::size_t rounds) {
  const auto population = static_cast<std::uint64_t>(blocks);
  std::vector<Figure> figures;
  const auto drawn = [&](std::size_t count) {
    return [&keys, population, count](std::uint64_t draw) {
      return keys.drawn(population, count, draw);
    };
  };
  progress("8,192 keys, alternating with echoes");
  PEGA_TRY_LET(const Lookups many, compare(contest, drawn(kManyKeys), kManyKeys, rounds, 16));
  report_many("lookup of 8,192 keys", many, {{"blocks", blocks}, {"keys", std::int64_t{kManyKeys}}},
              figures);
  progress("one key");
  PEGA_TRY_LET(const Lookups one, compare(contest, drawn(1), 1, rounds, 100));
  PEGA_TRY_LET(const Samples client, ask_client(socket, keys, population, rounds * 100));
  report_one(one, client, {{"blocks", blocks}, {"keys", std::int64_t{1}}}, figures);
  return figures;
}

/// Figures of prompts with several kinds of blocks, which lie in the same index as all others.
Result<void> measure_kinds(Contest contest, std::uint64_t seed, std::int64_t blocks,
                           std::size_t rounds, std::vector<Figure>& figures) {
  progress("8,192 units with four kinds of blocks");
  PEGA_TRY_LET(const KindChains chains, KindChains::fill(contest.client, seed));
  PEGA_TRY_LET(const Lookups found,
               compare(
                   contest, [&](std::uint64_t draw) { return chains.prompt(draw); },
                   KindChains::kUnits, rounds, 16));
  report_many("lookup of 8,192 units, 4 kinds", found,
              {{"blocks", blocks}, {"keys", std::int64_t{KindChains::kUnits}}, {"kinds", 4}},
              figures);
  return {};
}

}  // namespace

Outcome run_lookup(int argc, const char* const* argv) {
  CommonOptions common;
  std::int64_t blocks = 1'000'000;
  std::int64_t rounds = 50;
  bool kinds = false;
  OptionTable table("pegaflow-perf lookup",
                    "Measures lookups over the socket in a full index, beside an echo of the same "
                    "bytes.");
  declare(table, common);
  table.integer("blocks", blocks, 1, 10'000'000, "Sealed blocks of 4 KiB; a million take 4 GiB.");
  table.integer("rounds", rounds, 1, 1000,
                "Rounds; each has 16 lookups and 16 echoes of each kind.");
  table.flag("kinds", kinds,
             "Also measure prompts of 8,192 units with full attention, windows, chunks and states; "
             "their blocks take 300 MiB more.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const Conditions conditions, begin_run(common));
  const auto population = static_cast<std::uint64_t>(blocks);
  PEGA_TRY_LET(const EchoProcess echo_process, EchoProcess::start());
  progress(fmt::format("start a server with a pool for {} blocks",
                       format_number(static_cast<double>(blocks))));
  PEGA_TRY_LET(
      harness::ServerProcess server,
      harness::ServerProcess::start({.program = common.server,
                                     .pool_size = std::to_string(pool_bytes_for(
                                         population + (kinds ? KindChains::kBlocks : 0)))}));
  kj::AsyncIoContext io = kj::setupAsyncIo();
  PEGA_TRY_LET(const auto client, harness::WireClient::connect(io, server.socket_path()));
  PEGA_TRY(client->register_worker("perf", kSmallPageBytes, 1024));
  PEGA_TRY_LET(const auto echo, EchoClient::connect(io, echo_process.socket_path()));
  progress("fill the pool");
  const KeySource keys(static_cast<std::uint64_t>(common.seed));
  std::uint64_t next_job = 1;
  PEGA_TRY(fill(*client, keys, population, next_job));

  Contest contest{.client = *client,
                  .server = server.process(),
                  .echo = *echo,
                  .echo_server = echo_process.process()};
  PEGA_TRY_LET(std::vector<Figure> figures, measure(contest, server.socket_path(), keys, blocks,
                                                    static_cast<std::size_t>(rounds)));
  if (kinds) {
    PEGA_TRY_LET(const auto other, harness::WireClient::connect(io, server.socket_path()));
    PEGA_TRY(measure_kinds({.client = *other,
                            .server = contest.server,
                            .echo = contest.echo,
                            .echo_server = contest.echo_server},
                           static_cast<std::uint64_t>(common.seed), blocks,
                           static_cast<std::size_t>(rounds), figures));
  }
  return Report{.title = "pegaflow-perf lookup",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = common.json};
}

}  // namespace pegaflow::perf
