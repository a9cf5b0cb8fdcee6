#include "perf/command.h"

#include <charconv>
#include <iostream>

#include "perf/echo.h"

namespace pegaflow::perf {

void declare(OptionTable& table, CommonOptions& options) {
  table.flag("json", options.json, "Print one JSON object a line instead of a table.");
  table.text("server", options.server,
             "The pegaflow-server to measure; the one of the same build if not given.");
  table.integer("seed", options.seed, 0, INT64_MAX, "Repeats what a run with this seed has drawn.");
}

void progress(std::string_view what) { std::cerr << what << " ..." << std::endl; }

Result<void> run_serve_echo(std::span<const char* const> arguments) {
  const std::string_view text = arguments.size() == 1 ? arguments[0] : "";
  int listener = -1;
  if (std::from_chars(text.data(), text.data() + text.size(), listener).ec != std::errc()) {
    return fail(Errc::kInvalidArgument, "serve-echo takes the number of a descriptor");
  }
  return serve_echo(listener);
}

}  // namespace pegaflow::perf
