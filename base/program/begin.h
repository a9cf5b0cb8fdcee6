#pragma once
/// \file
/// The start that programs have in common.

#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/program/options.h"

namespace pegaflow {

/// Reads the options of a program, sets the level of its log to `log_level`, a target of `table`,
/// and reports ignored options to `log`. Prints what --help and --print-options-markdown ask for.
/// Errors: those of OptionTable::parse(); kInvalidArgument for another level.
Result<OptionTable::Next> begin_program(OptionTable& table, int argc, char** argv,
                                        const std::string& log_level, const Log& log);

}  // namespace pegaflow
