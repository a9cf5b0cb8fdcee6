// pegaflow-index: the router's index without its proxy. It tells others what engines have cached.
#include <cstdio>
#include <exception>

#include "base/log.h"
#include "base/program/begin.h"
#include "base/program/options.h"
#include "router/config/options.h"
#include "router/http/log.h"
#include "router/router.h"

namespace {

constexpr pegaflow::Log kLog{"index"};

pegaflow::Result<void> run(int argc, char** argv) {
  pegaflow::router::g_log = kLog;
  pegaflow::router::RouterOptions options;
  pegaflow::OptionTable table("pegaflow-index",
                              "Tells gateways which engine has most of a prompt cached, and what "
                              "a request would cost at each.");
  options.declare_index(table);
  PEGA_TRY_LET(const auto next,
               pegaflow::begin_program(table, argc, argv, options.log_level, kLog));
  if (next == pegaflow::OptionTable::Next::kExit) return {};
  PEGA_TRY(options.check_index());
  return pegaflow::router::run_router(options);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto done = run(argc, argv);
    if (done) return 0;
    std::fprintf(stderr, "pegaflow-index: %s\n", done.error().detail.c_str());
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "pegaflow-index: %s\n", problem.what());
  }
  return 1;
}
