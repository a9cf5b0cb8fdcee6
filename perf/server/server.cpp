/// \file
/// `pegaflow-perf server`: the cost of an idle server, of a full one, and of a client that dies
/// with many pins.

#include <algorithm>
#include <iostream>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include "client/cache_session.h"
#include "client/mover.h"
#include "harness/engine_memory.h"
#include "harness/server_process.h"
#include "perf/lib/command.h"
#include "perf/lib/workload.h"
#include "perf/server/turns.h"
#include "transport/host/host_device.h"

namespace pegaflow::perf {
namespace {

constexpr std::string_view kPoolMapping = "memfd:pegaflow-pool";
constexpr std::string_view kEvictions = "pegaflow_cache_block_evictions_total";
constexpr double kNoTurnAbove = 500;  // us

double value_of(const harness::ServerProcess::Metrics& metrics, std::string_view name) {
  const auto found = metrics.find(name);
  return found == metrics.end() ? -1 : found->second;
}

/// Reports the longest event-loop iteration of the RPC thread between two readings: in processor
/// time, which other programs do not disturb, and by the clock, as a caller sees it.
Result<void> report_turns(const harness::ServerProcess::Metrics& before,
                          const harness::ServerProcess::Metrics& after, const std::string& run,
                          const Params& params, std::vector<Figure>& figures) {
  struct Kind {
    const char* what;
    const char* histogram;
    const char* longest;
    const char* bound_name;
  };
  constexpr Kind kKinds[] = {
      {"processor time", "pegaflow_rpc_turn_cpu_seconds", "pegaflow_rpc_turn_cpu_longest_seconds",
       "500 us"},
      {"by the clock", "pegaflow_rpc_turn_seconds", "pegaflow_rpc_turn_longest_seconds",
       "500 us, on an idle machine only"},
  };
  for (const Kind& kind : kKinds) {
    PEGA_TRY_LET(const Turns turns, turns_between(before, after, kind.histogram, kind.longest));
    figures.push_back({.run = fmt::format("longest turn, {}, {}", run, kind.what),
                       .params = params,
                       .figure = turns.longest_seconds * 1e6,
                       .unit = "us",
                       .bound = kNoTurnAbove,
                       .bound_name = kind.bound_name,
                       .n = turns.count,
                       .spread = fmt::format("{} above 500 us", turns.above_500us)});
  }
  return {};
}

struct ServerBench {
  CommonOptions common;
  std::int64_t blocks = 1'048'576;
  std::int64_t pins = 100'000;
  std::int64_t repetitions = 300;
  Duration idle = std::chrono::seconds(10);
};

// ---- idle

/// An idle engine: a worker and a scheduler, as in one vLLM.
struct IdleEngine {
  std::unique_ptr<harness::EngineMemory> memory;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Mover> mover;
  std::unique_ptr<CacheSession> session;
};

Result<IdleEngine> start_engine(const harness::ServerProcess& server, int number) {
  IdleEngine engine;
  PEGA_TRY_LET(harness::EngineMemory memory,
               harness::EngineMemory::create(
                   {.segments = 1, .segment_bytes = kSmallPageBytes, .blocks = 64}));
  engine.memory = std::make_unique<harness::EngineMemory>(std::move(memory));
  PEGA_TRY_LET(engine.device, HostDevice::create({}));
  const LinkOptions link{.socket_path = server.socket_path(),
                         .instance = fmt::format("idle-{}", number),
                         .build = "pegaflow-perf"};
  PEGA_TRY_LET(engine.mover,
               Mover::start({.link = link, .factors = {{"program", "pegaflow-perf idle"}}},
                            engine.memory->layout(), *engine.device));
  PEGA_TRY_LET(engine.session, CacheSession::start(link));
  if (!engine.mover->wait_for(LinkState::kReady, std::chrono::seconds(10)) ||
      !engine.session->wait_for(LinkState::kReady, std::chrono::seconds(10))) {
    return fail(Errc::kPeerLost, "engine {} did not connect: {} {}", number,
                engine.mover->status().detail, engine.session->status().detail);
  }
  return engine;
}

Result<void> measure_idle(const ServerBench& options, std::vector<Figure>& figures) {
  constexpr int kEngines = 8;
  PEGA_TRY_LET(
      const harness::ServerProcess server,
      harness::ServerProcess::start({.program = options.common.server,
                                     .pool_size = std::to_string(std::uint64_t{64} << 20)}));
  std::vector<IdleEngine> engines;
  for (int i = 0; i < kEngines; ++i) {
    PEGA_TRY_LET(IdleEngine engine, start_engine(server, i));
    engines.push_back(std::move(engine));
  }
  // Work left over from the start ends within this second; afterwards nothing should happen.
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const pid_t server_pid = server.process().pid();
  PEGA_TRY_LET(const std::uint64_t server_before, harness::voluntary_switches(server_pid));
  PEGA_TRY_LET(const std::uint64_t own_before, harness::voluntary_switches(::getpid(), ::gettid()));
  PEGA_TRY_LET(const Duration cpu_before, server.process().cpu_time());
  std::this_thread::sleep_for(options.idle);
  PEGA_TRY_LET(const Duration cpu_after, server.process().cpu_time());
  PEGA_TRY_LET(const std::uint64_t server_after, harness::voluntary_switches(server_pid));
  PEGA_TRY_LET(const std::uint64_t own_after, harness::voluntary_switches(::getpid(), ::gettid()));

  const double seconds = std::chrono::duration<double>(options.idle).count();
  const Params params = {{"engines", std::int64_t{kEngines}},
                         {"seconds", static_cast<std::int64_t>(seconds)}};
  const std::string over = fmt::format("over {:g} s", seconds);
  figures.push_back({.run = "idle with 8 engines: wake-ups of the server",
                     .params = params,
                     .figure = static_cast<double>(server_after - server_before),
                     .unit = "switches",
                     .bound = 0,
                     .bound_name = "no periodic wake-up",
                     .n = 1,
                     .spread = over});
  figures.push_back({.run = "idle with 8 engines: wake-ups of the client library's threads",
                     .params = params,
                     .figure = static_cast<double>(own_after - own_before),
                     .unit = "switches",
                     .bound = 0,
                     .bound_name = "no periodic wake-up",
                     .n = 1,
                     .spread = over});
  figures.push_back(
      {.run = "idle with 8 engines: CPU of the server",
       .params = params,
       .figure = std::chrono::duration<double>(cpu_after - cpu_before).count() / seconds * 100,
       .unit = "% of a core",
       .bound = 1,
       .bound_name = "1 % of a core",
       .n = 1,
       .spread = over});
  return {};
}

// ---- a full pool

Result<void> measure_memory(const harness::ServerProcess& server, const Params& params,
                            double blocks, std::vector<Figure>& figures) {
  PEGA_TRY_LET(const harness::Resident resident,
               harness::resident_of(server.process().pid(), kPoolMapping));
  if (resident.pool_bytes == 0) {
    return fail(Errc::kInternal, "the server has no mapping named {}", kPoolMapping);
  }
  // The whole process counts, code and libraries too, because an operator has to provide for it.
  figures.push_back(
      {.run = "memory beside the pool, a block",
       .params = params,
       .figure = static_cast<double>(resident.beside_bytes) / blocks,
       .unit = "B",
       .bound = 128,
       .bound_name = "128 B",
       .n = 1,
       .spread = fmt::format("{} MiB in all",
                             format_number(static_cast<double>(resident.beside_bytes) / 1048576))});
  return {};
}

Result<void> measure_save(const ServerBench& options, const harness::ServerProcess& server,
                          harness::WireClient& client, const KeySource& keys, std::uint64_t blocks,
                          std::uint64_t& next_job, const Params& params,
                          std::vector<Figure>& figures) {
  PEGA_TRY_LET(const harness::ServerProcess::Metrics before, server.metrics());
  std::vector<double> samples;
  PEGA_TRY_LET(const Duration begin, server.process().cpu_time());
  Duration last = begin;
  for (std::int64_t i = 0; i < options.repetitions; ++i) {
    const std::uint64_t first = blocks + static_cast<std::uint64_t>(i) * kJobBlocks;
    const JobId job = client.job(next_job++);
    PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
                 client.reserve(job, keys.range(first, kJobBlocks)));
    if (std::count(slots.begin(), slots.end(), harness::WireClient::kNoFrame) != 0) {
      return fail(Errc::kOutOfCapacity, "a reserve in a full pool got no slot for some blocks");
    }
    PEGA_TRY(client.publish(job));
    PEGA_TRY_LET(const Duration now, server.process().cpu_time());
    samples.push_back(std::chrono::duration<double, std::milli>(now - last).count());
    last = now;
  }
  PEGA_TRY_LET(const harness::ServerProcess::Metrics after, server.metrics());
  const double evicted = value_of(after, kEvictions) - value_of(before, kEvictions);
  const auto saved = static_cast<double>(options.repetitions) * kJobBlocks;
  if (evicted < saved) {
    return fail(Errc::kInternal, "{} evictions for {} reserved blocks: the pool was not full",
                evicted, saved);
  }
  PEGA_TRY_LET(const Samples each, Samples::of(std::move(samples)));
  const double mean = std::chrono::duration<double, std::milli>(last - begin).count() /
                      static_cast<double>(options.repetitions);
  // The mean, because it includes the work that the server does after its response.
  figures.push_back(
      {.run = "reserve + publish of 4,096 blocks with eviction, CPU of the server",
       .params = params,
       .figure = mean,
       .unit = "ms",
       .bound = 1.5,
       .bound_name = "1.5 ms",
       .n = each.count(),
       .spread = fmt::format("mean; p10 {} to p90 {}", format_number(each.quantile(0.1)),
                             format_number(each.quantile(0.9)))});
  return report_turns(before, after, "saves with eviction", params, figures);
}

// ---- many pins end at once

/// Reads /metrics until `is_over` returns true. The RPC thread renders the page between its other
/// event-loop iterations.
template <typename IsOver>
Result<harness::ServerProcess::Metrics> wait_until(const harness::ServerProcess& server,
                                                   std::string_view what, const IsOver& is_over) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (true) {
    PEGA_TRY_LET(harness::ServerProcess::Metrics metrics, server.metrics());
    if (is_over(metrics)) return metrics;
    if (std::chrono::steady_clock::now() > deadline) {
      return fail(Errc::kTimeout, "after 20 s not yet: {}", what);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

Result<void> measure_disconnect(const ServerBench& options, const harness::ServerProcess& server,
                                std::uint64_t blocks, const Params& params,
                                std::vector<Figure>& figures) {
  const auto pins = std::min<std::uint64_t>(static_cast<std::uint64_t>(options.pins), blocks / 4);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail_errno(errno, "make a pipe");
  const UniqueFd from_child(ends[0]);
  UniqueFd to_us(ends[1]);
  PEGA_TRY_LET(const std::string program, harness::own_path());
  PEGA_TRY_LET(
      harness::Child holder,
      harness::Child::start({.command = {program, "hold-pins", server.socket_path(),
                                         std::to_string(options.common.seed), std::to_string(pins),
                                         std::to_string(to_us.get())},
                             .log_file = {},
                             .inherited_fd = to_us.get()}));
  to_us.reset();  // So that the end of the child ends the read below.
  char held = 0;
  if (::read(from_child.get(), &held, 1) != 1) {
    return fail(Errc::kInternal, "the child that pins blocks ended early");
  }
  PEGA_TRY_LET(const harness::ServerProcess::Metrics before, server.metrics());
  if (value_of(before, "pegaflow_pins") < static_cast<double>(pins)) {
    return fail(Errc::kInternal, "the server counts {} pins, not {}",
                value_of(before, "pegaflow_pins"), pins);
  }
  holder.kill();
  PEGA_TRY_LET(const harness::ServerProcess::Metrics after,
               wait_until(server, "all pins of the dead client are gone", [](const auto& metrics) {
                 return value_of(metrics, "pegaflow_pins") == 0;
               }));
  Params with_pins = params;
  with_pins.emplace_back("pins", static_cast<std::int64_t>(pins));
  return report_turns(
      before, after,
      fmt::format("end of a client with {} pins", format_number(static_cast<double>(pins))),
      with_pins, figures);
}

/// Measures the first save after a client died: the allocator has got a hundred thousand pieces
/// back, and the next large message finds them unsorted.
Result<void> measure_next_save(const harness::ServerProcess& server, harness::WireClient& client,
                               const KeySource& keys, std::uint64_t blocks, std::uint64_t& next_job,
                               const Params& params, std::vector<Figure>& figures) {
  PEGA_TRY_LET(const harness::ServerProcess::Metrics before, server.metrics());
  const JobId job = client.job(next_job++);
  // Keys that no other part of the run uses.
  PEGA_TRY(client.reserve(job, keys.range(blocks + (std::uint64_t{1} << 40), kJobBlocks)));
  PEGA_TRY(client.publish(job));
  PEGA_TRY_LET(const harness::ServerProcess::Metrics after, server.metrics());
  return report_turns(before, after, "the first save after that", params, figures);
}

Result<void> measure_cleanup(const harness::ServerProcess& server, const Params& params,
                             std::uint64_t blocks, std::vector<Figure>& figures) {
  PEGA_TRY_LET(const harness::ServerProcess::Metrics before, server.metrics());
  PEGA_TRY(server.post("/cache/memory/cleanup"));
  PEGA_TRY_LET(const harness::ServerProcess::Metrics after,
               wait_until(server, "the pool is empty", [](const auto& metrics) {
                 return value_of(metrics, "pegaflow_pool_used_bytes") == 0;
               }));
  return report_turns(
      before, after,
      fmt::format("cleanup of {} blocks", format_number(static_cast<double>(blocks))), params,
      figures);
}

Result<void> measure_full(const ServerBench& options, std::vector<Figure>& figures) {
  const std::uint64_t unit = (std::uint64_t{64} << 20) / kSmallPageBytes;
  const std::uint64_t wanted =
      (static_cast<std::uint64_t>(options.blocks) + unit - 1) / unit * unit;
  PEGA_TRY_LET(
      const harness::ServerProcess server,
      harness::ServerProcess::start({.program = options.common.server,
                                     .pool_size = std::to_string(wanted * kSmallPageBytes)}));
  kj::AsyncIoContext io = kj::setupAsyncIo();
  PEGA_TRY_LET(const auto client, harness::WireClient::connect(io, server.socket_path()));
  PEGA_TRY_LET(const harness::WireClient::Registered registered,
               client->register_worker("perf", kSmallPageBytes, 1024));
  const std::uint64_t blocks = registered.pool_bytes / kSmallPageBytes;
  const KeySource keys(static_cast<std::uint64_t>(options.common.seed));
  std::uint64_t next_job = 1;
  PEGA_TRY(fill(*client, keys, blocks, next_job));
  const Params params = {{"blocks", static_cast<std::int64_t>(blocks)}};
  PEGA_TRY(measure_memory(server, params, static_cast<double>(blocks), figures));
  progress("a client that pins blocks dies");
  PEGA_TRY(measure_disconnect(options, server, blocks, params, figures));
  PEGA_TRY(measure_next_save(server, *client, keys, blocks, next_job, params, figures));
  progress("reserve and publish with eviction");
  PEGA_TRY(measure_save(options, server, *client, keys, blocks, next_job, params, figures));
  progress("cleanup");
  return measure_cleanup(server, params, blocks, figures);
}

}  // namespace

Outcome run_server(int argc, const char* const* argv) {
  ServerBench options;
  OptionTable table("pegaflow-perf server",
                    "Measures the cost of an idle server, of a full one, and of a client that dies "
                    "with many pins.");
  declare(table, options.common);
  table.integer("blocks", options.blocks, 1, 10'000'000,
                "Sealed blocks of 4 KiB, rounded up to a multiple of 64 MiB.");
  table.integer("pins", options.pins, 1, 1'000'000,
                "Pins of the client that dies; at most a quarter of the blocks.");
  table.integer("repetitions", options.repetitions, 1, 100'000,
                "Repetitions of reserve and publish.");
  table.duration("idle", options.idle, std::chrono::seconds(1), std::chrono::minutes(10),
                 "Idle time during which wake-ups are counted.");
  PEGA_TRY_LET(const OptionTable::Next next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return std::nullopt;

  PEGA_TRY_LET(const Conditions conditions, begin_run(options.common));
  std::vector<Figure> figures;
  progress("8 idle engines");
  PEGA_TRY(measure_idle(options, figures));
  progress(fmt::format("fill a server with {} blocks",
                       format_number(static_cast<double>(options.blocks))));
  PEGA_TRY(measure_full(options, figures));
  return Report{.title = "pegaflow-perf server",
                .figures = std::move(figures),
                .conditions = conditions,
                .json = options.common.json};
}

}  // namespace pegaflow::perf
