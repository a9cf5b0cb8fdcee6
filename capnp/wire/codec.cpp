#include "capnp/wire/codec.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

namespace pegaflow {
namespace {

constexpr std::size_t kMaxBackendBytes = 64;
constexpr std::size_t kMaxAddressBytes = std::size_t{64} << 10;  // A worker's address a rail.
constexpr std::size_t kMaxKeyBytes = std::size_t{64} << 10;

std::vector<std::byte> to_bytes(::capnp::Data::Reader data) {
  const std::span<const ::kj::byte> bytes(data.begin(), data.size());
  const auto as_bytes = std::as_bytes(bytes);
  return {as_bytes.begin(), as_bytes.end()};
}

std::string to_std(::capnp::Text::Reader text) { return {text.begin(), text.size()}; }

/// The first `limit` bytes, without a character that the limit would cut in two (UTF-8).
std::string first_bytes(::capnp::Text::Reader text, std::size_t limit) {
  std::size_t size = std::min<std::size_t>(text.size(), limit);
  const auto continues = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  if (size < text.size()) {
    while (size != 0 && continues(size)) --size;
  }
  return {text.begin(), size};
}

/// By the number of the value.
constexpr std::string_view kKernels[] = {"unknown", "missing", "present", "not needed"};
constexpr std::string_view kCopyPaths[] = {"unknown", "host", "direct", "staged"};
constexpr std::string_view kSides[] = {"scheduler", "worker"};
constexpr const auto& kReasons = kDeclineReasonNames;

template <typename Enum, std::size_t kCount>
bool is_known(Enum value, const std::string_view (&)[kCount]) {
  return static_cast<std::size_t>(value) < kCount;
}

template <typename Enum, std::size_t kCount>
std::string_view name_of(Enum value, const std::string_view (&names)[kCount]) {
  return is_known(value, names) ? names[static_cast<std::size_t>(value)] : names[0];
}

template <typename Builder>
void write_outcome(const Result<void>& result, Builder builder) {
  if (result) {
    builder.setOk();
  } else {
    write_error(result.error(), builder.initError());
  }
}

template <typename Reader>
Result<void> read_outcome(Reader reader) {
  if (reader.isOk()) return {};
  if (reader.isError()) return tl::unexpected<Error>(read_error(reader.getError()));
  return fail(Errc::kInternal, "the server sent an answer of a later version");
}

}  // namespace

std::uint16_t common_version(std::uint16_t minimum, std::uint16_t maximum) {
  const std::uint16_t version = std::min(maximum, kWireMaximum);
  return version >= std::max(minimum, kWireMinimum) ? version : std::uint16_t{0};
}

Id128 read_id(wire::Id128::Reader reader) {
  return {.high = reader.getHigh(), .low = reader.getLow()};
}

void write_id(const Id128& id, wire::Id128::Builder builder) {
  builder.setHigh(id.high);
  builder.setLow(id.low);
}

Error read_error(wire::Error::Reader reader) {
  const std::uint16_t code = reader.getCode();
  return {.code = code < kErrcCount ? static_cast<Errc>(code) : Errc::kInternal,
          .detail = to_std(reader.getDetail())};
}

void write_error(const Error& error, wire::Error::Builder builder) {
  builder.setCode(static_cast<std::uint16_t>(error.code));
  builder.setDetail(::kj::StringPtr(error.detail.c_str(), error.detail.size()));
}

void write_done(const Result<void>& result, wire::Done::Builder builder) {
  write_outcome(result, builder);
}

Result<void> read_done(wire::Done::Reader reader) { return read_outcome(reader); }

void write_reached(const JobsReached& reached, wire::JobsReached::Builder builder) {
  write_outcome(reached.ended, builder);
  builder.setReached(reached.up_to);
}

JobsReached read_reached(wire::JobsReached::Reader reader) {
  return {.ended = read_outcome(reader), .up_to = reader.getReached()};
}

Result<std::span<const BlockKey>> read_keys(wire::Keys::Reader reader,
                                            std::vector<BlockKey>& scratch) {
  const std::size_t key_bytes = reader.getKeyBytes();
  const ::capnp::Data::Reader packed = reader.getPacked();
  if (key_bytes == 0 || key_bytes > BlockKey::kMaxBytes) {
    return fail(Errc::kInvalidArgument, "keys of {} bytes: 1 to {} are allowed", key_bytes,
                BlockKey::kMaxBytes);
  }
  if (packed.size() % key_bytes != 0) {
    return fail(Errc::kInvalidArgument, "{} bytes are not a whole number of {}-byte keys",
                packed.size(), key_bytes);
  }
  const std::size_t count = packed.size() / key_bytes;
  if (count > kMaxKeysPerCall) {
    return fail(Errc::kInvalidArgument, "{} keys in one call: the limit is {}", count,
                kMaxKeysPerCall);
  }
  if (key_bytes == BlockKey::kMaxBytes) {
    // A BlockKey has only bytes, so the message holds an array of them.
    static_assert(sizeof(BlockKey) == BlockKey::kMaxBytes && alignof(BlockKey) == 1 &&
                  std::is_trivially_copyable_v<BlockKey>);
    return std::span<const BlockKey>(reinterpret_cast<const BlockKey*>(packed.begin()), count);
  }
  if (scratch.size() < count) scratch.resize(count);
  const ::kj::byte* from = packed.begin();
  for (std::size_t i = 0; i < count; ++i, from += key_bytes) {
    scratch[i].bytes.fill(std::byte{0});
    std::memcpy(scratch[i].bytes.data(), from, key_bytes);
  }
  return std::span<const BlockKey>(scratch.data(), count);
}

void write_keys(std::span<const BlockKey> keys, std::size_t key_bytes,
                wire::Keys::Builder builder) {
  builder.setKeyBytes(static_cast<std::uint8_t>(key_bytes));
  ::capnp::Data::Builder packed =
      builder.initPacked(static_cast<unsigned>(keys.size() * key_bytes));
  ::kj::byte* to = packed.begin();
  for (const BlockKey& key : keys) {
    std::memcpy(to, key.bytes.data(), key_bytes);
    to += key_bytes;
  }
}

JobId read_job(wire::JobId::Reader reader) {
  return {.scheduler = read_id(reader.getScheduler()), .number = reader.getNumber()};
}

void write_job(const JobId& job, wire::JobId::Builder builder) {
  write_id(job.scheduler, builder.initScheduler());
  builder.setNumber(job.number);
}

Result<std::string> read_instance(::capnp::Text::Reader text) {
  if (text.size() == 0 || text.size() > kMaxInstanceBytes) {
    return fail(Errc::kInvalidArgument, "an instance's id of {} bytes: 1 to {} are allowed",
                text.size(), kMaxInstanceBytes);
  }
  return to_std(text);
}

namespace {

Result<std::vector<RegisteredKind>> read_kinds(::capnp::List<wire::Kind>::Reader list) {
  if (list.size() > kMaxKindsOnWire) {
    return fail(Errc::kInvalidArgument, "{} kinds of blocks: the limit is {}", list.size(),
                kMaxKindsOnWire);
  }
  std::vector<RegisteredKind> kinds;
  for (const wire::Kind::Reader kind : list) {
    if (kind.getRule() > wire::Kind::Rule::STATE) {
      return fail(Errc::kInvalidArgument, "kind {} of blocks has rule {}, which is unknown here",
                  kinds.size(), static_cast<unsigned>(kind.getRule()));
    }
    kinds.push_back({.rule = kind.getRule(),
                     .tokens = kind.getTokens(),
                     .block_tokens = kind.getBlockTokens(),
                     .page_bytes = kind.getPageBytes()});
  }
  return kinds;
}

}  // namespace

Result<FabricDescriptor> read_fabric(wire::Fabric::Reader reader) {
  const auto regions = reader.getRegions();
  if (reader.getBackend().size() > kMaxBackendBytes ||
      reader.getAddress().size() > kMaxAddressBytes || regions.size() > kMaxRegionsOnWire) {
    return fail(Errc::kInvalidArgument, "a fabric of {} regions, or with long names",
                regions.size());
  }
  FabricDescriptor fabric;
  const auto backend = reader.getBackend();
  fabric.backend.assign(backend.begin(), backend.size());
  fabric.incarnation = read_id(reader.getIncarnation());
  fabric.address = to_bytes(reader.getAddress());
  for (const wire::Fabric::Region::Reader region : regions) {
    if (region.getKey().size() > kMaxKeyBytes) {
      return fail(Errc::kInvalidArgument, "a region's key of {} bytes", region.getKey().size());
    }
    fabric.regions.push_back({.region = RegionId{region.getNumber()},
                              .size_bytes = region.getSizeBytes(),
                              .key = to_bytes(region.getKey())});
  }
  return fabric;
}

void write_fabric(const FabricDescriptor& fabric, wire::Fabric::Builder builder) {
  const auto data = [](const std::vector<std::byte>& bytes) {
    return ::capnp::Data::Reader(reinterpret_cast<const ::kj::byte*>(bytes.data()), bytes.size());
  };
  builder.setBackend(fabric.backend.c_str());
  write_id(fabric.incarnation, builder.initIncarnation());
  builder.setAddress(data(fabric.address));
  auto regions = builder.initRegions(static_cast<unsigned>(fabric.regions.size()));
  for (unsigned i = 0; i < regions.size(); ++i) {
    regions[i].setNumber(static_cast<std::uint32_t>(fabric.regions[i].region));
    regions[i].setSizeBytes(fabric.regions[i].size_bytes);
    regions[i].setKey(data(fabric.regions[i].key));
  }
}

namespace {

Result<OfferedMemory::Network> read_network(wire::DirectMemory::Reader reader,
                                            const OfferedMemory& memory) {
  OfferedMemory::Network network;
  PEGA_TRY_LET(network.fabric, read_fabric(reader.getFabric()));
  network.guards = RegionId{reader.getGuardRegion()};
  const auto has = [&](RegionId region) {
    return std::ranges::any_of(network.fabric.regions,
                               [region](const auto& one) { return one.region == region; });
  };
  const auto lost = std::ranges::find_if_not(
      memory.segments, [&](const OfferedMemory::Segment& one) { return has(one.region); });
  if (lost != memory.segments.end() || !has(network.guards)) {
    return fail(
        Errc::kInvalidArgument, "direct memory in region {}, which its fabric does not have",
        static_cast<std::uint32_t>(lost != memory.segments.end() ? lost->region : network.guards));
  }
  return network;
}

/// The ranges of memory whose segments were read.
Result<void> read_ranges(wire::DirectMemory::Reader reader, OfferedMemory& memory) {
  const auto ranges = reader.getRanges();
  if (ranges.size() == 0) return {};
  std::size_t allocations = 0;
  for (const wire::MappedRange::Reader range : ranges) {
    allocations += range.getSizes().size();
    if (memory.ranges.size() >= kMaxSegmentsOnWire || allocations > kMaxAllocations) {
      return fail(
          Errc::kInvalidArgument,
          "direct memory of {} ranges with {} allocations or more: the limits are {} and {}",
          ranges.size(), allocations, kMaxSegmentsOnWire, kMaxAllocations);
    }
    std::vector<std::uint64_t>& sizes = memory.ranges.emplace_back();
    for (const std::uint64_t bytes : range.getSizes()) sizes.push_back(bytes);
  }
  for (unsigned i = 0; i < memory.segments.size(); ++i) {
    OfferedMemory::Segment& segment = memory.segments[i];
    segment.range = reader.getSegments()[i].getRange();
    segment.handle.reset();
    if (segment.range >= memory.ranges.size()) {
      return fail(Errc::kInvalidArgument, "direct memory with a segment in range {} of {}",
                  segment.range, memory.ranges.size());
    }
  }
  return {};
}

}  // namespace

Result<OfferedMemory> read_memory(wire::DirectMemory::Reader reader) {
  const auto group = reader.getGroup();
  const auto segments = reader.getSegments();
  if (group.size() == 0 || group.size() > kMaxGroupBytes) {
    return fail(Errc::kInvalidArgument,
                "the name of a direct group has {} bytes: 1 to {} are allowed", group.size(),
                kMaxGroupBytes);
  }
  if (segments.size() == 0 || segments.size() > kMaxSegmentsOnWire || reader.getBlocks() == 0 ||
      reader.getGuardCount() == 0 || reader.getGuardCount() > kMaxGuards) {
    return fail(Errc::kInvalidArgument,
                "direct memory of {} blocks with {} segments and {} guards: 1 to {} segments and 1 "
                "to {} guards are possible, and at least one block",
                reader.getBlocks(), segments.size(), reader.getGuardCount(), kMaxSegmentsOnWire,
                kMaxGuards);
  }
  OfferedMemory memory{.group = to_std(group),
                       .blocks = reader.getBlocks(),
                       .segments = {},
                       .guards = reader.getGuardCount(),
                       .needs_consent = reader.getNeedsConsent(),
                       .reads_without_consent = reader.getReadsWithoutConsent()};
  for (const wire::Segment::Reader segment : segments) {
    OfferedMemory::Segment& read =
        memory.segments.emplace_back(segment.getBase(), segment.getStride(), segment.getBytes());
    const auto handle = segment.getHandle();
    if (handle.size() != 0) {
      auto& bytes = read.handle.emplace();
      if (handle.size() != bytes.size()) {
        return fail(Errc::kInvalidArgument, "direct memory with a handle of {} bytes, not {}",
                    handle.size(), bytes.size());
      }
      std::memcpy(bytes.data(), handle.begin(), bytes.size());
    }
    if (read.handle.has_value() != memory.segments.front().handle.has_value()) {
      return fail(Errc::kInvalidArgument, "direct memory of which some segments have handles");
    }
    read.region = RegionId{segment.getRegion()};
    read.offset = segment.getOffset();
  }
  PEGA_TRY(read_ranges(reader, memory));
  if (reader.hasFabric()) {
    PEGA_TRY_LET(memory.network, read_network(reader, memory));
  }
  return memory;
}

OfferedMemory OfferedMemory::for_this_node() const {
  OfferedMemory part = *this;
  part.network.reset();
  for (Segment& segment : part.segments) {
    segment.region = {};
    segment.offset = 0;
  }
  return part;
}

OfferedMemory OfferedMemory::for_other_nodes() const {
  OfferedMemory part = *this;
  part.ranges.clear();
  part.needs_consent = false;
  part.reads_without_consent = false;
  for (Segment& segment : part.segments) {
    segment.base = 0;
    segment.range = 0;
    segment.handle.reset();
  }
  return part;
}

void write_memory(const OfferedMemory& memory, wire::DirectMemory::Builder builder) {
  builder.setGroup(memory.group.c_str());
  builder.setBlocks(memory.blocks);
  builder.setGuardCount(memory.guards);
  builder.setNeedsConsent(memory.needs_consent);
  builder.setReadsWithoutConsent(memory.reads_without_consent);
  auto segments = builder.initSegments(static_cast<unsigned>(memory.segments.size()));
  for (unsigned i = 0; i < segments.size(); ++i) {
    segments[i].setBase(memory.segments[i].base);
    segments[i].setStride(memory.segments[i].stride);
    segments[i].setBytes(memory.segments[i].bytes);
    if (!memory.ranges.empty()) {
      segments[i].initHandle(static_cast<unsigned>(OfferedMemory::kHandleBytes));
    } else if (const auto& handle = memory.segments[i].handle) {
      std::memcpy(segments[i].initHandle(static_cast<unsigned>(handle->size())).begin(),
                  handle->data(), handle->size());
    }
    segments[i].setRegion(static_cast<std::uint32_t>(memory.segments[i].region));
    segments[i].setOffset(memory.segments[i].offset);
    segments[i].setRange(memory.segments[i].range);
  }
  if (!memory.ranges.empty()) {
    auto ranges = builder.initRanges(static_cast<unsigned>(memory.ranges.size()));
    for (unsigned i = 0; i < ranges.size(); ++i) {
      const std::vector<std::uint64_t>& sizes = memory.ranges[i];
      write_numbers(std::span(sizes), ranges[i].initSizes(static_cast<unsigned>(sizes.size())));
    }
  }
  if (!memory.network) return;
  write_fabric(memory.network->fabric, builder.initFabric());
  builder.setGuardRegion(static_cast<std::uint32_t>(memory.network->guards));
}

Result<Registration> read_registration(wire::Registration::Reader reader) {
  Registration registration;
  PEGA_TRY_LET(registration.instance, read_instance(reader.getInstance()));
  registration.rank = reader.getRank();
  registration.ranks = reader.getRanks();
  registration.page_bytes = reader.getPageBytes();
  registration.block_count = reader.getBlockCount();
  if (registration.rank >= registration.ranks) {
    return fail(Errc::kInvalidArgument, "rank {} of {}", registration.rank, registration.ranks);
  }
  registration.shard = reader.getShard();
  registration.shards = reader.getShards();
  registration.node = reader.getNode();
  registration.cells = reader.getCells();
  const std::uint64_t each = std::max<std::uint32_t>(1, registration.cells);
  if (registration.shard >= registration.shards ||
      registration.shards > registration.ranks * each) {
    return fail(Errc::kInvalidArgument, "shard {} of {} for {} ranks", registration.shard,
                registration.shards, registration.ranks);
  }
  if (registration.shard % each != 0 || registration.shards % each != 0) {
    return fail(Errc::kInvalidArgument, "shard {} of {} does not begin a run of {} cells",
                registration.shard, registration.shards, registration.cells);
  }
  const auto factors = reader.getFactors();
  if (factors.size() > kMaxFactorsOnWire) {
    return fail(Errc::kInvalidArgument, "{} factors of a namespace: the limit is {}",
                factors.size(), kMaxFactorsOnWire);
  }
  registration.factors.reserve(factors.size());
  for (const wire::Factor::Reader factor : factors) {
    registration.factors.emplace_back(to_std(factor.getName()), to_std(factor.getValue()));
  }
  PEGA_TRY_LET(registration.kinds, read_kinds(reader.getKinds()));
  registration.unit_tokens = reader.getUnitTokens();
  registration.alignment_tokens = reader.getAlignmentTokens();
  if (registration.cells != 0 && !registration.kinds.empty()) {
    return fail(Errc::kInvalidArgument,
                "{} cells beside {} kinds of blocks, which cannot be shared "
                "between tensor-parallel sizes",
                registration.cells, registration.kinds.size());
  }
  registration.reads_pools = reader.getReadsPools();
  registration.reads_pools_slowly = reader.getReadsPoolsSlowly();
  const bool has_fabric = reader.hasDirect() && reader.getDirect().hasFabric();
  if (registration.reads_pools && !has_fabric) {
    return fail(Errc::kInvalidArgument, "reads of pools of other nodes without a fabric");
  }
  if (!reader.hasDirect()) return registration;
  if (registration.cells != 0 || !registration.kinds.empty()) {
    return fail(Errc::kInvalidArgument,
                "direct memory beside {} cells and {} kinds of blocks: it has one kind, of ranks "
                "of one size",
                registration.cells, registration.kinds.size());
  }
  PEGA_TRY_LET(registration.direct, read_memory(reader.getDirect()));
  return registration;
}

void write_registration(const Registration& registration, wire::Registration::Builder builder) {
  builder.setInstance(registration.instance.c_str());
  builder.setRank(registration.rank);
  builder.setRanks(registration.ranks);
  builder.setShard(registration.shard);
  builder.setShards(registration.shards);
  builder.setNode(registration.node);
  builder.setPageBytes(registration.page_bytes);
  builder.setBlockCount(registration.block_count);
  builder.setCells(registration.cells);
  auto factors = builder.initFactors(static_cast<unsigned>(registration.factors.size()));
  for (unsigned i = 0; i < factors.size(); ++i) {
    factors[i].setName(registration.factors[i].first.c_str());
    factors[i].setValue(registration.factors[i].second.c_str());
  }
  if (registration.direct) write_memory(*registration.direct, builder.initDirect());
  builder.setReadsPools(registration.reads_pools);
  builder.setReadsPoolsSlowly(registration.reads_pools_slowly);
  if (registration.kinds.empty()) return;
  auto kinds = builder.initKinds(static_cast<unsigned>(registration.kinds.size()));
  for (unsigned i = 0; i < kinds.size(); ++i) {
    kinds[i].setRule(registration.kinds[i].rule);
    kinds[i].setTokens(registration.kinds[i].tokens);
    kinds[i].setBlockTokens(registration.kinds[i].block_tokens);
    kinds[i].setPageBytes(registration.kinds[i].page_bytes);
  }
  builder.setUnitTokens(registration.unit_tokens);
  builder.setAlignmentTokens(registration.alignment_tokens);
}

EngineInfo read_engine(wire::Engine::Reader reader) {
  EngineInfo engine{.device = first_bytes(reader.getDevice(), kMaxDeviceBytes),
                    .loads = reader.getLoads(),
                    .saves = reader.getSaves()};
  if (is_known(reader.getKernels(), kKernels)) engine.kernels = reader.getKernels();
  if (is_known(reader.getCopyPath(), kCopyPaths)) engine.copy_path = reader.getCopyPath();
  return engine;
}

void write_engine(const EngineInfo& engine, wire::Engine::Builder builder) {
  builder.setDevice(engine.device.c_str());
  builder.setKernels(engine.kernels);
  builder.setCopyPath(engine.copy_path);
  builder.setLoads(engine.loads);
  builder.setSaves(engine.saves);
}

std::string_view to_string(wire::Engine::Kernels kernels) noexcept {
  return name_of(kernels, kKernels);
}
std::string_view to_string(wire::Engine::CopyPath path) noexcept {
  return name_of(path, kCopyPaths);
}
std::string_view to_string(wire::Side side) noexcept { return name_of(side, kSides); }
std::string_view to_string(wire::DeclineReason reason) noexcept {
  return name_of(reason, kReasons);
}

std::optional<wire::DeclineReason> parse_decline_reason(std::string_view name) noexcept {
  const auto* const found = std::find(std::begin(kReasons), std::end(kReasons), name);
  if (found == std::end(kReasons)) return std::nullopt;
  return static_cast<wire::DeclineReason>(found - std::begin(kReasons));
}

Result<Decline> read_decline(wire::Decline::Reader reader) {
  Decline decline;
  PEGA_TRY_LET(decline.instance, read_instance(reader.getInstance()));
  if (!is_known(reader.getSide(), kSides)) {
    return fail(Errc::kInvalidArgument,
                "decline: side {} is neither the scheduler's nor a worker's",
                static_cast<unsigned>(reader.getSide()));
  }
  decline.side = reader.getSide();
  decline.rank = reader.getRank();
  if (is_known(reader.getReason(), kReasons)) decline.reason = reader.getReason();
  decline.detail = first_bytes(reader.getDetail(), kMaxNoticeBytes);
  return decline;
}

void write_decline(const Decline& decline, wire::Decline::Builder builder) {
  builder.setInstance(decline.instance.c_str());
  builder.setSide(decline.side);
  builder.setRank(decline.rank);
  builder.setReason(decline.reason);
  builder.setDetail(decline.detail.c_str());
}

}  // namespace pegaflow
