/// \file
/// pegaflow-perf: measures figures beside their bounds, on servers that it starts.

#include <iostream>
#include <string_view>

#include "base/log.h"
#include "perf/lib/command.h"
#include "version.h"

namespace {

using namespace pegaflow;        // NOLINT(google-build-using-namespace): this is main.
using namespace pegaflow::perf;  // NOLINT(google-build-using-namespace)

struct Subcommand {
  std::string_view name;
  std::string_view sentence;
  Outcome (*run)(int, const char* const*);
};

constexpr Subcommand kSubcommands[] = {
    {"lookup", "lookups of 8,192 keys and of one key, beside an echo of the same bytes",
     run_lookup},
    {"copy", "copies between pool and engine memory, beside memcpy of the same bytes", run_copy},
    {"cells", "copies of blocks that tensor-parallel sizes share, beside those of one size",
     run_cells},
    {"gpu", "copies between pool and GPU, idle and beside matrix products", run_gpu},
    {"gpu_peer", "blocks out of another engine's GPU, beside contiguous copies from GPU to GPU",
     run_gpu_peer},
    {"start", "from start to ready, beside threads that only touch the same memory", run_start},
    {"server", "wake-ups when idle, memory per block, longest event-loop iteration, CPU of saves",
     run_server},
    {"replay", "a request trace through pools of chosen sizes and eviction policies", run_replay},
    {"pauses", "hints about conversations that pause, over a request trace, in a simulated pool",
     run_pauses},
    {"place", "policies of a router over a request trace, on simulated nodes in virtual time",
     run_place},
    {"net", "pages from another node, beside plain sockets that carry the same bytes", run_net},
    {"disk", "reads and writes of a disk, beside fio with the same file and bytes in flight",
     run_disk},
    {"ssd_scan", "how fast the blocks of a disk are found at a start, and their memory",
     run_ssd_scan},
    {"ssd_reads", "processor time of a server that reads blocks from a disk, beside fio and a hash",
     run_ssd_reads},
    {"pull", "a prefix from another node: the first page at the engine, beside all of them",
     run_pull},
    {"keep", "a killed server's pool in the next one, beside the start of an empty one", run_keep},
    {"miss", "lookups of missing keys on a node with peers, beside a node without", run_miss},
    {"directory", "claims on nodes with a directory on Redis, also while it is down",
     run_directory},
};

void print_help(std::ostream& out) {
  out << "Measures PegaFlow. Each figure stands beside its bound from the same run.\n\n"
         "usage: pegaflow-perf SUBCOMMAND [OPTIONS]\n\n";
  for (const Subcommand& subcommand : kSubcommands) {
    out << fmt::format("  {:<10} {}\n", subcommand.name, subcommand.sentence);
  }
  out << "\nEach subcommand starts the servers that it needs and takes at most 60 s, disk, "
         "replay, place, directory, gpu and gpu_peer some minutes.\n"
         "`pegaflow-perf SUBCOMMAND --help` lists its options; --json prints one object per "
         "line.\n";
}

int fail_with(const Error& error) {
  std::cerr << "pegaflow-perf: " << to_string(error) << '\n';
  return error.code == Errc::kInvalidArgument ? 2 : 1;
}

int publish(const Outcome& outcome) {
  if (!outcome) return fail_with(outcome.error());
  if (!*outcome) return 0;
  const Report& report = **outcome;
  if (report.figures.empty()) return fail_with({Errc::kInternal, "nothing was measured"});
  if (report.json) {
    for (const Figure& figure : report.figures) {
      std::cout << json_line(figure, report.conditions) << '\n';
    }
  } else {
    std::cout << (report.text.empty() ? table(report.title, report.figures, report.conditions)
                                      : report.text);
  }
  return 0;
}

int run_child(const Result<void>& ended) { return ended ? 0 : fail_with(ended.error()); }

}  // namespace

int main(int argc, char** argv) {
  const std::string_view word = argc > 1 ? argv[1] : "";
  if (word.empty() || word == "--help" || word == "-h" || word == "help") {
    print_help(word.empty() ? std::cerr : std::cout);
    return word.empty() ? 2 : 0;
  }
  if (word == "--version") {
    std::cout << "pegaflow-perf " << kVersion << '\n';
    return 0;
  }
  set_log_level(LogLevel::kWarn);
  const std::span<const char* const> arguments(argv + 2, static_cast<std::size_t>(argc - 2));
  try {
    for (const Subcommand& subcommand : kSubcommands) {
      if (subcommand.name == word) return publish(subcommand.run(argc - 1, argv + 1));
    }
    if (word == "serve-echo") return run_child(run_serve_echo(arguments));
    if (word == "hold-pins") return run_child(run_hold_pins(arguments));
    if (word == "hold-net") return run_child(run_hold_net(arguments));
  } catch (const std::exception& problem) {
    return fail_with({Errc::kInternal, problem.what()});
  }
  return fail_with({Errc::kInvalidArgument,
                    fmt::format("there is no subcommand \"{}\"; --help lists them", word)});
}
