#include "perf/lib/command.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <iostream>

#include <sched.h>

#include "perf/lib/echo.h"

namespace pegaflow::perf {

void declare(OptionTable& table, CommonOptions& options) {
  table.flag("json", options.json, "Print one JSON object per line instead of a table.");
  table.text("server", options.server,
             "The pegaflow-server to measure; by default that of the same build.");
  table.integer("seed", options.seed, 0, INT64_MAX,
                "Seed of all random draws; equal seeds give equal workloads.");
  table.flag("realtime", options.realtime,
             "Run ahead of all other programs (SCHED_FIFO, as root): for a busy machine.");
}

Result<Conditions> begin_run(const CommonOptions& options) {
  Conditions conditions = conditions_now(static_cast<std::uint64_t>(options.seed));
  if (options.realtime) {
    const sched_param lowest{.sched_priority = 1};
    if (::sched_setscheduler(0, SCHED_FIFO, &lowest) != 0) {
      return fail(Errc::kRefused, "--realtime: {}; it needs root or CAP_SYS_NICE",
                  std::strerror(errno));
    }
    conditions.realtime = true;
  }
  return conditions;
}

void progress(std::string_view what) { std::cerr << what << " ...\n" << std::flush; }

Result<void> run_serve_echo(std::span<const char* const> arguments) {
  const std::string_view text = arguments.size() == 1 ? arguments[0] : "";
  int listener = -1;
  if (std::from_chars(text.data(), text.data() + text.size(), listener).ec != std::errc()) {
    return fail(Errc::kInvalidArgument, "serve-echo: the argument is not a descriptor number");
  }
  return serve_echo(listener);
}

}  // namespace pegaflow::perf
