#pragma once
/// \file
/// Log lines: a lower-case sentence, then `key=value` fields. Hides the library behind it.
/// error: an operator must act · warn: a problem that was handled · info: rare, life cycle · debug:
/// grows with objects · trace: grows with operations. The function that handles an error logs it,
/// once.

#include <string>
#include <string_view>
#include <utility>

#include <fmt/core.h>

#include "base/error.h"

namespace pegaflow {

enum class LogLevel : int { kTrace, kDebug, kInfo, kWarn, kError, kOff };

/// Errors: kInvalidArgument that names the text and the levels.
Result<LogLevel> parse_log_level(std::string_view text);

/// Sets the destination of log lines and their lowest level. Call it before threads start. By
/// default, lines from info on go to standard error.
void set_log_level(LogLevel level);

/// Hands lines to `sink(level, line)` instead, for a host program with a log of its own. The sink
/// is called on any thread and may not log. nullptr goes back to standard error.
using LogSink = void (*)(LogLevel level, std::string_view line);
void set_log_sink(LogSink sink);

/// Logs for one module: `constexpr Log kLog{"rpc"};`. Immutable, thread-safe.
class Log {
 public:
  constexpr explicit Log(std::string_view module) : module_(module) {}

  template <typename... Args>
  void trace(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::kTrace))
      write(LogLevel::kTrace, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void debug(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::kDebug))
      write(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::kInfo))
      write(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void warn(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::kWarn))
      write(LogLevel::kWarn, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void error(fmt::format_string<Args...> format, Args&&... args) const {
    if (enabled(LogLevel::kError))
      write(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  static bool enabled(LogLevel level) noexcept;
  void write(LogLevel level, const std::string& line) const;

  std::string_view module_;
};

}  // namespace pegaflow
