#pragma once
/// \file
/// The options and the reports of a Mover.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/read_consent.h"
#include "client/link_options.h"
#include "client/load_pace.h"

namespace pegaflow {

/// Which pages get a checksum when they are saved, and whether checksums are compared after a
/// load. A page that was saved without one is loaded unchecked.
enum class PageVerification : std::uint8_t {
  kOff,     ///< No page; not compared.
  kSample,  ///< A random sample; compared.
  kAll,     ///< Every page; compared.
};

/// The options of a Mover.
struct MoverOptions {
  LinkOptions link;
  std::uint32_t rank = 0;  ///< Among the instance's tensor x pipeline parallel workers.
  std::uint32_t ranks = 1;
  /// The share of each block that this rank holds. Ranks with the same bytes have the same shard.
  /// Defaults: `rank` and `ranks`.
  std::optional<std::uint32_t> shard{};
  std::optional<std::uint32_t> shards{};
  /// If engines of other tensor-parallel sizes share the blocks: the number of consecutive shards
  /// that this rank holds, from `shard` on, each with a layout of its own (Mover::start_cells()).
  /// 0: one shard that only engines of the same size have.
  std::uint32_t cells = 0;
  /// False for all but the lowest of the ranks that hold one shard: they load and do not save.
  /// save() then reports the job as finished at once, with 0 blocks.
  bool saves = true;
  /// The preferred NUMA node of its pages. -1: the NUMA node to whose cores this process is
  /// bound; if it is bound to none, the server chooses.
  int numa_node = -1;
  /// The namespace's canonical list: equal lists share blocks.
  std::vector<std::pair<std::string, std::string>> factors;
  /// A load may take `load_patience` and the time that its bytes, and those queued before it,
  /// need at `load_bytes_per_second`; then the rest of it is abandoned and computed.
  Duration load_patience = std::chrono::milliseconds(250);
  double load_bytes_per_second = 1e9;
  /// The total time that a load may wait for blocks from another node. Then the rest of it is
  /// abandoned and computed.
  Duration coming_patience = std::chrono::seconds(2);
  std::size_t max_jobs = 1024;  ///< In flight or not taken; more is kBusy.
  PageVerification verify = PageVerification::kOff;
  /// For kSample: one page in this many gets a checksum, on average; at least 1.
  std::uint32_t sample_one_in = 16;
  /// Engines of this host that name the same group read each other's blocks while they are saved:
  /// 1 to 64 printable characters. Empty: this one reads none, and none reads this one's. Only for
  /// one kind of blocks without cells.
  std::string direct_group{};
  /// Whether the addresses of the blocks stand for the same memory until the mover is closed.
  /// Memory of a GPU that consists of several allocations is shared with engines of the group only
  /// then: they map the allocations, not the addresses.
  bool has_fixed_memory = true;
  /// The kernel's rule for reads between engines on CPUs; none: it is looked up. For tests.
  std::optional<ReadConsent> read_consent{};
  /// Whether the network of its device, if that has one, writes to the blocks nearly as fast as to
  /// ordinary memory. If not, blocks of other nodes come through the pool of this one.
  bool is_network_fast = true;
  /// Bugs that a test plants to show that it detects them.
  struct Mistakes {
    bool keeps_guards = false;         ///< A job's guard stays open after its report.
    bool checks_guards_first = false;  ///< A read counts although its guards were closed meanwhile.
    bool ready_at_once = false;        ///< Blocks are offered as final while the GPU computes them.
  } mistakes{};
  /// Describes the device to the server, for /instances and `pegaflow doctor`. Called on the
  /// private thread each time the pool is attached; if empty, the server shows the device as
  /// unknown.
  std::function<DeviceReport()> describe_device{};
};

/// The report of a job that has ended.
struct FinishedJob {
  enum class Kind : std::uint8_t { kSave, kLoad };
  Kind kind = Kind::kSave;
  std::uint64_t id = 0;     ///< The number of the job, or the load's name.
  std::size_t blocks = 0;   ///< Blocks now sealed, or loaded.
  std::size_t skipped = 0;  ///< Save: blocks that are cached, being saved, or without room.
  std::uint64_t bytes = 0;  ///< Bytes copied.
  /// Load: those of `bytes` from another engine's memory or another node's pool.
  std::uint64_t direct_bytes = 0;
  Duration took{};                   ///< From acceptance to its end.
  Duration copying{};                ///< Load: time on the device, without that of earlier loads.
  std::optional<LoadPace::Cut> cut;  ///< Load: why computing would have been faster.
  std::vector<std::uint32_t> failed_blocks;  ///< Load: blocks whose bytes must not be used.
  std::optional<Error> error;                ///< The reason if not all blocks succeeded.
  /// Load: pages compared with their checksums, and those that differed from the saved page. From
  /// the first such page on the load has failed (kCorrupt), and the server invalidates their
  /// blocks.
  std::size_t verified = 0;
  std::size_t corrupt = 0;
};

/// The early completion of a load: the engine need not wait for it.
struct FollowedLoad {
  std::uint64_t load = 0;
  std::size_t blocks = 0;  ///< All blocks of the load.
  std::uint64_t bytes = 0;
  Duration took{};  ///< From acceptance until now.
};

}  // namespace pegaflow
