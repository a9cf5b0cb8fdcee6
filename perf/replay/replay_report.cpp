#include "perf/replay/replay_report.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/units.h"
#include "engine/eviction/eviction.h"

namespace pegaflow::perf {
namespace {

constexpr double kMostCpu = 1.3;

double hit_rate(const ReplayResult& result) {
  return result.seen.asked == 0
             ? 0
             : static_cast<double>(result.seen.found) / static_cast<double>(result.seen.asked);
}

const ReplayResult* bound_of(std::span<const ReplayResult> of_one_size) {
  const auto found =
      std::find_if(of_one_size.begin(), of_one_size.end(),
                   [](const ReplayResult& result) { return result.eviction == kBoundPolicy; });
  return found == of_one_size.end() ? nullptr : &*found;
}

void add_times(const char* what, const std::vector<double>& samples, const Params& params,
               std::vector<Figure>& figures) {
  const Result<Samples> sorted = Samples::of(samples);
  if (!sorted) return;  // Nothing was ever loaded, or saved.
  for (const double fraction : {0.5, 0.99}) {
    figures.push_back(
        {.run = fmt::format("{}, p{:g}", what, fraction * 100),
         .params = params,
         .figure = sorted->quantile(fraction),
         .unit = "us",
         .n = sorted->count(),
         .spread = fmt::format("p10 {} to p90 {}", format_number(sorted->quantile(0.1)),
                               format_number(sorted->quantile(0.9)))});
  }
}

Result<Figure> cpu_figure(const ReplayResult& result, const ReplayResult* bound, bool is_bound,
                          const Params& params) {
  PEGA_TRY_LET(const Samples parts, Samples::of(result.cpu_us));
  Figure figure{.run = kCpuRun,
                .params = params,
                .figure = result.mean_cpu_us,
                .unit = "us",
                .n = parts.count(),
                .spread = fmt::format("p10 {} to p90 {}", format_number(parts.quantile(0.1)),
                                      format_number(parts.quantile(0.9)))};
  if (bound == nullptr || is_bound) return figure;
  Rounds rounds;
  for (std::size_t i = 0; i < result.cpu_us.size(); ++i) {
    rounds.add({result.cpu_us[i]}, {bound->cpu_us.at(i)});
  }
  PEGA_TRY_LET(const Rounds::Comparison compared, rounds.compare());
  figure.bound = bound->mean_cpu_us;
  figure.bound_name = fmt::format("{} in the same run", kBoundPolicy);
  figure.target = kMostCpu;
  figure.spread = fmt::format("ratio {:.2f} to {:.2f}", compared.ratio_low, compared.ratio_high);
  return figure;
}

/// The figure of a result by name; null if there is none.
const Figure* find(std::span<const Figure> figures, const ReplayResult& result,
                   std::string_view run) {
  const Params::value_type blocks{"blocks", static_cast<std::int64_t>(result.blocks)};
  const Params::value_type eviction{"eviction", result.eviction};
  const auto found = std::find_if(figures.begin(), figures.end(), [&](const Figure& figure) {
    const auto has = [&](const Params::value_type& param) {
      return std::find(figure.params.begin(), figure.params.end(), param) != figure.params.end();
    };
    return figure.run == run && has(blocks) && has(eviction);
  });
  return found == figures.end() ? nullptr : &*found;
}

std::string ratio_text(const Figure* figure, int digits) {
  return figure == nullptr || !figure->ratio() ? "-"
                                               : fmt::format("{:.{}f}", *figure->ratio(), digits);
}

std::string quantiles(std::span<const Figure> figures, const ReplayResult& result,
                      std::string_view what) {
  const Figure* const half = find(figures, result, fmt::format("{}, p50", what));
  const Figure* const most = find(figures, result, fmt::format("{}, p99", what));
  if (half == nullptr || most == nullptr) return "-";
  return fmt::format("{:.0f} / {:.0f}", half->figure, most->figure);
}

}  // namespace

std::string grouped(std::uint64_t number) {
  // format_number() shows small numbers with digits after the point, as for measurements.
  return number < 100 ? std::to_string(number) : format_number(static_cast<double>(number));
}

Result<std::vector<Figure>> replay_figures(const RequestTrace& trace,
                                           std::span<const ReplayResult> of_one_size) {
  std::vector<Figure> figures;
  const ReplayResult* const bound = bound_of(of_one_size);
  for (const ReplayResult& result : of_one_size) {
    const Params params = {{"trace", trace.name},
                           {"blocks", static_cast<std::int64_t>(result.blocks)},
                           {"eviction", result.eviction},
                           {"requests", static_cast<std::int64_t>(result.seen.requests)}};
    const bool is_bound = &result == bound;
    Figure rate{.run = kHitRateRun,
                .params = params,
                .figure = hit_rate(result),
                .unit = "of the requested blocks",
                .side = Side::kAtLeast,
                .n = result.seen.requests,
                .spread = "exact"};
    if (bound != nullptr && !is_bound) {
      rate.bound = hit_rate(*bound);
      rate.bound_name = fmt::format("{} in the same run", kBoundPolicy);
      if (result.eviction != to_string(engine::kDefaultEviction)) rate.target.reset();
    }
    figures.push_back(std::move(rate));
    const auto add_count = [&](const char* what, const char* unit, std::uint64_t count) {
      figures.push_back({.run = what,
                         .params = params,
                         .figure = static_cast<double>(count),
                         .unit = unit,
                         .n = result.seen.requests,
                         .spread = "exact"});
    };
    add_count("evictions", "blocks", result.counted.evictions);
    add_count("saved", "bytes", result.counted.saved_bytes);
    add_count("loaded", "bytes", result.counted.loaded_bytes);
    add_count("found and not claimed", "blocks", result.seen.shortened);
    if (result.counted.ssd_written != 0) {
      figures.push_back({.run = "written to the disk",
                         .params = params,
                         .figure = static_cast<double>(result.counted.ssd_written) /
                                   static_cast<double>(result.seen.asked),
                         .unit = "of the requested blocks",
                         .n = result.seen.requests,
                         .spread = "exact"});
      add_count("read from the disk", "blocks", result.counted.ssd_restored);
      add_count("evicted before they were written", "blocks", result.counted.ssd_unwritten);
      add_count("on the disk at the end", "blocks", result.counted.ssd_blocks);
      add_count("claimed and not delivered by the disk", "blocks", result.seen.lost);
    }
    add_times("lookup and claim", result.seen.question_us, params, figures);
    add_times("load", result.seen.load_us, params, figures);
    add_times("save", result.seen.save_us, params, figures);
    PEGA_TRY_LET(Figure cpu, cpu_figure(result, bound, is_bound, params));
    figures.push_back(std::move(cpu));
  }
  return figures;
}

std::string describe(const RequestTrace& trace) {
  const TraceSummary summary = summarize(trace);
  return fmt::format(
      "{} requests for {} blocks, {} of them distinct; an unlimited pool would find {:.4f}",
      grouped(summary.requests), grouped(summary.blocks), grouped(summary.distinct),
      static_cast<double>(summary.reusable) / static_cast<double>(summary.blocks));
}

std::string replay_table(std::span<const ReplayResult> results, std::span<const Figure> figures) {
  using Row = std::array<std::string, 12>;
  std::vector<Row> rows;
  rows.push_back({"blocks", "eviction", "hit rate", "of lru", "evicted", "saved", "loaded",
                  "lookup us p50/p99", "load us p50/p99", "save us p50/p99", "CPU us/request",
                  "of lru (<= 1.3)"});
  std::string notes;
  for (const ReplayResult& result : results) {
    const Figure* const cpu = find(figures, result, kCpuRun);
    std::string cpu_ratio = ratio_text(cpu, 2);
    if (cpu != nullptr && cpu->ratio()) {
      cpu_ratio += fmt::format(", {} parts: {}{}", cpu->n, cpu->spread, *cpu->held() ? "" : "  NO");
    }
    rows.push_back(
        {grouped(result.blocks), result.eviction, fmt::format("{:.4f}", hit_rate(result)),
         ratio_text(find(figures, result, kHitRateRun), 3), grouped(result.counted.evictions),
         format_bytes(result.counted.saved_bytes), format_bytes(result.counted.loaded_bytes),
         quantiles(figures, result, "lookup and claim"), quantiles(figures, result, "load"),
         quantiles(figures, result, "save"), fmt::format("{:.1f}", result.mean_cpu_us),
         std::move(cpu_ratio)});
    if (result.counted.ssd_written != 0) {
      notes += fmt::format(
          "{}pool of {} blocks, {}: written to the disk {:.4f} of the requested blocks; {} blocks "
          "read from it, {} evicted before they were written, {} claimed and not delivered, {} on "
          "it at the end\n",
          notes.empty() ? "\n" : "", grouped(result.blocks), result.eviction,
          static_cast<double>(result.counted.ssd_written) / static_cast<double>(result.seen.asked),
          grouped(result.counted.ssd_restored), grouped(result.counted.ssd_unwritten),
          grouped(result.seen.lost), grouped(result.counted.ssd_blocks));
    }
    if (result.seen.shortened != 0) {
      notes += fmt::format(
          "{}pool of {} blocks, {}: {} blocks were found and not claimed, because one engine may "
          "hold at most half of the pool\n",
          notes.empty() ? "\n" : "", grouped(result.blocks), result.eviction,
          grouped(result.seen.shortened));
    }
  }
  std::array<std::size_t, std::tuple_size_v<Row>> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const bool is_words = i == 1 || i + 1 == row.size();
      line += fmt::format(fmt::runtime(is_words ? "{:<{}}  " : "{:>{}}  "), row[i], widths[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text + notes;
}

}  // namespace pegaflow::perf
