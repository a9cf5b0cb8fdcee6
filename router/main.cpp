// pegaflow-router: parses its options and runs. Everything else is in router.cpp.
#include <cstdio>
#include <exception>

#include "base/log.h"
#include "base/program/begin.h"
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
  PEGA_TRY_LET(const auto next,
               pegaflow::begin_program(table, argc, argv, options.log_level, kLog));
  if (next == pegaflow::OptionTable::Next::kExit) return {};
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
