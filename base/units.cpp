#include "base/units.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

namespace pegaflow {
namespace {

struct Quantity {
  double number = 0;
  std::string unit;  // Lower case, without blanks.
};

Result<Quantity> split(std::string_view text, std::string_view kind, std::string_view example) {
  Quantity quantity;
  const char* const end = text.data() + text.size();
  const auto [rest, status] =
      std::from_chars(text.data(), end, quantity.number, std::chars_format::fixed);
  if (status != std::errc() || quantity.number < 0 || !std::isfinite(quantity.number)) {
    return fail(Errc::kInvalidArgument, "\"{}\" is not a {}; write for example {}", text, kind,
                example);
  }
  for (const char* at = rest; at != end; ++at) {
    const auto letter = static_cast<unsigned char>(*at);
    if (std::isspace(letter) == 0) quantity.unit += static_cast<char>(std::tolower(letter));
  }
  return quantity;
}

constexpr double kKi = 1024;

}  // namespace

Result<std::uint64_t> parse_bytes(std::string_view text) {
  PEGA_TRY_LET(const Quantity quantity, split(text, "size", "30gb, 512mb or 4096"));
  static constexpr std::array<std::pair<std::string_view, double>, 18> kUnits{{
      {"", 1},
      {"b", 1},
      {"k", kKi},
      {"kb", kKi},
      {"kib", kKi},
      {"m", kKi * kKi},
      {"mb", kKi * kKi},
      {"mib", kKi * kKi},
      {"g", kKi * kKi * kKi},
      {"gb", kKi * kKi * kKi},
      {"gib", kKi * kKi * kKi},
      {"t", kKi * kKi * kKi * kKi},
      {"tb", kKi * kKi * kKi * kKi},
      {"tib", kKi * kKi * kKi * kKi},
      {"byte", 1},
      {"bytes", 1},
      {"p", kKi * kKi * kKi * kKi * kKi},
      {"pb", kKi * kKi * kKi * kKi * kKi},
  }};
  const auto* const unit = std::find_if(kUnits.begin(), kUnits.end(), [&](const auto& known) {
    return known.first == quantity.unit;
  });
  if (unit == kUnits.end()) {
    return fail(Errc::kInvalidArgument, "\"{}\": unknown unit \"{}\"; use b, kb, mb, gb or tb",
                text, quantity.unit);
  }
  const double bytes = quantity.number * unit->second;
  if (bytes >= static_cast<double>(std::numeric_limits<std::int64_t>::max())) {
    return fail(Errc::kInvalidArgument, "\"{}\" is more than 8 exbibytes", text);
  }
  return static_cast<std::uint64_t>(std::llround(bytes));
}

std::string format_bytes(std::uint64_t bytes) {
  static constexpr std::array<std::string_view, 6> kNames{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double number = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (number >= 1000 && unit + 1 < kNames.size()) {
    number /= kKi;
    ++unit;
  }
  return fmt::format("{:.3g} {}", number, kNames[unit]);
}

Result<std::chrono::nanoseconds> parse_duration(std::string_view text) {
  PEGA_TRY_LET(const Quantity quantity, split(text, "time", "250ms, 2s or 1m"));
  double nanoseconds = quantity.number;
  if (quantity.unit == "us") {
    nanoseconds *= 1e3;
  } else if (quantity.unit == "ms") {
    nanoseconds *= 1e6;
  } else if (quantity.unit == "s") {
    nanoseconds *= 1e9;
  } else if (quantity.unit == "m" || quantity.unit == "min") {
    nanoseconds *= 60e9;
  } else if (quantity.unit == "h") {
    nanoseconds *= 3600e9;
  } else if (quantity.unit.empty()) {
    return fail(Errc::kInvalidArgument, "\"{}\" has no unit; write for example 250ms, 2s or 1m",
                text);
  } else {
    return fail(Errc::kInvalidArgument, "\"{}\": unknown unit \"{}\"; use us, ms, s, m or h", text,
                quantity.unit);
  }
  if (nanoseconds >= static_cast<double>(std::numeric_limits<std::int64_t>::max())) {
    return fail(Errc::kInvalidArgument, "\"{}\" is more than 292 years", text);
  }
  return std::chrono::nanoseconds(std::llround(nanoseconds));
}

std::string format_duration(std::chrono::nanoseconds duration) {
  const auto count = static_cast<double>(duration.count());
  if (count == 0) return "0 s";
  if (count < 1e3) return fmt::format("{:.3g} ns", count);
  if (count < 1e6) return fmt::format("{:.3g} us", count / 1e3);
  if (count < 1e9) return fmt::format("{:.3g} ms", count / 1e6);
  if (count < 60e9) return fmt::format("{:.3g} s", count / 1e9);
  if (count < 3600e9) return fmt::format("{:.3g} min", count / 60e9);
  return fmt::format("{:.4g} h", count / 3600e9);
}

}  // namespace pegaflow
