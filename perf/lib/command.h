#pragma once
/// \file
/// What every subcommand of pegaflow-perf shares.

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
  std::string server;     ///< Path of the program; empty: the one of this build.
  std::int64_t seed = 1;  ///< Of everything drawn by chance.
  bool realtime = false;
};
void declare(OptionTable& table, CommonOptions& options);

/// Takes the real-time class if asked to, for this thread and all threads and children that it
/// makes from now on. Returns the conditions of the run. Errors: kRefused when we may not.
Result<Conditions> begin_run(const CommonOptions& options);

/// What was measured; a run without a figure is a failure.
struct Report {
  std::string title;
  std::vector<Figure> figures;
  Conditions conditions;
  bool json = false;
  std::string text{};  ///< What people read in place of a table of all figures, unless empty.
};

/// "fill a pool with 1,000,000 blocks ..." on standard error, so that --json stays clean.
void progress(std::string_view what);

/// No value: --help or the like was answered.
using Outcome = Result<std::optional<Report>>;

// The subcommands; each parses its own arguments. `argv[0]` is the name that --help shows.
Outcome run_lookup(int argc, const char* const* argv);
Outcome run_copy(int argc, const char* const* argv);
Outcome run_gpu(int argc, const char* const* argv);
Outcome run_start(int argc, const char* const* argv);
Outcome run_server(int argc, const char* const* argv);
Outcome run_replay(int argc, const char* const* argv);
Outcome run_net(int argc, const char* const* argv);
Outcome run_pull(int argc, const char* const* argv);
Outcome run_miss(int argc, const char* const* argv);

// Bodies of child processes; not for people.
Result<void> run_serve_echo(std::span<const char* const> arguments);
Result<void> run_hold_pins(std::span<const char* const> arguments);
Result<void> run_hold_net(std::span<const char* const> arguments);

}  // namespace pegaflow::perf
