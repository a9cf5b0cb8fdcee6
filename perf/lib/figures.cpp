#include "perf/lib/figures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <thread>

#include <nlohmann/json.hpp>

#include "version.h"

namespace pegaflow::perf {

Result<Samples> Samples::of(std::vector<double> values) {
  if (values.empty()) return fail(Errc::kInvalidArgument, "no sample was measured");
  std::sort(values.begin(), values.end());
  return Samples(std::move(values));
}

double Samples::quantile(double fraction) const noexcept {
  const double position = std::clamp(fraction, 0.0, 1.0) * static_cast<double>(sorted_.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted_.size() - 1);
  const double part = position - static_cast<double>(below);
  return sorted_[below] + (sorted_[above] - sorted_[below]) * part;
}

void Rounds::add(std::vector<double> figure, std::vector<double> bound) {
  figures_.push_back(std::move(figure));
  bounds_.push_back(std::move(bound));
}

Result<Rounds::Comparison> Rounds::compare() const {
  std::vector<double> figures;
  std::vector<double> bounds;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < figures_.size(); ++i) {
    figures.insert(figures.end(), figures_[i].begin(), figures_[i].end());
    bounds.insert(bounds.end(), bounds_[i].begin(), bounds_[i].end());
    PEGA_TRY_LET(const Samples figure, Samples::of(figures_[i]));
    PEGA_TRY_LET(const Samples bound, Samples::of(bounds_[i]));
    if (bound.median() <= 0) {
      return fail(Errc::kInvalidArgument, "the bound of round {} is {}, not above 0", i,
                  bound.median());
    }
    ratios.push_back(figure.median() / bound.median());
  }
  PEGA_TRY_LET(Samples figure, Samples::of(std::move(figures)));
  PEGA_TRY_LET(Samples bound, Samples::of(std::move(bounds)));
  PEGA_TRY_LET(const Samples ratio, Samples::of(std::move(ratios)));
  const double of_medians = figure.median() / bound.median();
  return Comparison{.figure = std::move(figure),
                    .bound = std::move(bound),
                    .ratio = of_medians,
                    .ratio_low = ratio.quantile(0.1),
                    .ratio_high = ratio.quantile(0.9),
                    .rounds = ratio.count()};
}

std::optional<double> Figure::ratio() const noexcept {
  if (!bound || *bound == 0) return std::nullopt;
  return figure / *bound;
}

std::optional<bool> Figure::held() const noexcept {
  if (!bound || !target) return std::nullopt;
  // A bound of 0 ("no wake-up") has no ratio; only 0 meets it.
  if (*bound == 0) return figure <= 0;
  return side == Side::kAtMost ? *ratio() <= *target : *ratio() >= *target;
}

Conditions conditions_now(std::uint64_t seed) {
  std::array<double, 1> load{};
  const bool known = ::getloadavg(load.data(), 1) == 1;
  return {.version = kVersion,
          .cores = std::thread::hardware_concurrency(),
          .load_average = known ? load[0] : -1,
          .seed = seed};
}

std::string json_line(const Figure& figure, const Conditions& conditions) {
  nlohmann::ordered_json line;
  line["run"] = figure.run;
  line["params"] = nlohmann::ordered_json::object();
  for (const auto& [name, value] : figure.params) {
    std::visit([&, &key = name](const auto& plain) { line["params"][key] = plain; }, value);
  }
  line["figure"] = figure.figure;
  line["unit"] = figure.unit;
  const auto set = [&line](const char* name, const auto& value) {
    if (value) {
      line[name] = *value;
    } else {
      line[name] = nullptr;
    }
  };
  set("bound", figure.bound);
  line["bound_name"] = figure.bound_name;
  set("ratio", figure.ratio());
  set("target", figure.target);
  line["target_is"] = figure.side == Side::kAtMost ? "at most" : "at least";
  set("held", figure.held());
  line["n"] = figure.n;
  line["spread"] = figure.spread;
  line["load_average"] = conditions.load_average;
  line["cores"] = conditions.cores;
  line["realtime"] = conditions.realtime;
  line["version"] = conditions.version;
  line["seed"] = conditions.seed;
  return line.dump();
}

std::string format_number(double value) {
  if (value != 0 && std::abs(value) < 100) {
    const int digits = std::abs(value) < 1 ? 3 : std::abs(value) < 10 ? 2 : 1;
    return fmt::format("{:.{}f}", value, digits);
  }
  std::string text = fmt::format("{:.0f}", std::abs(value));
  for (int i = static_cast<int>(text.size()) - 3; i > 0; i -= 3) {
    text.insert(static_cast<std::size_t>(i), 1, ',');
  }
  return value < 0 ? "-" + text : text;
}

std::string heading(const std::string& title, const Conditions& conditions) {
  return fmt::format("{}  [version {}, {} cores, load average {:.2f}{}, seed {}]\n\n", title,
                     conditions.version, conditions.cores, conditions.load_average,
                     conditions.realtime ? ", real-time" : "", conditions.seed);
}

std::string table(const std::string& title, std::span<const Figure> figures,
                  const Conditions& conditions) {
  std::vector<std::array<std::string, 7>> rows;
  rows.push_back({"figure", "measured", "bound", "ratio", "target", "n", "spread"});
  for (const Figure& figure : figures) {
    const std::optional<bool> held = figure.held();
    std::string name = figure.run;
    if (!figure.bound_name.empty()) name += " (bound: " + figure.bound_name + ")";
    rows.push_back({std::move(name), format_number(figure.figure) + " " + figure.unit,
                    figure.bound ? format_number(*figure.bound) + " " + figure.unit : "-",
                    figure.ratio() ? fmt::format("{:.2f}", *figure.ratio()) : "-",
                    held
                        ? fmt::format("{} {:g}  {}", figure.side == Side::kAtMost ? "<=" : ">=",
                                      *figure.bound == 0 ? 0 : *figure.target, *held ? "yes" : "NO")
                        : "-",
                    std::to_string(figure.n), figure.spread.empty() ? "-" : figure.spread});
  }
  std::array<std::size_t, 7> widths{};
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text = heading(title, conditions);
  for (std::size_t line = 0; line < rows.size(); ++line) {
    const auto& row = rows[line];
    // Numbers are aligned right, words left.
    std::string printed = fmt::format("{:<{}}  {:>{}}  {:>{}}  {:>{}}  {:<{}}  {:>{}}  {}", row[0],
                                      widths[0], row[1], widths[1], row[2], widths[2], row[3],
                                      widths[3], row[4], widths[4], row[5], widths[5], row[6]);
    text += printed + "\n";
    if (line == 0) {
      std::size_t width = 12;
      for (const std::size_t column : widths) width += column;
      text += std::string(width, '-') + "\n";
    }
  }
  return text;
}

}  // namespace pegaflow::perf
