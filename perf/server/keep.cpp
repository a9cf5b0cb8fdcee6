/// \file
/// `pegaflow-perf keep`: a server is killed, and the next one continues with its pool.

#include <iostream>
#include <string>
#include <vector>

#include <kj/async-io.h>

#include "base/units.h"
#include "harness/server_process.h"
#include "harness/wire_client.h"
#include "perf/lib/command.h"
#include "perf/lib/keys.h"

namespace pegaflow::perf {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kSlice = 256;

struct KeepOptions {
  CommonOptions common;
  std::int64_t blocks = 1 << 20;
  std::int64_t rounds = 7;
};

/// A server whose pool a keeper holds; both end with it.
class KeptServer {
 public:
  static Result<std::unique_ptr<KeptServer>> start(const KeepOptions& options) {
    PEGA_TRY_LET(harness::ServerProcess server,
                 harness::ServerProcess::start({.program = options.common.server,
                                                .pool_size = std::to_string(options.blocks * kPage),
                                                .arguments = {"--keep", "yes"}}));
    return std::unique_ptr<KeptServer>(new KeptServer(std::move(server)));
  }
  ~KeptServer() {
    server.process().kill();
    auto released =
        harness::Child::start({.command = {harness::find_server().value_or("pegaflow-server"),
                                           "--release", "--addr", "unix:" + server.socket_path()},
                               .log_file = server.directory() + "/release"});
    if (released) (void)released->wait_for_exit(std::chrono::seconds(10));
  }
  KeptServer(const KeptServer&) = delete;
  KeptServer& operator=(const KeptServer&) = delete;

  harness::ServerProcess server;

 private:
  explicit KeptServer(harness::ServerProcess started) : server(std::move(started)) {}
};

Result<std::unique_ptr<harness::WireClient>> engine(kj::AsyncIoContext& io,
                                                    const harness::ServerProcess& server,
                                                    std::int64_t blocks) {
  PEGA_TRY_LET(auto client, harness::WireClient::connect(io, server.socket_path()));
  PEGA_TRY(client->register_worker("perf", kPage, static_cast<std::uint64_t>(blocks)));
  return client;
}

/// Saves blocks until the pool is full; their pages stay as they are.
Result<std::vector<BlockKey>> fill(harness::WireClient& client, const KeepOptions& options) {
  const KeySource all(static_cast<std::uint64_t>(options.common.seed));
  std::vector<BlockKey> last;
  for (std::int64_t saved = 0; saved < options.blocks; saved += kSlice) {
    last = all.range(static_cast<std::uint64_t>(saved), kSlice);
    const JobId job = client.job(static_cast<std::uint64_t>(saved) + 1);
    PEGA_TRY(client.reserve(job, last));
    PEGA_TRY(client.publish(job));
  }
  return last;
}

struct Times {
  std::vector<double> serving;
  std::vector<double> first_hit;
};

double seconds_since(TimePoint start) {
  return std::chrono::duration<double>(SteadyClock().now() - start).count();
}

/// Kills the server and starts the next one; looks for blocks that the first one had.
Result<void> restart(kj::AsyncIoContext& io, KeptServer& kept, const KeepOptions& options,
                     const std::vector<BlockKey>& keys, Times& times) {
  kept.server.process().kill();
  PEGA_TRY(kept.server.relaunch());
  PEGA_TRY(kept.server.wait_until_ready());
  times.serving.push_back(std::chrono::duration<double>(kept.server.start_time()).count());
  const TimePoint ready = SteadyClock().now();
  PEGA_TRY_LET(const auto client, engine(io, kept.server, options.blocks));
  const Id128 token = Id128::random();
  PEGA_TRY_LET(const auto found, client->claim(token, keys));
  if (found.blocks != keys.size()) {
    return fail(Errc::kInternal, "{} of {} blocks are there after a kill", found.blocks,
                keys.size());
  }
  PEGA_TRY(client->open(token, 0, found.blocks, 1));
  times.first_hit.push_back(seconds_since(ready));
  PEGA_TRY(client->end_load(1, token));
  return client->goodbye();
}

Result<double> plain_start(const KeepOptions& options) {
  PEGA_TRY_LET(
      harness::ServerProcess server,
      harness::ServerProcess::start(
          {.program = options.common.server, .pool_size = std::to_string(options.blocks * kPage)}));
  const double took = std::chrono::duration<double>(server.start_time()).count();
  PEGA_TRY(server.stop());
  return took;
}

Figure figure_of(std::string run, const Samples& samples, const Params& params, double target) {
  return {.run = std::move(run),
          .params = params,
          .figure = samples.median(),
          .unit = "s",
          .bound = target,
          .bound_name = "target",
          .target = 1,
          .n = samples.count(),
          .spread = fmt::format("{} to {}", format_number(samples.quantile(0)),
                                format_number(samples.quantile(1)))};
}

}  // namespace

Outcome run_keep(int argc, const char* const* argv) {
  KeepOptions options;
  OptionTable table(
      "pegaflow-perf keep",
      "Kills a server whose pool a keeper holds, and measures the time until the next "
      "one serves its blocks, beside the start of a server with an empty pool.");
  declare(table, options.common);
  table.integer("blocks", options.blocks, 1024, 1 << 24, "Blocks of 4 KiB in the pool.");
  table.integer("rounds", options.rounds, 1, 1000, "Kills.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  auto io = kj::setupAsyncIo();
  PEGA_TRY_LET(const auto kept, KeptServer::start(options));
  std::vector<BlockKey> keys;
  {
    progress(fmt::format("saving {} blocks", options.blocks));
    PEGA_TRY_LET(const auto client, engine(io, kept->server, options.blocks));
    PEGA_TRY_LET(keys, fill(*client, options));
  }
  Times times;
  std::vector<double> plain;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    progress(fmt::format("round {} of {}", round + 1, options.rounds));
    PEGA_TRY(restart(io, *kept, options, keys, times));
    PEGA_TRY_LET(const double took, plain_start(options));
    plain.push_back(took);
  }
  PEGA_TRY_LET(const Samples serving, Samples::of(std::move(times.serving)));
  PEGA_TRY_LET(const Samples first_hit, Samples::of(std::move(times.first_hit)));
  PEGA_TRY_LET(const Samples empty, Samples::of(std::move(plain)));
  const Params params = {{"blocks", options.blocks}, {"block_bytes", std::int64_t{kPage}}};
  std::vector<Figure> figures = {
      figure_of("killed, from the next start to serving", serving, params, 0.8),
      figure_of("from serving to the first hit", first_hit, params, 0.1)};
  figures[0].spread +=
      fmt::format("; with an empty pool of that size {}", format_number(empty.median()));
  return Report{.title = "pegaflow-perf keep",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
