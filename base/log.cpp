#include "base/log.h"

#include <atomic>
#include <memory>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "base/printable.h"

namespace pegaflow {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::atomic<LogSink> g_sink{nullptr};

spdlog::logger& stderr_logger() {
  // Never destroyed: threads may log while the process ends.
  static spdlog::logger* const logger = [] {
    auto* made =
        new spdlog::logger("pegaflow", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_level(spdlog::level::trace);
    made->set_pattern("%Y-%m-%d %H:%M:%S.%e %^%l%$ %v");
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::off;
}

}  // namespace

Result<LogLevel> parse_log_level(std::string_view text) {
  if (text == "trace") return LogLevel::kTrace;
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warn" || text == "warning") return LogLevel::kWarn;
  if (text == "error") return LogLevel::kError;
  if (text == "off") return LogLevel::kOff;
  return fail(Errc::kInvalidArgument,
              "\"{}\" is not a log level; use trace, debug, info, warn, error or off", text);
}

void set_log_level(LogLevel level) { g_level.store(level, std::memory_order_relaxed); }
void set_log_sink(LogSink sink) { g_sink.store(sink, std::memory_order_release); }

bool Log::enabled(LogLevel level) noexcept {
  return level >= g_level.load(std::memory_order_relaxed);
}

void Log::write(LogLevel level, const std::string& line) const {
  const std::string whole = printable(fmt::format("{}: {}", module_, line));
  if (const LogSink sink = g_sink.load(std::memory_order_acquire)) {
    sink(level, whole);
  } else {
    stderr_logger().log(to_spdlog(level), "{}", whole);
  }
}

}  // namespace pegaflow
