// pegaflow-server: reads its options and runs. Everything else is in server.cpp.
#include <cstdio>
#include <iostream>
#include <string_view>

#include "base/log.h"
#include "base/program/options.h"
#include "base/runtime_directories.h"
#include "base/units.h"
#include "engine/pool/pool.h"
#include "server/options.h"
#include "server/server.h"

namespace {

constexpr pegaflow::Log kLog{"server"};

pegaflow::Result<void> run(int argc, char** argv) {
  pegaflow::server::ServerOptions options;
  pegaflow::OptionTable table("pegaflow-server",
                              "Keeps KV cache of LLM inference engines in this node's memory.");
  options.declare(table);
  if (argc == 2 && std::string_view(argv[1]) == "--print-options-markdown") {
    std::cout << table.markdown();
    return {};
  }
  PEGA_TRY_LET(options.pool_size_bytes, pegaflow::engine::default_pool_bytes());
  PEGA_TRY_LET(const auto next, table.parse(argc, argv, std::cout));
  if (next == pegaflow::OptionTable::Next::kExit) return {};
  const auto level = pegaflow::parse_log_level(options.log_level);
  if (!level) return pegaflow::fail(level.error().code, "--log-level: {}", level.error().detail);
  pegaflow::set_log_level(*level);
  for (const std::string& sentence : table.ignored()) kLog.warn("{}", sentence);
  if (options.release) {
    return pegaflow::server::release_kept_pool(options,
                                               pegaflow::RuntimeDirectories::from_environment());
  }
  options.pool_size_is_chosen = table.is_given("pool-size");
  if (!options.pool_size_is_chosen) {
    kLog.info("pool size chosen: 30 GiB or half of the free memory pool={}",
              pegaflow::format_bytes(options.pool_size_bytes));
  }
  return pegaflow::server::run_server(options, pegaflow::RuntimeDirectories::from_environment());
}

}  // namespace

int main(int argc, char** argv) {
  const auto done = run(argc, argv);
  if (done) return 0;
  std::fprintf(stderr, "pegaflow-server: %s\n", done.error().detail.c_str());
  return 1;
}
