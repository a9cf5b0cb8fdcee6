#pragma once
/// \file
/// Measured numbers beside their bounds: statistics of samples, and their printed form.

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
  /// `fraction` 0 is the smallest, 0.5 the median, 1 the largest; others are clamped.
  [[nodiscard]] double quantile(double fraction) const noexcept;
  [[nodiscard]] double median() const noexcept { return quantile(0.5); }
  [[nodiscard]] std::size_t count() const noexcept { return sorted_.size(); }

 private:
  explicit Samples(std::vector<double> sorted) : sorted_(std::move(sorted)) {}
  std::vector<double> sorted_;
};

/// Two quantities from alternating rounds, so that a disturbance affects both.
class Rounds {
 public:
  /// Adds a round: samples of the figure, and samples of its bound from right before or after.
  void add(std::vector<double> figure, std::vector<double> bound);

  struct Comparison {
    Samples figure;         ///< All rounds together.
    Samples bound;          ///< All rounds together.
    double ratio = 0;       ///< Ratio of the two medians.
    double ratio_low = 0;   ///< Tenth percentile of the ratios of the rounds.
    double ratio_high = 0;  ///< Ninetieth percentile of them.
    std::size_t rounds = 0;
  };
  /// Errors: kInvalidArgument when there is no round, a round has no sample, or the bound's median
  /// is not above 0.
  [[nodiscard]] Result<Comparison> compare() const;

 private:
  std::vector<std::vector<double>> figures_;
  std::vector<std::vector<double>> bounds_;
};

/// The side of its bound on which a figure should be.
enum class Side : std::uint8_t { kAtMost, kAtLeast };

/// The parameters of a figure: page_bytes = 65536, direction = "save".
using Params = std::vector<std::pair<std::string, std::variant<std::int64_t, std::string>>>;

/// One line of a report.
struct Figure {
  std::string run;  ///< The name of the figure: "lookup of 8,192 keys, p50".
  Params params;
  double figure = 0;
  std::string unit;  ///< Unit of `figure` and `bound`.
  std::optional<double> bound{};
  std::string bound_name{};  ///< "echo of the same bytes"; empty without a bound.
  Side side = Side::kAtMost;
  /// The limit of figure / bound, on `side`; no value: the bound is for comparison only.
  std::optional<double> target = 1;
  std::size_t n = 0;   ///< Number of samples or rounds.
  std::string spread;  ///< In words, with its unit.

  [[nodiscard]] std::optional<double> ratio() const noexcept;
  /// Whether the figure meets its target; no value without a bound or a target.
  [[nodiscard]] std::optional<bool> held() const noexcept;
};

/// The conditions of a run. Printed with its figures: absolute times mean little without them.
struct Conditions {
  std::string version;
  unsigned cores = 0;
  double load_average = 0;  ///< Over one minute, at the start of the run.
  std::uint64_t seed = 0;
  bool realtime = false;  ///< The run went ahead of all other programs.
};
Conditions conditions_now(std::uint64_t seed);

/// One JSON object: run, params, figure, unit, bound, bound_name, ratio, target, target_is, held,
/// n, spread, load_average, cores, realtime, version, seed.
std::string json_line(const Figure& figure, const Conditions& conditions);

/// The heading of a printed report: the title and the conditions.
std::string heading(const std::string& title, const Conditions& conditions);

/// A printed table, with the conditions above it.
std::string table(const std::string& title, std::span<const Figure> figures,
                  const Conditions& conditions);

/// "0.412", "12.3", "4,096": three significant digits, thousands grouped.
std::string format_number(double value);

}  // namespace pegaflow::perf
