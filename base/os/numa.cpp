#include "base/os/numa.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include <sched.h>

namespace pegaflow {
namespace {

constexpr std::uint32_t kLargestNumber = 65535;

/// The first line of a file; empty when there is none.
std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::uint32_t> list_in(const std::filesystem::path& path) {
  return parse_number_list(first_line(path)).value_or(std::vector<std::uint32_t>{});
}

/// Numbers with spaces between them.
std::vector<std::uint32_t> row_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::vector<std::uint32_t> row;
  for (std::uint32_t number = 0; file >> number;) row.push_back(number);
  return row;
}

/// The NUMA nodes from which a process may allocate memory; empty if the kernel does not report
/// them.
std::optional<std::vector<std::uint32_t>> allowed_nodes(const std::filesystem::path& status) {
  constexpr std::string_view kName = "Mems_allowed_list:";
  std::ifstream file(status);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kName)) continue;
    auto list = parse_number_list(std::string_view(line).substr(kName.size()));
    if (list) return std::move(*list);
  }
  return std::nullopt;
}

bool contains(std::span<const std::uint32_t> rising, std::uint32_t number) {
  return std::binary_search(rising.begin(), rising.end(), number);
}

/// A set of cores of any size, for the kernel.
class CoreSet {
 public:
  explicit CoreSet(std::uint32_t cores) : cores_(cores), set_(CPU_ALLOC(cores)) {
    if (set_ != nullptr) CPU_ZERO_S(bytes(), set_.get());
  }
  [[nodiscard]] bool is_made() const { return set_ != nullptr; }
  [[nodiscard]] std::size_t bytes() const { return CPU_ALLOC_SIZE(cores_); }
  [[nodiscard]] cpu_set_t* get() const { return set_.get(); }
  void add(std::uint32_t core) { CPU_SET_S(core, bytes(), set_.get()); }
  [[nodiscard]] bool has(std::uint32_t core) const {
    return CPU_ISSET_S(core, bytes(), set_.get());
  }
  [[nodiscard]] std::uint32_t size() const { return cores_; }

 private:
  struct Free {
    void operator()(cpu_set_t* set) const { CPU_FREE(set); }
  };
  std::uint32_t cores_;
  std::unique_ptr<cpu_set_t, Free> set_;
};

}  // namespace

Result<std::vector<std::uint32_t>> parse_number_list(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == '\n'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  const auto wrong = [&] { return fail(Errc::kInvalidArgument, "\"{}\" is not a list", text); };
  std::vector<std::uint32_t> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    std::uint32_t first = 0;
    auto read = std::from_chars(at, end, first);
    if (read.ec != std::errc() || first > kLargestNumber) return wrong();
    std::uint32_t last = first;
    if (read.ptr != end && *read.ptr == '-') {
      read = std::from_chars(read.ptr + 1, end, last);
      if (read.ec != std::errc() || last < first || last > kLargestNumber) return wrong();
    }
    for (std::uint32_t number = first; number <= last; ++number) numbers.push_back(number);
    at = read.ptr;
    if (at == end) break;
    if (*at != ',' || at + 1 == end) return wrong();
    ++at;
  }
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

NumaTopology NumaTopology::read(const Sources& sources) {
  const std::filesystem::path nodes = sources.sysfs / "devices/system/node";
  const std::vector<std::uint32_t> with_memory = list_in(nodes / "has_memory");
  const std::vector<std::uint32_t> online = list_in(sources.sysfs / "devices/system/cpu/online");
  const auto allowed = allowed_nodes(sources.process_status);
  NumaTopology topology;
  for (const std::uint32_t number : list_in(nodes / "online")) {
    const std::filesystem::path own = nodes / ("node" + std::to_string(number));
    NumaNode& node = topology.nodes_.emplace_back();
    node.number = number;
    // Older kernels also list cores that are offline.
    const std::vector<std::uint32_t> cores = list_in(own / "cpulist");
    std::set_intersection(cores.begin(), cores.end(), online.begin(), online.end(),
                          std::back_inserter(node.cores));
    node.has_memory = contains(with_memory, number);
    node.is_allowed = !allowed || contains(*allowed, number);
    node.distances = row_in(own / "distance");
  }
  for (NumaNode& node : topology.nodes_) {
    if (node.distances.size() != topology.nodes_.size()) node.distances.clear();
  }
  return topology;
}

std::vector<NumaNode> NumaTopology::memory_nodes() const {
  std::vector<NumaNode> found;
  std::copy_if(nodes_.begin(), nodes_.end(), std::back_inserter(found), [](const NumaNode& node) {
    return node.has_memory && node.is_allowed && !node.cores.empty();
  });
  return found;
}

std::optional<std::uint32_t> NumaTopology::node_of(std::span<const std::uint32_t> cores) const {
  std::optional<std::uint32_t> found;
  for (const std::uint32_t core : cores) {
    const auto home = std::find_if(nodes_.begin(), nodes_.end(), [&](const NumaNode& node) {
      return contains(node.cores, core);
    });
    if (home == nodes_.end() || (found && *found != home->number)) return std::nullopt;
    found = home->number;
  }
  return found;
}

std::optional<std::size_t> NumaTopology::nearest(std::uint32_t node,
                                                 std::span<const NumaNode> among) const {
  const auto from = std::find_if(nodes_.begin(), nodes_.end(),
                                 [&](const NumaNode& each) { return each.number == node; });
  if (from == nodes_.end()) return std::nullopt;
  std::optional<std::size_t> best;
  std::uint32_t shortest = 0;
  for (std::size_t i = 0; i < among.size(); ++i) {
    if (among[i].number == node) return i;
    const auto to = std::find_if(nodes_.begin(), nodes_.end(), [&](const NumaNode& each) {
      return each.number == among[i].number;
    });
    if (to == nodes_.end() || from->distances.empty()) continue;
    const std::uint32_t distance = from->distances[static_cast<std::size_t>(to - nodes_.begin())];
    if (!best || distance < shortest) {
      best = i;
      shortest = distance;
    }
  }
  return best;
}

std::vector<std::uint32_t> allowed_cores() {
  // The kernel needs room for all cores that it could have, and returns EINVAL for less.
  for (std::uint32_t size = 1024; size <= kLargestNumber + 1; size *= 2) {
    const CoreSet set(size);
    if (!set.is_made()) return {};
    if (::sched_getaffinity(0, set.bytes(), set.get()) != 0) continue;
    std::vector<std::uint32_t> cores;
    for (std::uint32_t core = 0; core < size; ++core) {
      if (set.has(core)) cores.push_back(core);
    }
    return cores;
  }
  return {};
}

bool keep_thread_on(std::span<const std::uint32_t> cores) {
  if (cores.empty()) return false;
  const std::uint32_t largest = *std::max_element(cores.begin(), cores.end());
  if (largest > kLargestNumber) return false;
  CoreSet set(largest + 1);
  if (!set.is_made()) return false;
  for (const std::uint32_t core : cores) set.add(core);
  return ::sched_setaffinity(0, set.bytes(), set.get()) == 0;
}

}  // namespace pegaflow
