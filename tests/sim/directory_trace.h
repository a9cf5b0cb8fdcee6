#pragma once
/// \file
/// The prompts of a large cluster: a trace of one site, run by many groups of users at once.

#include <cstdint>
#include <queue>
#include <random>
#include <string>
#include <vector>

namespace pegaflow::directory {

/// Blocks of 16 tokens in one block of Mooncake's traces (512 tokens).
inline constexpr std::size_t kUnitBlocks = 32;

/// The prompts of one site with their times.
struct SiteTrace {
  struct Request {
    double at = 0;                     ///< Seconds from the start.
    std::vector<std::uint64_t> units;  ///< Whole parts of 512 tokens; equal ones with equal prefix.
  };
  std::vector<Request> requests;  ///< In order of time.
  double seconds = 0;
  std::string name;

  /// Reads Mooncake's format (docs/benchmarks.md), uncompressed. Throws std::runtime_error.
  static SiteTrace read(const std::string& path);
  /// Conversations that grow, on 20 prompts of the system.
  static SiteTrace generate(std::uint64_t seed);
};

/// The trace as independent groups of users send it, each from another place on and with other
/// blocks, in the order of time. A group that has come to the end begins anew, with new blocks.
class ManySites {
 public:
  /// As many groups as `requests_per_second` needs; the time of the trace is adjusted to fit.
  ManySites(const SiteTrace& trace, double requests_per_second, std::mt19937_64& random);

  struct Prompt {
    double at = 0;  ///< Seconds from the start.
    std::vector<std::uint64_t> units;
  };
  Prompt next();
  [[nodiscard]] std::size_t groups() const noexcept { return groups_.size(); }

 private:
  struct Group {
    std::size_t next = 0;
    std::uint64_t salt = 0;
    double begin = 0;  ///< The start of the trace for it, in seconds of the simulation.
  };
  [[nodiscard]] double time_of(const Group& group) const;
  void queue(std::size_t group);

  const SiteTrace& trace_;
  double speed_ = 1;  ///< Seconds of the trace in one second.
  std::vector<Group> groups_;
  using Due = std::pair<double, std::size_t>;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
};

/// The name of a unit of a group, and of a block of a unit: spread over 64 bits.
[[nodiscard]] std::uint64_t named(std::uint64_t one, std::uint64_t other) noexcept;

}  // namespace pegaflow::directory
