// pegaflow-router: parses its options and runs. Everything else is in router.cpp.
#include <cstdio>
#include <exception>
#include <iostream>
#include <string_view>

#include "base/log.h"
#include "base/program/options.h"
#include "router/config/options.h"
#include "router/router.h"

namespace {

constexpr pegaflow::Log kLog{"router"};

pegaflow::Result<void> run(int argc, char** argv) {
  pegaflow::router::RouterOptions options;
  pegaflow::OptionTable table("pegaflow-router",
                              "An HTTP proxy in front of vLLM engines that share PegaFlow's cache; "
                              "it splits requests into prefill and decode.");
  options.declare(table);
  if (argc == 2 && std::string_view(argv[1]) == "--print-options-markdown") {
    std::cout << table.markdown();
    return {};
  }
  PEGA_TRY_LET(const auto next, table.parse(argc, argv, std::cout));
  if (next == pegaflow::OptionTable::Next::kExit) return {};
  const auto level = pegaflow::parse_log_level(options.log_level);
  if (!level) return pegaflow::fail(level.error().code, "--log-level: {}", level.error().detail);
  pegaflow::set_log_level(*level);
  for (const std::string& sentence : table.ignored()) kLog.warn("{}", sentence);
  return pegaflow::router::run_router(options);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto done = run(argc, argv);
    if (done) return 0;
    std::fprintf(stderr, "pegaflow-router: %s\n", done.error().detail.c_str());
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "pegaflow-router: %s\n", problem.what());
  }
  return 1;
}
