#include "capnp/wire/codec.h"

#include <string>
#include <vector>

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <doctest/doctest.h>

namespace pegaflow {
namespace {

std::vector<BlockKey> some_keys(std::size_t count, std::size_t key_bytes) {
  std::vector<BlockKey> keys(count);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t b = 0; b < key_bytes; ++b) {
      keys[i].bytes[b] = static_cast<std::byte>(i * 31 + b + 1);
    }
  }
  return keys;
}

/// The error of reading packed keys.
Errc keys_error(std::uint8_t key_bytes, std::size_t packed_bytes) {
  capnp::MallocMessageBuilder message;
  auto keys = message.initRoot<wire::Keys>();
  keys.setKeyBytes(key_bytes);
  keys.initPacked(static_cast<unsigned>(packed_bytes));
  std::vector<BlockKey> scratch;
  const auto read = read_keys(keys, scratch);
  REQUIRE_FALSE(read);
  return read.error().code;
}

TEST_SUITE("codec") {
  TEST_CASE("ids, jobs and errors are read back unchanged") {
    capnp::MallocMessageBuilder message;
    const Id128 id{.high = 0x0123456789ABCDEF, .low = ~std::uint64_t{0}};
    auto job_builder = message.initRoot<wire::JobId>();
    write_job({.scheduler = id, .number = 77}, job_builder);
    CHECK(read_job(job_builder) == JobId{.scheduler = id, .number = 77});

    capnp::MallocMessageBuilder other;
    auto error_builder = other.initRoot<wire::Error>();
    for (std::size_t code = 0; code < kErrcCount; ++code) {
      write_error({.code = static_cast<Errc>(code), .detail = "why \xc3\xa9"}, error_builder);
      const Error read = read_error(error_builder);
      CHECK(read.code == static_cast<Errc>(code));
      CHECK(read.detail == "why \xc3\xa9");
    }
  }

  TEST_CASE("a code of a later version counts as internal") {
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::Error>();
    builder.setCode(kErrcCount);
    builder.setDetail("new");

    const Error read = read_error(builder);

    CHECK(read.code == Errc::kInternal);
    CHECK(read.detail == "new");
  }

  TEST_CASE("done is ok or has its error") {
    capnp::MallocMessageBuilder message;
    auto done = message.initRoot<wire::Done>();
    write_done(Result<void>(), done);
    CHECK(read_done(done));
    write_done(fail(Errc::kGone, "it is {}", "gone"), done);

    const auto read = read_done(done);

    REQUIRE_FALSE(read);
    CHECK(read.error().code == Errc::kGone);
    CHECK(read.error().detail == "it is gone");
  }

  TEST_CASE("how far jobs are is read back, and an older build reads the same answer as done") {
    for (const bool is_over : {true, false}) {
      CAPTURE(is_over);
      capnp::MallocMessageBuilder message;
      const Result<void> ended = is_over ? Result<void>() : fail(Errc::kTimeout, "not yet");
      write_reached({.ended = ended, .up_to = 1000}, message.initRoot<wire::JobsReached>());

      const JobsReached read = read_reached(message.getRoot<wire::JobsReached>().asReader());
      const Result<void> done = read_done(message.getRoot<wire::Done>().asReader());

      CHECK(read.up_to == 1000);
      CHECK(read.ended.has_value() == is_over);
      CHECK(done.has_value() == is_over);
      if (!done) CHECK(done.error().detail == "not yet");
    }
  }

  TEST_CASE("the done of an older build is read back, and how far jobs are is unknown") {
    for (const bool is_over : {true, false}) {
      CAPTURE(is_over);
      capnp::MallocMessageBuilder message;
      const Result<void> ended = is_over ? Result<void>() : fail(Errc::kTimeout, "not yet");
      write_done(ended, message.initRoot<wire::Done>());
      // As it comes over the wire: a builder would extend the struct.
      const auto words = capnp::messageToFlatArray(message);
      capnp::FlatArrayMessageReader received(words);

      const JobsReached read = read_reached(received.getRoot<wire::JobsReached>());

      CHECK(read.up_to == 0);
      CHECK(read.ended.has_value() == is_over);
      if (!is_over) CHECK(read.ended.error().code == Errc::kTimeout);
    }
  }

  TEST_CASE("keys of every length are read back, padded with zeros") {
    std::vector<BlockKey> scratch(100, BlockKey{});
    for (auto& stale : scratch) stale.bytes.fill(std::byte{0xEE});
    for (std::size_t key_bytes = 1; key_bytes <= BlockKey::kMaxBytes; ++key_bytes) {
      CAPTURE(key_bytes);
      const auto keys = some_keys(37, key_bytes);
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::Keys>();
      write_keys(keys, key_bytes, builder);
      CHECK(builder.getPacked().size() == 37 * key_bytes);

      const auto read = read_keys(builder.asReader(), scratch);

      REQUIRE(read);
      CHECK(std::equal(read->begin(), read->end(), keys.begin(), keys.end()));
    }
  }

  TEST_CASE("keys of 32 bytes stay where they are, and the scratch as it was") {
    const auto keys = some_keys(37, BlockKey::kMaxBytes);
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::Keys>();
    write_keys(keys, BlockKey::kMaxBytes, builder);
    std::vector<BlockKey> scratch;

    const auto read = read_keys(builder.asReader(), scratch);

    REQUIRE(read);
    const auto* const first = reinterpret_cast<const kj::byte*>(read->data());
    CHECK(first == builder.asReader().getPacked().begin());
    CHECK(scratch.empty());
  }

  TEST_CASE("an empty list has no keys, and more keys than the limit are refused") {
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::Keys>();
    builder.setKeyBytes(32);
    std::vector<BlockKey> scratch;
    CHECK(read_keys(builder.asReader(), scratch)->empty());

    builder.initPacked(kMaxKeysPerCall * 32);
    CHECK(read_keys(builder.asReader(), scratch)->size() == kMaxKeysPerCall);
  }

  TEST_CASE("invalid keys are refused") {
    CHECK(keys_error(0, 0) == Errc::kInvalidArgument);
    CHECK(keys_error(33, 33) == Errc::kInvalidArgument);
    CHECK(keys_error(32, 31) == Errc::kInvalidArgument);
    CHECK(keys_error(32, (kMaxKeysPerCall + 1) * 32) == Errc::kInvalidArgument);
    CHECK(keys_error(1, kMaxKeysPerCall + 1) == Errc::kInvalidArgument);
  }

  TEST_CASE("a registration is read back unchanged") {
    const Registration registration = {.instance = "engine",
                                       .rank = 1,
                                       .ranks = 4,
                                       .shard = 1,
                                       .shards = 2,
                                       .node = 3,
                                       .factors = {{"a", "1"}, {"b", ""}},
                                       .page_bytes = 123456789,
                                       .block_count = 42};
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::Registration>();
    write_registration(registration, builder);

    const auto read = read_registration(builder);

    REQUIRE(read);
    CHECK(read->instance == registration.instance);
    CHECK(read->rank == registration.rank);
    CHECK(read->ranks == registration.ranks);
    CHECK(read->shard == registration.shard);
    CHECK(read->shards == registration.shards);
    CHECK(read->node == registration.node);
    CHECK(read->factors == registration.factors);
    CHECK(read->page_bytes == registration.page_bytes);
    CHECK(read->block_count == registration.block_count);
  }

  TEST_CASE("a registration beyond its limits is refused") {
    const auto code = [](const Registration& registration) {
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::Registration>();
      write_registration(registration, builder);
      const auto read = read_registration(builder);
      REQUIRE_FALSE(read);
      return read.error().code;
    };
    const Registration right = {.instance = "engine", .factors = {{"a", "1"}}, .page_bytes = 1};

    Registration wrong = right;
    wrong.instance.clear();
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong.instance.assign(kMaxInstanceBytes + 1, 'x');
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong = right;
    wrong.rank = 1;
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong.rank = 0;
    wrong.ranks = 0;
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong = right;
    wrong.shard = 1;
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong.shards = 2;  // More than there are ranks.
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong = right;
    wrong.factors.assign(kMaxFactorsOnWire + 1, {"f", "v"});
    CHECK(code(wrong) == Errc::kInvalidArgument);
  }

  TEST_CASE("cells are read back unchanged, and impossible ones are refused by name") {
    Registration registration = {.instance = "engine",
                                 .rank = 1,
                                 .ranks = 2,
                                 .shard = 4,
                                 .shards = 8,
                                 .page_bytes = 4 * 4096,
                                 .cells = 4};
    const auto read_back = [&]() {
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::Registration>();
      write_registration(registration, builder);
      return read_registration(builder);
    };
    const auto read = read_back();
    REQUIRE(read);
    CHECK(read->cells == 4);
    CHECK(read->shard == 4);

    registration.shard = 2;
    CHECK(read_back().error().detail == "shard 2 of 8 does not begin a run of 4 cells");
    registration.shard = 4;
    registration.shards = 10;
    CHECK(read_back().error().detail == "shard 4 of 10 for 2 ranks");
    registration.shards = 7;
    CHECK(read_back().error().detail == "shard 4 of 7 does not begin a run of 4 cells");
    registration.shards = 8;
    registration.cells = 0xFFFFFFFF;
    CHECK(read_back().error().detail == "shard 4 of 8 does not begin a run of 4294967295 cells");
    registration.cells = 4;
    registration.kinds = {{.block_tokens = 16, .page_bytes = 4096}};
    CHECK(read_back().error().detail.find("4 cells beside 1 kinds of blocks") == 0);
  }

  TEST_CASE("kinds of blocks are read back unchanged, and impossible ones are refused by name") {
    Registration registration = {
        .instance = "engine",
        .kinds = {{.rule = wire::Kind::Rule::PREFIX, .block_tokens = 16, .page_bytes = 4096},
                  {.rule = wire::Kind::Rule::TRAILING,
                   .tokens = 1023,
                   .block_tokens = 32,
                   .page_bytes = std::uint64_t{1} << 33},
                  {.rule = wire::Kind::Rule::STATE, .block_tokens = 64}},
        .unit_tokens = 16,
        .alignment_tokens = 64};
    const auto read_back = [&]() {
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::Registration>();
      write_registration(registration, builder);
      return read_registration(builder);
    };
    const auto read = read_back();
    REQUIRE(read);
    CHECK(read->kinds == registration.kinds);
    CHECK(read->unit_tokens == 16);
    CHECK(read->alignment_tokens == 64);

    registration.kinds[1].rule = static_cast<wire::Kind::Rule>(4);
    CHECK(read_back().error().detail == "kind 1 of blocks has rule 4, which is unknown here");
    registration.kinds.assign(kMaxKindsOnWire, {.block_tokens = 16});
    CHECK(read_back());
    registration.kinds.resize(kMaxKindsOnWire + 1);
    CHECK(read_back().error().detail == "17 kinds of blocks: the limit is 16");
    registration.kinds.clear();  // One kind: the fields that belong to several stay unset.
    CHECK(read_back()->kinds.empty());
    CHECK(read_back()->unit_tokens == 0);
  }

  TEST_CASE("an engine's description is read back unchanged, and a later value counts as unknown") {
    const EngineInfo engine{.device = "NVIDIA H200",
                            .kernels = wire::Engine::Kernels::PRESENT,
                            .copy_path = wire::Engine::CopyPath::STAGED,
                            .loads = false,
                            .saves = true};
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::Engine>();
    write_engine(engine, builder);

    const EngineInfo read = read_engine(builder);

    CHECK(read.device == "NVIDIA H200");
    CHECK(to_string(read.kernels) == "present");
    CHECK(to_string(read.copy_path) == "staged");
    CHECK_FALSE(read.loads);
    CHECK(read.saves);

    builder.setKernels(static_cast<wire::Engine::Kernels>(77));
    builder.setCopyPath(static_cast<wire::Engine::CopyPath>(77));
    builder.setDevice(std::string(kMaxDeviceBytes + 1, 'x').c_str());
    CHECK(to_string(read_engine(builder).kernels) == "unknown");
    CHECK(to_string(read_engine(builder).copy_path) == "unknown");
    CHECK(read_engine(builder).device.size() == kMaxDeviceBytes);
  }

  TEST_CASE("a decline is read back unchanged, its text cut between two characters") {
    const Decline decline{.instance = "engine",
                          .side = wire::Side::WORKER,
                          .rank = 3,
                          .reason = wire::DeclineReason::WEIGHTS,
                          .detail = "no id"};
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::Decline>();
    write_decline(decline, builder);

    const auto read = read_decline(builder);

    REQUIRE(read);
    CHECK(read->instance == "engine");
    CHECK(to_string(read->side) == "worker");
    CHECK(read->rank == 3);
    CHECK(to_string(read->reason) == "weights");
    CHECK(read->detail == "no id");

    // The limit falls into the second byte of the last character.
    builder.setDetail((std::string(kMaxNoticeBytes - 1, 'x') + "\xc3\xa9").c_str());
    CHECK(read_decline(builder)->detail == std::string(kMaxNoticeBytes - 1, 'x'));
    builder.setReason(static_cast<wire::DeclineReason>(77));
    CHECK(read_decline(builder)->reason == wire::DeclineReason::OTHER);
    builder.setSide(static_cast<wire::Side>(2));
    CHECK(read_decline(builder).error().code == Errc::kInvalidArgument);
    builder.setSide(wire::Side::SCHEDULER);
    builder.setInstance("");
    CHECK(read_decline(builder).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("each reason of a decline has a name of its own that is read back") {
    for (std::size_t i = 0; i < kDeclineReasons; ++i) {
      const auto reason = static_cast<wire::DeclineReason>(i);
      CHECK(parse_decline_reason(to_string(reason)) == reason);
    }
    CHECK_FALSE(parse_decline_reason("unheard"));
  }

  TEST_CASE("numbers are read back unchanged, and too many are refused") {
    capnp::MallocMessageBuilder message;
    auto builder = message.getRoot<capnp::AnyPointer>();
    const std::vector<std::uint64_t> numbers = {0, 1, ~std::uint64_t{0}};
    write_numbers<std::uint64_t>(numbers, builder.initAs<capnp::List<std::uint64_t>>(3));
    const auto read = read_numbers<std::uint64_t>(builder.getAs<capnp::List<std::uint64_t>>());
    REQUIRE(read);
    CHECK(*read == numbers);

    const auto beyond = read_numbers<std::uint32_t>(
        builder.initAs<capnp::List<std::uint32_t>>(kMaxKeysPerCall + 1));
    REQUIRE_FALSE(beyond);
    CHECK(beyond.error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("the common version is the newest that both sides speak") {
    static_assert(kWireMinimum == 1 && kWireMaximum == 4, "extend the cases below");
    CHECK(common_version(1, 1) == 1);
    CHECK(common_version(1, 2) == 2);
    CHECK(common_version(2, 3) == 3);
    CHECK(common_version(3, 3) == 3);
    CHECK(common_version(3, 4) == 4);
    CHECK(common_version(4, 5) == 4);
    CHECK(common_version(0, 1) == 1);
    CHECK(common_version(0, 65535) == 4);
    CHECK(common_version(5, 6) == 0);
    CHECK(common_version(0, 0) == 0);
    CHECK(common_version(3, 1) == 0);  // No range at all.
  }

  TEST_CASE("memory that other engines read survives its message, with handles or without") {
    OfferedMemory memory{.group = "pd",
                         .blocks = 100,
                         .segments = {{.base = 1 << 20, .stride = 128, .bytes = 64},
                                      {.base = 64, .stride = 128, .bytes = 64}},
                         .guards = 8};
    const auto read_back = [&] {
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::DirectMemory>();
      write_memory(memory, builder);
      return read_memory(builder);
    };
    CHECK(read_back().value() == memory);
    memory.needs_consent = true;
    CHECK(read_back().value() == memory);
    memory.reads_without_consent = true;
    CHECK(read_back().value() == memory);
    CHECK_FALSE(memory.for_other_nodes().needs_consent);
    CHECK_FALSE(memory.for_other_nodes().reads_without_consent);
    for (std::size_t i = 0; i < 2; ++i) {
      auto& handle = memory.segments[i].handle.emplace();
      for (std::size_t b = 0; b < handle.size(); ++b) handle[b] = static_cast<std::byte>(b + i);
    }
    CHECK(read_back().value() == memory);
    memory.segments[0].handle.reset();
    CHECK(read_back().error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("memory of several allocations survives its message, and has its limits") {
    OfferedMemory memory{.group = "pd",
                         .blocks = 100,
                         .segments = {{.base = 64, .stride = 128, .bytes = 64, .range = 1},
                                      {.base = 0, .stride = 128, .bytes = 64, .range = 0}},
                         .guards = 8,
                         .ranges = {{2 << 20}, std::vector<std::uint64_t>(9000, 20 << 20)}};
    const auto read_back = [](const OfferedMemory& sent) {
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::DirectMemory>();
      write_memory(sent, builder);
      return read_memory(builder);
    };
    CHECK(read_back(memory).value() == memory);
    CHECK(memory.is_on_gpu());
    CHECK(memory.for_this_node() == memory);
    CHECK_FALSE(memory.for_other_nodes().is_on_gpu());
    CHECK(memory.for_other_nodes().segments[0].range == 0);

    OfferedMemory wrong = memory;
    wrong.segments[0].range = 2;
    CHECK(read_back(wrong).error().detail == "direct memory with a segment in range 2 of 2");
    // A client that does not know ranges finds handles, none of which CUDA opens.
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::DirectMemory>();
    write_memory(memory, builder);
    builder.initRanges(0);
    CHECK(read_memory(builder).value().segments[0].handle ==
          std::array<std::byte, OfferedMemory::kHandleBytes>{});
    wrong = memory;
    wrong.ranges[1].resize(kMaxAllocations);
    CHECK(read_back(wrong).error().detail.find("the limits are 1024 and 64009") !=
          std::string::npos);
    wrong = memory;
    wrong.ranges.resize(kMaxSegmentsOnWire + 1);
    CHECK(read_back(wrong).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("only a worker with a fabric reads the pools of other nodes") {
    Registration sent{.instance = "engine", .page_bytes = 8};
    sent.direct =
        OfferedMemory{.group = "pd", .blocks = 1, .segments = {{.bytes = 8}}, .guards = 1};
    sent.reads_pools = true;
    const auto read_back = [&] {
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::Registration>();
      write_registration(sent, builder);
      return read_registration(builder);
    };
    CHECK(read_back().error().detail == "reads of pools of other nodes without a fabric");
    sent.direct->network.emplace().fabric.regions = {{.region = RegionId{0}, .size_bytes = 64}};
    CHECK(read_back().value().reads_pools);
    CHECK_FALSE(read_back().value().reads_pools_slowly);
    sent.reads_pools_slowly = true;
    CHECK(read_back().value().reads_pools_slowly);
    sent.reads_pools = false;
    CHECK_FALSE(read_back().value().reads_pools);
    sent.direct.reset();
    sent.reads_pools = true;
    CHECK(read_back().error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("memory with a network has a part for this node and one for others") {
    OfferedMemory memory{
        .group = "pd",
        .blocks = 100,
        .segments =
            {{.base = 1 << 20, .stride = 128, .bytes = 64, .handle = {}, .region = RegionId{3}},
             {.base = 1 << 21,
              .stride = 128,
              .bytes = 64,
              .handle = {},
              .region = RegionId{3},
              .offset = 4096}},
        .guards = 8};
    memory.network.emplace(OfferedMemory::Network{
        .fabric =
            {.backend = "ucx",
             .incarnation = Id128{1, 2},
             .address = {std::byte{7}},
             .regions = {{.region = RegionId{3}, .size_bytes = 1 << 16, .key = {std::byte{8}}},
                         {.region = RegionId{4}, .size_bytes = 64}}},
        .guards = RegionId{4}});
    const auto read_back = [&](const OfferedMemory& sent) {
      capnp::MallocMessageBuilder message;
      auto builder = message.initRoot<wire::DirectMemory>();
      write_memory(sent, builder);
      return read_memory(builder);
    };
    CHECK(read_back(memory).value() == memory);
    const OfferedMemory here = memory.for_this_node();
    CHECK_FALSE(here.network);
    CHECK(here.segments[1].base == 1 << 21);
    CHECK(here.segments[1].offset == 0);
    CHECK(read_back(here).value() == here);
    const OfferedMemory there = memory.for_other_nodes();
    CHECK(there.network == memory.network);
    CHECK(there.segments[1].base == 0);
    CHECK(there.segments[1].offset == 4096);

    memory.segments[1].region = RegionId{5};
    CHECK(read_back(memory).error().detail ==
          "direct memory in region 5, which its fabric does not have");
    memory.segments[1].region = RegionId{3};
    memory.network->guards = RegionId{6};
    CHECK(read_back(memory).error().detail ==
          "direct memory in region 6, which its fabric does not have");
  }

  TEST_CASE("a handle of another size is rejected") {
    capnp::MallocMessageBuilder message;
    auto builder = message.initRoot<wire::DirectMemory>();
    write_memory({.group = "pd", .blocks = 1, .segments = {{.bytes = 8}}, .guards = 1}, builder);
    builder.getSegments()[0].initHandle(63);
    CHECK(read_memory(builder).error().detail == "direct memory with a handle of 63 bytes, not 64");
  }
}

}  // namespace
}  // namespace pegaflow
