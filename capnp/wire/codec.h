#pragma once
/// \file
/// Translates between messages of cache.capnp and structs: the only place that knows both.
///
/// Reading checks every bound that the schema promises, so that the receiver of a struct need not.
/// Pointers that lead out of their message throw kj::Exception, as Cap'n Proto does; it ends the
/// call. Thread-safe: no state.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "base/os/descriptor_box.h"
#include "capnp/cache.capnp.h"
#include "capnp/wire/decline_reasons.h"
#include "transport/region.h"

namespace pegaflow {

/// Versions of the schema that this build speaks.
inline constexpr std::uint16_t kWireMinimum = 1;
inline constexpr std::uint16_t kWireMaximum = 4;
/// The first version whose servers implement awaitJob.
inline constexpr std::uint16_t kWireAwaitsJobs = 2;
/// The first version in which blocks may be at other nodes, and in flight from there.
inline constexpr std::uint16_t kWireKnowsNodes = 3;
/// The first version in which `hello` carries features.
inline constexpr std::uint16_t kWireHasFeatures = 4;

/// Features of `hello`, by bit; see the list in cache.capnp.
inline constexpr std::uint64_t kFeatureNotices = std::uint64_t{1} << 0;  ///< describe, decline.
inline constexpr std::uint64_t kFeatureKinds = std::uint64_t{1} << 1;    ///< Several kinds.
inline constexpr std::uint64_t kFeatureCells = std::uint64_t{1} << 2;    ///< Ranks of any size.
inline constexpr std::uint64_t kFeatureChains = std::uint64_t{1} << 3;   ///< reportChain.
inline constexpr std::uint64_t kFeatureDirect = std::uint64_t{1} << 4;   ///< openNext, awaitReads.
inline constexpr std::uint64_t kFeaturePending = std::uint64_t{1} << 5;  ///< ready, memory on GPUs.
inline constexpr std::uint64_t kFeaturePools = std::uint64_t{1} << 6;    ///< confirm, pages.
inline constexpr std::uint64_t kFeatureRanges = std::uint64_t{1} << 7;   ///< DirectMemory.ranges.
inline constexpr std::uint64_t kFeatureConsent = std::uint64_t{1} << 8;  ///< awaitReader.
/// The features that this build implements.
inline constexpr std::uint64_t kFeatures = kFeatureNotices | kFeatureKinds | kFeatureCells |
                                           kFeatureChains | kFeatureDirect | kFeaturePending |
                                           kFeaturePools | kFeatureRanges | kFeatureConsent;

/// The newest version in both [`minimum`, `maximum`] and this build's range; 0: none.
std::uint16_t common_version(std::uint16_t minimum, std::uint16_t maximum);

/// The longest `patience` of an awaitJob.
inline constexpr std::chrono::seconds kLongestJobWait{10};

/// The longest time in which a server waits for another node to confirm a lease.
inline constexpr std::chrono::seconds kLongestConfirm{1};

/// The `worthMicros` of an open without a time limit, as long as the source responds.
inline constexpr std::uint32_t kWorthForever = 0xFFFFFFFF;

inline constexpr std::size_t kMaxKeysPerCall = 8192;     ///< 128 Ki tokens in blocks of 16.
inline constexpr std::size_t kMaxJournalEntries = 2048;  ///< Limit of one answer.
inline constexpr std::size_t kMaxInstanceBytes = 256;    ///< Limit of an instance's id.
inline constexpr std::size_t kMaxFactorsOnWire = 1024;   ///< The engine's own limit is lower.
inline constexpr std::size_t kMaxKindsOnWire = 16;       ///< Kinds of blocks of a namespace.
inline constexpr std::size_t kMaxNoticeBytes = 512;      ///< Kept of a decline's detail.
inline constexpr std::size_t kMaxDeviceBytes = 128;      ///< Kept of a device's name.
inline constexpr std::size_t kMaxGroupBytes = 64;        ///< Limit of a direct group's name.
inline constexpr std::size_t kMaxSegmentsOnWire = 1024;  ///< Segments of a page.
inline constexpr std::uint32_t kMaxGuards = 65536;       ///< Guards of a worker.
/// Allocations of a worker's memory on a GPU: as many as one socket holds descriptors.
inline constexpr std::size_t kMaxAllocations = DescriptorBox::kMost;
/// Regions of a fabric: a worker may have one or more for each layer.
inline constexpr unsigned kMaxRegionsOnWire = 512;

Id128 read_id(wire::Id128::Reader reader);
void write_id(const Id128& id, wire::Id128::Builder builder);

/// A code that this build does not know counts as kInternal.
Error read_error(wire::Error::Reader reader);
void write_error(const Error& error, wire::Error::Builder builder);

/// Sets `ok` or `error`.
void write_done(const Result<void>& result, wire::Done::Builder builder);
Result<void> read_done(wire::Done::Reader reader);

/// The answer to awaitJob; see the struct in cache.capnp.
struct JobsReached {
  Result<void> ended;       ///< How the wait ended.
  std::uint64_t up_to = 0;  ///< All jobs up to this one are over, or have begun; 0: unknown.
};
void write_reached(const JobsReached& reached, wire::JobsReached::Builder builder);
/// Reads `up_to` as 0 from a server that sent Done.
JobsReached read_reached(wire::JobsReached::Reader reader);

/// Returns the keys: inside the message if they have 32 bytes, as most have; shorter ones in
/// `scratch`, which keeps its memory from call to call, since to allocate a quarter of a mebibyte
/// costs more than the lookup. Valid while the message exists and `scratch` does not change.
/// Errors: kInvalidArgument for a key size out of 1 to 32, a length that is not a multiple of it,
/// or more than kMaxKeysPerCall keys.
Result<std::span<const BlockKey>> read_keys(wire::Keys::Reader reader,
                                            std::vector<BlockKey>& scratch);
/// Writes the first `key_bytes` (1 to 32) of every key.
void write_keys(std::span<const BlockKey> keys, std::size_t key_bytes, wire::Keys::Builder builder);
/// The words that write_keys() writes, for the size hint of a request.
constexpr std::uint64_t keys_words(std::size_t keys, std::size_t key_bytes) {
  return 4 + (keys * key_bytes + 7) / 8;
}

JobId read_job(wire::JobId::Reader reader);
void write_job(const JobId& job, wire::JobId::Builder builder);

/// Reads checksums or places of pages: at most as many as keys in a call.
/// Errors: kInvalidArgument for more.
template <typename T>
Result<std::vector<T>> read_numbers(typename ::capnp::List<T>::Reader reader);
template <typename T>
void write_numbers(std::span<const T> numbers, typename ::capnp::List<T>::Builder builder) {
  for (unsigned i = 0; i < builder.size(); ++i) builder.set(i, numbers[i]);
}

/// Errors: kInvalidArgument for more regions, or longer data of the backend, than the limits allow.
Result<FabricDescriptor> read_fabric(wire::Fabric::Reader reader);
void write_fabric(const FabricDescriptor& fabric, wire::Fabric::Builder builder);

/// One of several kinds of blocks, as a rank registers it; see Kind in cache.capnp.
struct RegisteredKind {
  wire::Kind::Rule rule = wire::Kind::Rule::PREFIX;
  std::uint32_t tokens = 0;
  std::uint32_t block_tokens = 0;
  std::uint64_t page_bytes = 0;
  bool operator==(const RegisteredKind&) const = default;
};

/// A worker's KV cache, as engines of its group read it; see DirectMemory in cache.capnp. Without
/// its descriptors, which are capabilities.
struct OfferedMemory {
  static constexpr std::size_t kHandleBytes = 64;
  struct Segment {
    std::uint64_t base = 0;  ///< An address in the worker's process, or an offset.
    std::uint64_t stride = 0;
    std::uint64_t bytes = 0;
    std::optional<std::array<std::byte, kHandleBytes>>
        handle{};              ///< That of its allocation on a GPU.
    RegionId region{};         ///< For engines of other nodes: the region that contains it,
    std::uint64_t offset = 0;  ///< and the place of block 0 in there.
    std::uint32_t range = 0;   ///< With `ranges`: the one that contains it.
    bool operator==(const Segment&) const = default;
  };
  std::string group{};
  std::uint64_t blocks = 0;
  std::vector<Segment> segments{};
  std::uint32_t guards = 0;  ///< The length of the array of guards.
  /// How engines of other nodes reach it.
  struct Network {
    FabricDescriptor fabric{};
    RegionId guards{};  ///< The region of the array of guards.
    bool operator==(const Network&) const = default;
  };
  std::optional<Network> network{};  ///< Empty: they do not.
  /// Of memory on a GPU without handles: the sizes of the allocations of each range, whose
  /// descriptors are a capability.
  std::vector<std::vector<std::uint64_t>> ranges{};
  bool needs_consent = false;          ///< Processes read it only with this worker's consent.
  bool reads_without_consent = false;  ///< This worker needs no consent of others.
  bool operator==(const OfferedMemory&) const = default;

  /// Whether other workers of this node map it. Otherwise they read it by process_vm_readv.
  [[nodiscard]] bool is_on_gpu() const {
    return !ranges.empty() || (!segments.empty() && segments.front().handle.has_value());
  }
  /// The part for engines of this node: without `network`.
  [[nodiscard]] OfferedMemory for_this_node() const;
  /// The part for engines of other nodes: without addresses, handles, ranges and consent. Only
  /// with a network.
  [[nodiscard]] OfferedMemory for_other_nodes() const;
};
/// Errors: kInvalidArgument for a group's name that is empty or longer than kMaxGroupBytes, for no
/// block or guard, for more than
/// kMaxGuards guards, for no segment or more than kMaxSegmentsOnWire, for handles of another size
/// or of some segments only, for a range that does not exist or more than kMaxAllocations in them,
/// and for a region that its fabric does not have; those of read_fabric().
Result<OfferedMemory> read_memory(wire::DirectMemory::Reader reader);
void write_memory(const OfferedMemory& memory, wire::DirectMemory::Builder builder);

/// The registration of one rank of an engine.
struct Registration {
  std::string instance{};
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
  std::uint32_t shard = 0;
  std::uint32_t shards = 1;
  std::int32_t node = -1;  ///< NUMA node; -1: unknown.
  std::vector<std::pair<std::string, std::string>> factors{};
  std::uint64_t page_bytes = 0;
  std::uint64_t block_count = 0;
  std::vector<RegisteredKind> kinds{};  ///< Empty: one kind, a prefix, of `page_bytes`.
  std::uint32_t unit_tokens = 0;        ///< With `kinds`.
  std::uint32_t alignment_tokens = 0;   ///< With `kinds`.
  /// The consecutive shards that it holds, from `shard` on, in blocks that engines of other
  /// tensor-parallel sizes share; 0: one shard of blocks that they do not share.
  std::uint32_t cells = 0;
  std::optional<OfferedMemory> direct{};  ///< None: no engine reads its memory directly.
  /// Whether it reads blocks out of the pools of other nodes, through the fabric of `direct`.
  bool reads_pools = false;
  bool reads_pools_slowly = false;  ///< Slower than into ordinary memory.
};
/// Errors: kInvalidArgument for an instance's id, a list of factors or of kinds beyond the limits
/// above, a kind whose rule this build does not know, a rank that is not below `ranks`, a shard
/// that is not below `shards`, more shards than the ranks hold, cells that do not divide both of
/// its shard numbers, or cells beside kinds, direct memory beside either, and reads of pools
/// without a fabric; those of read_memory().
Result<Registration> read_registration(wire::Registration::Reader reader);
void write_registration(const Registration& registration, wire::Registration::Builder builder);

/// The report of one side of an engine about itself, for display.
struct EngineInfo {
  std::string device{};  ///< Empty: unknown.
  wire::Engine::Kernels kernels = wire::Engine::Kernels::UNKNOWN;
  wire::Engine::CopyPath copy_path = wire::Engine::CopyPath::UNKNOWN;
  bool loads = true;
  bool saves = true;
};
/// Names longer than the limit are cut; values of a later version count as unknown.
EngineInfo read_engine(wire::Engine::Reader reader);
void write_engine(const EngineInfo& engine, wire::Engine::Builder builder);
/// "unknown", "missing", "present" or "not needed".
std::string_view to_string(wire::Engine::Kernels kernels) noexcept;
/// "unknown", "host", "direct" or "staged".
std::string_view to_string(wire::Engine::CopyPath path) noexcept;

/// Why an engine that is configured to use the cache does not use it.
struct Decline {
  std::string instance{};
  wire::Side side = wire::Side::SCHEDULER;
  std::uint32_t rank = 0;  ///< A worker's.
  wire::DeclineReason reason = wire::DeclineReason::OTHER;
  std::string detail{};
};
/// A detail beyond the limit is cut between two characters; a reason of a later version counts as
/// OTHER. Errors: those of read_instance(); kInvalidArgument for a side that does not exist.
Result<Decline> read_decline(wire::Decline::Reader reader);
void write_decline(const Decline& decline, wire::Decline::Builder builder);
/// The reason as metrics and /instances name it: "other", "configuration", "engine", "model",
/// "weights", "device" or "failure".
std::string_view to_string(wire::DeclineReason reason) noexcept;
/// The reason with that name; none for an unknown name.
std::optional<wire::DeclineReason> parse_decline_reason(std::string_view name) noexcept;
/// "scheduler" or "worker".
std::string_view to_string(wire::Side side) noexcept;

/// Errors: kInvalidArgument for an id that is empty or longer than kMaxInstanceBytes.
Result<std::string> read_instance(::capnp::Text::Reader text);

template <typename T>
Result<std::vector<T>> read_numbers(typename ::capnp::List<T>::Reader reader) {
  if (reader.size() > kMaxKeysPerCall) {
    return fail(Errc::kInvalidArgument, "{} numbers in one call: {} are the limit", reader.size(),
                kMaxKeysPerCall);
  }
  std::vector<T> numbers;
  numbers.reserve(reader.size());
  for (const T number : reader) numbers.push_back(number);
  return numbers;
}

}  // namespace pegaflow
