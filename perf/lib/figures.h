#pragma once
/// \file
/// Measured numbers beside their bounds: what is computed from samples, and how it is shown.

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace pegaflow::perf {

/// Samples of one quantity, sorted. Immutable.
class Samples {
 public:
  /// Errors: kInvalidArgument when there is no sample.
  static Result<Samples> of(std::vector<double> values);

  /// Linear interpolation between the two nearest ranks (as NumPy does by default).
  /// `fraction` 0 is the smallest, 0.5 the median, 1 the largest; beyond, it is cut.
  [[nodiscard]] double quantile(double fraction) const noexcept;
  [[nodiscard]] double median() const noexcept { return quantile(0.5); }
  [[nodiscard]] std::size_t count() const noexcept { return sorted_.size(); }

 private:
  explicit Samples(std::vector<double> sorted) : sorted_(std::move(sorted)) {}
  std::vector<double> sorted_;
};

/// Two quantities taken in alternating rounds, so that what disturbs one disturbs the other.
class Rounds {
 public:
  /// One round: the samples of what is measured, and those of its bound right before or after.
  void add(std::vector<double> figure, std::vector<double> bound);

  struct Comparison {
    Samples figure;         ///< Of all rounds.
    Samples bound;          ///< Of all rounds.
    double ratio = 0;       ///< Of the two medians.
    double ratio_low = 0;   ///< Tenth percentile of the rounds' own ratios.
    double ratio_high = 0;  ///< Ninetieth.
    std::size_t rounds = 0;
  };
  /// Errors: kInvalidArgument when there is no round, a round has no sample, or the bound's median
  /// is not above 0.
  [[nodiscard]] Result<Comparison> compare() const;

 private:
  std::vector<std::vector<double>> figures_;
  std::vector<std::vector<double>> bounds_;
};

/// On which side of its bound a figure should be.
enum class Reach : std::uint8_t { kAtMost, kAtLeast };

/// What a figure depends on: page_bytes = 65536, direction = "save".
using Params = std::vector<std::pair<std::string, std::variant<std::int64_t, std::string>>>;

/// One line of a report.
struct Figure {
  std::string run;  ///< What was measured: "lookup of 8192 keys, p50".
  Params params;
  double figure = 0;
  std::string unit;  ///< Of `figure` and `bound`.
  std::optional<double> bound{};
  std::string bound_name{};  ///< "echo of the same bytes"; empty without a bound.
  Reach side = Reach::kAtMost;
  /// figure / bound should be on `side` of it; no value: the bound is there for comparison only.
  std::optional<double> reach = 1;
  std::size_t n = 0;   ///< Samples, or rounds.
  std::string spread;  ///< In words, with its unit.

  [[nodiscard]] std::optional<double> ratio() const noexcept;
  /// Whether the bound is kept; no value without a bound or a reach.
  [[nodiscard]] std::optional<bool> held() const noexcept;
};

/// Where and when figures were taken; printed with them because absolute times mean little without.
struct Conditions {
  std::string version;
  unsigned cores = 0;
  double load_average = 0;  ///< One minute, when the run began.
  std::uint64_t seed = 0;
  bool realtime = false;  ///< Our programs went before all others.
};
Conditions conditions_now(std::uint64_t seed);

/// One JSON object: run, params, figure, unit, bound, bound_name, ratio, reach, reach_is, held, n,
/// spread, load_average, cores, realtime, version,
/// seed.
std::string json_line(const Figure& figure, const Conditions& conditions);

/// The first lines of what people read: the title, when and where.
std::string heading(const std::string& title, const Conditions& conditions);

/// A table for people, with the conditions above it.
std::string table(const std::string& title, std::span<const Figure> figures,
                  const Conditions& conditions);

/// "0.412", "12.3", "4,096": three digits that matter, thousands grouped.
std::string format_number(double value);

}  // namespace pegaflow::perf
