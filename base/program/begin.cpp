#include "base/program/begin.h"

#include <iostream>
#include <string_view>

namespace pegaflow {

Result<OptionTable::Next> begin_program(OptionTable& table, int argc, char** argv,
                                        const std::string& log_level, const Log& log) {
  if (argc == 2 && std::string_view(argv[1]) == "--print-options-markdown") {
    std::cout << table.markdown();
    return OptionTable::Next::kExit;
  }
  PEGA_TRY_LET(const auto next, table.parse(argc, argv, std::cout));
  if (next == OptionTable::Next::kExit) return next;
  const auto level = parse_log_level(log_level);
  if (!level) return fail(level.error().code, "--log-level: {}", level.error().detail);
  set_log_level(*level);
  for (const std::string& sentence : table.ignored()) log.warn("{}", sentence);
  return next;
}

}  // namespace pegaflow
