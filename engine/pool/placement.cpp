#include "engine/pool/placement.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/types/shape.h"

namespace pegaflow::engine {
namespace {

constexpr std::array kNames = {
    std::pair{NumaPolicy::kAuto, std::string_view("auto")},
    std::pair{NumaPolicy::kInterleave, std::string_view("interleave")},
    std::pair{NumaPolicy::kOff, std::string_view("off")},
};

/// NUMA nodes as a bit mask for the kernel.
class NodeMask {
 public:
  void add(std::uint32_t node) {
    const std::size_t word = node / kBits;
    if (words_.size() <= word) words_.resize(word + 1);
    words_[word] |= 1UL << (node % kBits);
  }
  [[nodiscard]] const unsigned long* data() const { return words_.data(); }
  /// One more than the number of bits: the kernel subtracts one.
  [[nodiscard]] unsigned long bits() const { return words_.size() * kBits + 1; }

 private:
  static constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> words_;
};

/// Returns an errno, 0 on success.
int set_policy(std::span<std::byte> pages, int mode, const NodeMask& nodes) {
  if (pages.empty()) return 0;
  const long done =
      ::syscall(SYS_mbind, pages.data(), pages.size(), mode, nodes.data(), nodes.bits(), 0U);
  return done == 0 ? 0 : errno;
}

std::string why(int error) {
  std::string text = "mbind: " + std::generic_category().message(error);
  // Docker's filter of system calls returns EPERM, other filters ENOSYS.
  if (error == EPERM || error == ENOSYS) {
    text += "; give the container the capability SYS_NICE, or use --numa off";
  }
  return text;
}

/// The NUMA node of a page that is present; no value where the kernel does not report it.
std::optional<std::uint32_t> node_of(const std::byte* page) {
  int node = -1;
  const long done = ::syscall(SYS_get_mempolicy, &node, nullptr, 0UL, page,
                              static_cast<unsigned long>(MPOL_F_NODE | MPOL_F_ADDR));
  if (done != 0 || node < 0) return std::nullopt;
  return static_cast<std::uint32_t>(node);
}

/// Rounds `offset` down to the beginning of a page of memory.
std::uint64_t page_of(std::uint64_t offset, std::uint64_t page_bytes) {
  return offset / page_bytes * page_bytes;
}

}  // namespace

Result<NumaPolicy> numa_policy(std::string_view name) {
  for (const auto& [policy, known] : kNames) {
    if (known == name) return policy;
  }
  return fail(Errc::kInvalidArgument, "\"{}\" is none of auto, interleave and off", name);
}

std::string_view to_string(NumaPolicy policy) noexcept {
  for (const auto& [known, name] : kNames) {
    if (known == policy) return name;
  }
  return "unknown";
}

PoolPlacement place_pool(std::span<std::byte> pool, std::uint64_t memory_page_bytes,
                         NumaPolicy policy, std::vector<NumaNode> numa_nodes) {
  PoolPlacement placement;
  if (policy == NumaPolicy::kOff || numa_nodes.size() < 2) return placement;
  if (policy == NumaPolicy::kInterleave) {
    NodeMask all;
    for (const NumaNode& node : numa_nodes) all.add(node.number);
    if (const int error = set_policy(pool, MPOL_INTERLEAVE, all); error != 0) {
      placement.refused = why(error);
      return placement;
    }
    placement.policy = policy;
    placement.numa_nodes = std::move(numa_nodes);
    return placement;
  }
  numa_nodes.resize(std::min<std::size_t>(numa_nodes.size(), kMaxNumaNodes));
  // The same ranges as the store's.
  auto ranges = numa_ranges(pool.size(), static_cast<std::uint32_t>(numa_nodes.size()));
  if (ranges.size() < 2) return placement;  // The pool is too small to be divided.
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const std::uint64_t begin = page_of(ranges[i].begin, memory_page_bytes);
    const std::uint64_t end =
        i + 1 == ranges.size() ? pool.size() : page_of(ranges[i].end, memory_page_bytes);
    NodeMask one;
    one.add(numa_nodes[i].number);
    if (const int error = set_policy(pool.subspan(begin, end - begin), MPOL_PREFERRED, one);
        error != 0) {
      placement.refused = why(error);
      // Undo the parts before: a pool that is only partly placed by NUMA node is of no use to the
      // store.
      (void)set_policy(pool.first(begin), MPOL_DEFAULT, NodeMask());
      return placement;
    }
  }
  placement.policy = policy;
  placement.numa_nodes = std::move(numa_nodes);
  placement.ranges = std::move(ranges);
  return placement;
}

void verify_placement(std::span<std::byte> pool, PoolPlacement& placement) {
  constexpr std::uint64_t kSamples = 64;  // Samples per part. Each is a system call.
  std::uint64_t seen = 0;
  std::uint64_t in_place = 0;
  for (std::size_t i = 0; i < placement.ranges.size(); ++i) {
    const NumaRange& range = placement.ranges[i];
    for (std::uint64_t sample = 0; sample < kSamples; ++sample) {
      // From the middle of each of as many pieces, where no page extends beyond the part's end.
      const std::uint64_t offset = range.begin + (range.end - range.begin) / kSamples * sample +
                                   (range.end - range.begin) / (2 * kSamples);
      const auto node = node_of(pool.data() + offset);
      if (!node) continue;
      ++seen;
      if (*node == placement.numa_nodes[i].number) ++in_place;
    }
  }
  if (seen != 0) placement.in_place = static_cast<double>(in_place) / static_cast<double>(seen);
}

std::string to_string(const PoolPlacement& placement) {
  if (!placement.refused.empty()) return "off, refused: " + placement.refused;
  std::string text(to_string(placement.policy));
  if (placement.numa_nodes.empty()) return text;
  text += ", NUMA nodes";
  for (const NumaNode& node : placement.numa_nodes) text += fmt::format(" {}", node.number);
  return text;
}

}  // namespace pegaflow::engine
