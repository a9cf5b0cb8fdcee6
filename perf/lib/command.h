#pragma once
/// \file
/// The common part of all subcommands of pegaflow-perf.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/program/options.h"
#include "perf/lib/figures.h"

namespace pegaflow::perf {

/// The options that every subcommand takes.
struct CommonOptions {
  bool json = false;
  std::string server;     ///< Path of the program; empty: the server of this build.
  std::int64_t seed = 1;  ///< Seed of all random draws.
  bool realtime = false;
};
void declare(OptionTable& table, CommonOptions& options);

/// Enters the real-time class if --realtime is given; threads and children created later inherit
/// it. Returns the conditions of the run. Errors: kRefused without the permission.
Result<Conditions> begin_run(const CommonOptions& options);

/// The result of a run; a run without a figure is a failure.
struct Report {
  std::string title;
  std::vector<Figure> figures;
  Conditions conditions;
  bool json = false;
  std::string text{};  ///< Replaces the table of all figures unless empty.
};

/// Prints "`what` ..." on standard error: standard output is for the figures alone.
void progress(std::string_view what);

/// No value: only --help or the like was printed.
using Outcome = Result<std::optional<Report>>;

// The subcommands. Each parses its arguments; `argv[0]` is the name that --help shows.
Outcome run_lookup(int argc, const char* const* argv);
Outcome run_copy(int argc, const char* const* argv);
Outcome run_cells(int argc, const char* const* argv);
Outcome run_gpu(int argc, const char* const* argv);
Outcome run_gpu_peer(int argc, const char* const* argv);
Outcome run_start(int argc, const char* const* argv);
Outcome run_server(int argc, const char* const* argv);
Outcome run_replay(int argc, const char* const* argv);
Outcome run_pauses(int argc, const char* const* argv);
Outcome run_place(int argc, const char* const* argv);
Outcome run_net(int argc, const char* const* argv);
Outcome run_disk(int argc, const char* const* argv);
Outcome run_ssd_scan(int argc, const char* const* argv);
Outcome run_ssd_reads(int argc, const char* const* argv);
Outcome run_pull(int argc, const char* const* argv);
Outcome run_keep(int argc, const char* const* argv);
Outcome run_miss(int argc, const char* const* argv);
Outcome run_directory(int argc, const char* const* argv);

// Bodies of child processes; not shown in --help.
Result<void> run_serve_echo(std::span<const char* const> arguments);
Result<void> run_hold_pins(std::span<const char* const> arguments);
Result<void> run_hold_net(std::span<const char* const> arguments);

}  // namespace pegaflow::perf
