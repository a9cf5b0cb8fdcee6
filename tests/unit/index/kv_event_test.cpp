#include "index/events/kv_event.h"

#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/seed.h"

namespace pegaflow::index {
namespace {

using Json = nlohmann::json;
using Bytes = std::vector<std::uint8_t>;

// Payload of vLLM 0.32 with session_id and report mode full, as its CPU build sent it.
constexpr std::string_view kVllm032 =
    "93cb41dac0ba7d9e34b8918ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393cf55a92b"
    "47d1e36d7bcfbf5f48e9b1d29d91cf1b4cd8fbf63c8443b1706172656e745f626c6f636b5f68617368c0a9746f6b65"
    "6e5f696473dc0060cd0500cd0210cd05f4cd02e3cd0661cd058bcd078fcd06c0cd05f0cd053ccd0765cd044240cd06"
    "becd03becd063acd0790cd0203cd05366fcd073acd0146cceccd02fecd03c5cd06f7cd01fdcd0310cd045eccd5cd04"
    "9ccd02031fcd05decd01c0cd0348cd0241cd0179cd0759cd06f5cd0625cd0322cd014bcd061dcd0665cc98cd0121cd"
    "04f6cd04f5cd0394cd0108cd011308cd07cccd06fd0fcd01b1cd0635cd01becd07b3cd0158cd06ffcd0159cd0255cd"
    "0287cd07b6cd019ccd0455cd0707cd0571cd0506cd01a8cd0179cd078ccd07c4cd058bcd0198cd07c0cd07bdcd072b"
    "cd0315cd026831cd02e8cd0356cd0158cd0781cd012fcd0221cc8acd02accd026ecd068fcd04d8cd04b50baa626c6f"
    "636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b"
    "65797393c0c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f61747465"
    "6e74696f6eaa73657373696f6e5f6964a87066313a3030303200";

// As TensorRT-LLM's streaming publisher encodes its events: tagged maps in a positional batch,
// hashes as signed numbers, and texts in place of tokens where an image begins.
constexpr std::string_view kTensorRtLlm =
    "93cb41daac4ee02000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392d3e43222"
    "8522a304abcf756b1d258c63ccc0b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647398010203"
    "0405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65"
    "c089a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391f9b1706172656e745f626c6f636b"
    "5f68617368cf756b1d258c63ccc0a9746f6b656e5f69647394a86533623063343432cd7d01cd7d0209aa626c6f636b"
    "5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a76d6d5f6b6579739191"
    "83a474797065a66d6d5f6b6579a468617368a86533623063343432ac73746172745f6f66667365740083a474797065"
    "ac426c6f636b52656d6f766564ac626c6f636b5f68617368657392cf756b1d258c63ccc0f9a66d656469756da34750"
    "5500";

Bytes from_hex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  Bytes bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(digit(hex[i]) * 16 + digit(hex[i + 1])));
  }
  return bytes;
}

Result<KvBatch> decode(const Bytes& bytes, const KvEventDecoder::Options& options = {}) {
  return KvEventDecoder(options).decode(std::as_bytes(std::span(bytes)));
}

// A batch with these events, as vLLM writes it.
// Lists, because nlohmann takes {x} for x where a Json is expected.
using Events = std::initializer_list<Json>;
Bytes batch_of(Events events, const Json& rank = nullptr) {
  return Json::to_msgpack(Json::array({1234567890.0, Json(Json::array_t(events)), rank}));
}

KvBatch decode_events(Events events, const KvEventDecoder::Options& options = {}) {
  Result<KvBatch> batch = decode(batch_of(events), options);
  REQUIRE(batch);
  return std::move(*batch);
}

std::vector<std::uint64_t> hashes_of(const KvEvent& event) {
  return {event.hashes.begin(), event.hashes.end()};
}
std::vector<std::uint32_t> tokens_of(const KvEvent& event) {
  return {event.tokens.begin(), event.tokens.end()};
}

// The reason for which the one event of the batch is skipped.
std::string skip_of(const Json& event, const KvEventDecoder::Options& options = {}) {
  const KvBatch batch = decode_events({event}, options);
  CHECK(batch.events.empty());
  REQUIRE(batch.skipped_events() == 1);
  for (std::size_t i = 0; i < kSkipReasons; ++i) {
    if (batch.skipped[i] == 1) return std::string(to_string(static_cast<Skip>(i)));
  }
  return {};
}

using Hashes = std::vector<std::uint64_t>;
using Tokens = std::vector<std::uint32_t>;
constexpr KvEventDecoder::Options kSglang{.dialect = Dialect::kSglang};

using Changes = std::initializer_list<std::pair<const char*, Json>>;
Json tagged(const char* tag, Changes members = {}) {
  Json event = {{"type", tag}};
  for (const auto& [name, value] : members) event[name] = value;
  return event;
}

Json stored(Changes changes = {}) {
  Json event = {{"type", "BlockStored"},  {"block_hashes", {100, 101}}, {"parent_block_hash", 99},
                {"token_ids", {1, 2, 3}}, {"block_size", 16},           {"lora_id", nullptr},
                {"medium", "GPU"},        {"lora_name", nullptr}};
  for (const auto& [name, value] : changes) event[name] = value;
  return event;
}

Json stored_array() {
  return {"BlockStored", {100, 101}, 99, {1, 2, 3}, 16, nullptr, "gpu", nullptr, nullptr};
}

}  // namespace

TEST_SUITE("KvEventDecoder, beginnings of chains") {
  TEST_CASE("TensorRT-LLM's events have signed hashes, and texts among the tokens of images") {
    for (const bool keeps : {false, true}) {
      CAPTURE(keeps);
      const auto batch =
          decode(from_hex(kTensorRtLlm), {.keep_tokens = keeps, .head_tokens = keeps ? 0U : 8U});
      REQUIRE(batch);
      CHECK(batch->rank == 0);
      // Where all tokens are kept, an event with another kind of token is skipped.
      REQUIRE(batch->events.size() == (keeps ? 2 : 3));
      const KvEvent& stored = batch->events.front();
      CHECK(stored.kind == EventKind::kStored);
      CHECK(stored.medium == Medium::kGpu);
      CHECK(stored.block_size == 4);
      CHECK(!stored.parent);
      CHECK(hashes_of(stored) == Hashes{16443243144690205867U, 8460888372051954880U});
      CHECK(tokens_of(stored) == Tokens{1, 2, 3, 4, 5, 6, 7, 8});
      CHECK(batch->events.back().kind == EventKind::kRemoved);
      CHECK(hashes_of(batch->events.back()) ==
            Hashes{8460888372051954880U, static_cast<std::uint64_t>(-7)});
      if (keeps) continue;
      const KvEvent& image = batch->events[1];
      CHECK(image.parent == 8460888372051954880U);
      CHECK(hashes_of(image) == Hashes{static_cast<std::uint64_t>(-7)});
      CHECK(image.tokens.empty());
    }
  }

  constexpr KvEventDecoder::Options kHead{.head_tokens = 4};

  TEST_CASE("the first tokens of a chain's beginning are kept, and those of other events are not") {
    const Json root = stored({{"parent_block_hash", nullptr}, {"token_ids", {1, 2, 3, 4, 5, 6}}});
    const KvBatch batch = decode_events({stored(), root, root}, kHead);
    REQUIRE(batch.events.size() == 3);
    CHECK(batch.events[0].tokens.empty());
    CHECK(tokens_of(batch.events[1]) == Tokens{1, 2, 3, 4});
    CHECK(tokens_of(batch.events[2]) == Tokens{1, 2, 3, 4});
    CHECK(batch.events[2].token_count == 6);
    CHECK(decode_events({root}).events[0].tokens.empty());
  }

  TEST_CASE("the only extra key of the first block is kept, if it is a text") {
    const auto first = [](const Json& extras) {
      const KvBatch batch = decode_events({stored({{"extra_keys", extras}})}, kHead);
      REQUIRE(batch.events.size() == 1);
      return std::pair(batch.events[0].first_extras, std::string(batch.events[0].first_extra));
    };
    CHECK(first({Json::array({"tenant-a"}), nullptr}) == std::pair(1U, std::string("tenant-a")));
    CHECK(first({nullptr, Json::array({"tenant-a"})}) == std::pair(0U, std::string()));
    CHECK(first({Json::array({"a", "b"}), nullptr}) == std::pair(2U, std::string()));
    CHECK(first({Json::array({Json::array({"image", 3}), nullptr}), nullptr}) ==
          std::pair(2U, std::string()));
    CHECK(first({Json::array({std::string(5000, 'x')}), nullptr}) == std::pair(1U, std::string()));
  }

  TEST_CASE("an invalid token ends the tokens that are kept, and the event is used") {
    const KvBatch batch = decode_events(
        {stored({{"parent_block_hash", nullptr}, {"token_ids", {1, "x", 3}}})}, kHead);
    REQUIRE(batch.events.size() == 1);
    CHECK(tokens_of(batch.events[0]) == Tokens{1});
  }
}

TEST_SUITE("KvEventDecoder, payloads of engines") {
  TEST_CASE("a batch of vLLM 0.32 with a session and a full report") {
    const Result<KvBatch> batch = decode(from_hex(kVllm032));

    REQUIRE(batch);
    CHECK(batch->timestamp == doctest::Approx(1795353078.47));
    CHECK(batch->rank == 0U);
    REQUIRE(batch->events.size() == 1);
    const KvEvent& event = batch->events[0];
    CHECK(event.kind == EventKind::kStored);
    CHECK(hashes_of(event) ==
          Hashes{6172512351751990651U, 13789820752579698065U, 1967185713933616195U});
    CHECK(event.parent == std::nullopt);
    CHECK(event.block_size == 32);
    CHECK(event.token_count == 96);
    CHECK(event.tokens.empty());
    CHECK(event.group == 0U);
    CHECK(event.group_kind == GroupKind::kAttention);
    CHECK(event.medium == Medium::kGpu);
    CHECK(event.session_id == "pf1:0002");
    CHECK_FALSE(event.has_extra_keys);
  }

  TEST_CASE("the tokens of a batch are kept on request") {
    const Result<KvBatch> batch = decode(from_hex(kVllm032), {.keep_tokens = true});

    REQUIRE(batch);
    REQUIRE(batch->events[0].tokens.size() == 96);
    CHECK(batch->events[0].tokens.front() == 0x500);
    CHECK(batch->events[0].tokens.back() == 0x0b);
  }

  TEST_CASE("spans stay valid when the batch is moved") {
    Result<KvBatch> decoded = decode(from_hex(kVllm032));
    REQUIRE(decoded);

    const KvBatch moved = std::move(*decoded);

    CHECK(moved.events[0].hashes[2] == 1967185713933616195U);
    CHECK(moved.events[0].session_id == "pf1:0002");
  }

  TEST_CASE("a batch as a map, of commits in the middle of 2026") {
    const Json batch = {{"ts", 1.5},
                        {"events", Json::array({tagged("AllBlocksCleared")})},
                        {"data_parallel_rank", 3}};

    const Result<KvBatch> decoded = decode(Json::to_msgpack(batch));

    REQUIRE(decoded);
    CHECK(decoded->rank == 3U);
    CHECK(decoded->events.at(0).kind == EventKind::kCleared);
  }

  TEST_CASE("SGLang with EAGLE sends tokens as pairs") {
    const Json event = {"BlockStored", {5, 6}, nullptr, {{1, 2}, {2, 3}, {3, 4}, {4, 5}}, 2,
                        nullptr,       "GPU"};

    const KvBatch kept = decode_events({event}, {.dialect = Dialect::kSglang, .keep_tokens = true});
    const KvBatch skipped = decode_events({event}, kSglang);

    CHECK(kept.events.at(0).bigram_tokens);
    CHECK(tokens_of(kept.events[0]) == Tokens{1, 2, 3, 4});
    CHECK(skipped.events.at(0).bigram_tokens);
    CHECK(skipped.events[0].token_count == 4);
  }

  TEST_CASE("hashes as bytes keep their full length beside the low 64 bits") {
    Json event = stored();
    const Bytes first =
        from_hex("cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682");
    Bytes second = first;
    second[31] = 0x83;
    event["block_hashes"] = {Json::binary(first), Json::binary(second)};
    event["parent_block_hash"] = Json::binary(second);

    const KvBatch batch = decode_events({event});

    CHECK(hashes_of(batch.events.at(0)) == Hashes{8866452693264111234U, 8866452693264111235U});
    CHECK(batch.events[0].parent == 8866452693264111235U);
    CHECK(batch.events[0].hash_bytes == 32);
    REQUIRE(batch.events[0].full_hashes.size() == 64);
    CHECK(batch.events[0].full_hashes[63] == std::byte{0x83});
  }

  TEST_CASE("media by old and new names; an unknown one is never the GPU") {
    const std::vector<std::pair<Json, Medium>> media = {{nullptr, Medium::kGpu},
                                                        {"GPU", Medium::kGpu},
                                                        {"gpu", Medium::kGpu},
                                                        {"CPU", Medium::kHost},
                                                        {"CPU_PINNED", Medium::kHost},
                                                        {"cpu_tier1", Medium::kHost},
                                                        {"STORAGE", Medium::kStorage},
                                                        {"DISK", Medium::kStorage},
                                                        {"FS", Medium::kStorage},
                                                        {"OBJ", Medium::kStorage},
                                                        {"EXTERNAL", Medium::kStorage},
                                                        {"GPU2", Medium::kStorage},
                                                        {"SHARED_STORAGE", Medium::kStorage}};
    for (const auto& [name, medium] : media) {
      CAPTURE(name.dump());
      CHECK(decode_events({stored({{"medium", name}})}).events.at(0).medium == medium);
    }
  }

  TEST_CASE("kinds of groups: only attention over the whole prefix may be indexed") {
    for (const char* name : {"full_attention", "mla_attention", "sink_full_attention"}) {
      const KvBatch batch = decode_events({stored({{"kv_cache_spec_kind", name}})});
      CHECK(batch.events.at(0).group_kind == GroupKind::kAttention);
    }
    for (const char* name : {"sliding_window", "mamba", "chunked_local_attention", "newest"}) {
      const KvBatch batch = decode_events({stored({{"kv_cache_spec_kind", name}})});
      CHECK(batch.events.at(0).group_kind == GroupKind::kOther);
    }
  }
}

// The cases of llm-d's adapters for vLLM and SGLang, by their names there. Differences are stated.
TEST_SUITE("KvEventDecoder, cases of llm-d") {
  TEST_CASE("VLLMParseMessage_Valid, NestedArrayEvents") {
    const Result<KvBatch> batch = decode(batch_of({stored_array()}, 3));

    REQUIRE(batch);
    CHECK(batch->rank == 3U);
    REQUIRE(batch->events.size() == 1);
    CHECK(hashes_of(batch->events[0]) == Hashes{100, 101});
    CHECK(batch->events[0].parent == 99U);
    CHECK(batch->events[0].token_count == 3);
  }

  TEST_CASE("VLLMParseMessage_BatchExtraTrailingFields") {
    const Json batch = Json::array({1234567890.0, Json::array({Json::array({"AllBlocksCleared"})}),
                                    nullptr, Json::binary(Bytes(16))});

    const Result<KvBatch> decoded = decode(Json::to_msgpack(batch));

    REQUIRE(decoded);
    CHECK(decoded->rank == std::nullopt);
    CHECK(decoded->events.at(0).kind == EventKind::kCleared);
  }

  TEST_CASE("ParseMessage_InvalidPayload, MalformedPayload, EmptyPayload") {
    CHECK(decode({0xff, 0xff, 0xff}).error().code == Errc::kCorrupt);
    CHECK(decode({}).error().code == Errc::kCorrupt);
    CHECK(decode({0xc1}).error().code == Errc::kCorrupt);
  }

  TEST_CASE("VLLMBlockStored") {
    const KvBatch batch = decode_events({stored_array()});

    const KvEvent& event = batch.events.at(0);
    CHECK(hashes_of(event) == Hashes{100, 101});
    CHECK(event.parent == 99U);
    CHECK(event.token_count == 3);
    CHECK(event.block_size == 16);
    CHECK(event.medium == Medium::kGpu);
    CHECK(event.lora_name.empty());
    CHECK_FALSE(event.has_extra_keys);
  }

  TEST_CASE("VLLMBlockStoredSmallIntegerHash") {
    const Json event = {
        "BlockStored", Json::array({100}), nullptr, Json::array({1}), 1, nullptr, "gpu", nullptr,
        nullptr};
    CHECK(hashes_of(decode_events({event}).events.at(0)) == Hashes{100});
  }

  TEST_CASE("VLLMBlockStoredWithLora") {
    const Json event = {
        "BlockStored", {200, 201},  199,
        {4, 5, 6},     32,          42,
        "gpu",         "test-lora", Json::array({Json::array({"uuid-A", "salt"}), nullptr})};

    const KvBatch batch = decode_events({event});

    CHECK(batch.events.at(0).lora_name == "test-lora");
    CHECK(batch.events[0].has_extra_keys);
    CHECK(batch.events[0].block_size == 32);
  }

  TEST_CASE("VLLMBlockStoredWithHMAMetadata") {
    Json event = stored_array();
    event.insert(event.end(), {1, "sliding_window", 128});

    const KvBatch batch = decode_events({event});

    CHECK(batch.events.at(0).group == 1U);
    CHECK(batch.events[0].group_kind == GroupKind::kOther);
  }

  TEST_CASE("BlockStoredMissingTrailingFields") {
    Json event = stored_array();
    for (const std::size_t fields : {7, 6, 5}) {
      while (event.size() > fields) event.erase(event.size() - 1);
      const KvBatch batch = decode_events({event});
      CHECK(hashes_of(batch.events.at(0)) == Hashes{100, 101});
      CHECK(batch.events[0].medium == Medium::kGpu);
      CHECK(batch.events[0].lora_name.empty());
    }
  }

  TEST_CASE("BlockStoredExtraTrailingFields") {
    const Json event = {"BlockStored",
                        {400, 401},
                        399,
                        {10, 11, 12},
                        16,
                        nullptr,
                        "gpu",
                        "my-lora",
                        Json::array({Json::array({"extra", "keys"})}),
                        0,
                        "full_attention",
                        nullptr,
                        "completely-unknown-field"};

    const KvBatch batch = decode_events({event});

    CHECK(batch.events.at(0).lora_name == "my-lora");
    CHECK(batch.events[0].group == 0U);
    CHECK(batch.events[0].group_kind == GroupKind::kAttention);
  }

  TEST_CASE("BlockRemovedExtraTrailingFields, BlockRemovedMissingMedium") {
    const Json extra = {"BlockRemoved", Json::array({500}), "cpu", 1, "future-field-1"};
    const Json minimal = {"BlockRemoved", Json::array({600})};

    const KvBatch batch = decode_events({extra, minimal});

    REQUIRE(batch.events.size() == 2);
    CHECK(batch.events[0].medium == Medium::kHost);
    CHECK(batch.events[0].group == 1U);
    CHECK(hashes_of(batch.events[1]) == Hashes{600});
    CHECK(batch.events[1].medium == Medium::kGpu);
    CHECK(batch.events[1].group == std::nullopt);
  }

  TEST_CASE("BlockStoredInvalidHMAMetadata: negative index, kind and window of other types") {
    CHECK(skip_of(stored({{"group_idx", -1}})) == "malformed");
    CHECK(skip_of(stored({{"kv_cache_spec_kind", 123}})) == "malformed");
    CHECK(skip_of(stored({{"kv_cache_spec_sliding_window", "bad-window"}})) == "malformed");
  }

  TEST_CASE("BlockRemovedInvalidGroupIdx") {
    CHECK(skip_of({"BlockRemoved", Json::array({700}), "gpu", -1}) == "malformed");
  }

  TEST_CASE("VLLMBlockStoredInvalidExtraKeys") {
    CHECK(skip_of(stored({{"extra_keys", Json::array({"invalid_string"})}})) == "malformed");
  }

  TEST_CASE("VLLMBlockRemoved, AllBlocksCleared") {
    const Json removed = {"BlockRemoved", {200, 201, 202}, "cpu"};

    const KvBatch batch = decode_events({removed, Json::array({"AllBlocksCleared"})});

    CHECK(hashes_of(batch.events.at(0)) == Hashes{200, 201, 202});
    CHECK(batch.events.at(1).kind == EventKind::kCleared);
  }

  TEST_CASE("UnknownTag, MissingTag: here the batch survives") {
    CHECK(skip_of({"UnknownEventType", "some", "data"}) == "unknown_tag");
    CHECK(skip_of(Json::array()) == "malformed");
    CHECK(skip_of(tagged("BlockInactive", {{"block_hashes", Json::array({1})}})) == "unknown_tag");

    const KvBatch batch = decode_events({Json::array({"UnknownEventType"}), stored_array()});
    CHECK(batch.events.size() == 1);
    CHECK(batch.skipped_events() == 1);
  }

  TEST_CASE("MapEncodedBlockStored, with members of SGLang that have no position") {
    const Json event = stored({{"medium", "CPU"}, {"group_idx", 0}, {"extra_keys", nullptr}});
    const Json of_sglang = stored({{"cache_salt", "some-salt"}, {"session_id", "some-session"}});

    const KvBatch vllm = decode_events({event});
    const KvBatch sglang = decode_events({of_sglang}, kSglang);

    CHECK(vllm.events.at(0).medium == Medium::kHost);
    CHECK(vllm.events[0].group == 0U);
    CHECK(sglang.events.at(0).session_id == "some-session");
  }

  TEST_CASE("MapEncodedBlockRemovedAndCleared: maps and arrays in one batch") {
    const Json removed =
        tagged("BlockRemoved", {{"block_hashes", Json::array({100})}, {"medium", "CPU"}});
    const Json cleared = tagged("AllBlocksCleared");
    const Json array = {"BlockStored", Json::array({7}), nullptr, Json::array({9}), 1, nullptr,
                        "GPU"};

    const KvBatch batch = decode_events({removed, cleared, array});

    REQUIRE(batch.events.size() == 3);
    CHECK(batch.events[0].kind == EventKind::kRemoved);
    CHECK(batch.events[1].kind == EventKind::kCleared);
    CHECK(hashes_of(batch.events[2]) == Hashes{7});
  }

  TEST_CASE("MapEncodedErrors: unknown, missing and non-string tags") {
    CHECK(skip_of(tagged("SomethingNew")) == "unknown_tag");
    CHECK(skip_of(Json::object({{"block_hashes", Json::array({1})}})) == "malformed");
    CHECK(skip_of(Json::object({{"type", 7}})) == "malformed");
  }

  TEST_CASE("SGLangBlockStoredNegativeHashPreservesBits") {
    const Json event = {"BlockStored",
                        Json::array({-987654321987654321}),
                        -1234567890123456789,
                        Json::array({1}),
                        1,
                        nullptr,
                        "GPU"};

    const KvBatch batch = decode_events({event}, kSglang);

    CHECK(batch.events.at(0).hashes[0] == static_cast<std::uint64_t>(-987654321987654321));
    CHECK(batch.events[0].parent == static_cast<std::uint64_t>(-1234567890123456789));
  }

  TEST_CASE("SGLangBlockStored_FullFields, 7Fields, MinimalFields, NilMedium") {
    Json event = {"BlockStored", {300, 301}, 299, {7, 8, 9}, 64, nullptr, "GPU"};
    CHECK(decode_events({event}, kSglang).events.at(0).medium == Medium::kGpu);
    event[6] = nullptr;
    CHECK(decode_events({event}, kSglang).events.at(0).block_size == 64);
    CHECK(decode_events({stored_array()}, kSglang).events.size() == 1);
    // llm-d refuses events without a medium; engines before it had a name sent none.
    event.erase(6);
    CHECK(decode_events({event}, kSglang).events.at(0).medium == Medium::kGpu);
  }

  TEST_CASE("SGLangBlockStored_TooFewFields") {
    CHECK(skip_of({"BlockStored", Json::array({500}), 499, Json::array({1})}, kSglang) ==
          "malformed");
  }

  TEST_CASE("SGLangParseMessage_EngineSchema: fields behind the medium are not read") {
    Json array = {"BlockStored", Json::array({1}), nullptr, Json::array({2}), 1, nullptr, "GPU"};
    array.insert(array.end(), {42, "unused", -1});
    const Json map = stored({{"lora_name", 42}, {"extra_keys", "unused"}, {"group_idx", -1}});

    const KvBatch batch = decode_events({array, map}, kSglang);

    REQUIRE(batch.events.size() == 2);
    CHECK(batch.events[1].group == std::nullopt);
    CHECK(skip_of(map) == "malformed");
  }

  TEST_CASE("SGLangParseMessage_InvalidFields") {
    CHECK(skip_of({"BlockRemoved", Json::array({true}), nullptr}, kSglang) == "malformed");
    CHECK(skip_of(stored({{"token_ids", "bad"}}), kSglang) == "malformed");
    Json sizeless = stored();
    sizeless.erase("block_size");
    CHECK(skip_of(sizeless, kSglang) == "malformed");
    // llm-d refuses a batch without a rank; it is optional in SGLang.
    CHECK(decode(Json::to_msgpack(Json::array({0.0, Json::array()}))));
  }

  TEST_CASE("SGLangParseMessage_MapTagOrder: the tag may come last") {
    // A map of 2: block_hashes, type.
    Bytes event = from_hex("82ac");
    for (const char c : std::string_view("block_hashes")) event.push_back(std::uint8_t(c));
    event.insert(event.end(), {0x91, 0x05, 0xa4, 't', 'y', 'p', 'e', 0xac});
    for (const char c : std::string_view("BlockRemoved")) event.push_back(std::uint8_t(c));
    Bytes batch = {0x92, 0x01, 0x91};
    batch.insert(batch.end(), event.begin(), event.end());

    const Result<KvBatch> decoded = decode(batch);

    REQUIRE(decoded);
    CHECK(hashes_of(decoded->events.at(0)) == Hashes{5});
  }

  TEST_CASE("SGLangParseMessage_BoundedUnknownField: too deep is skipped, the batch survives") {
    Json nested = nullptr;
    for (int i = 0; i < 40; ++i) nested = Json::array({nested});
    CHECK(skip_of(tagged("AllBlocksCleared", {{"cache_salt", nested}})) == "too_deep");
  }

  TEST_CASE("GetHashAsUint64: integers of all sizes, bytes, and nothing else") {
    const Json integers = {42, 4200, 420000, 42000000000, -1, -1000, -100000, -10000000000};
    const KvBatch batch = decode_events({stored({{"block_hashes", integers}})});
    CHECK(hashes_of(batch.events.at(0)) ==
          Hashes{42, 4200, 420000, 42000000000, UINT64_MAX, static_cast<std::uint64_t>(-1000),
                 static_cast<std::uint64_t>(-100000), static_cast<std::uint64_t>(-10000000000)});

    const auto bytes = [](Bytes raw) {
      return stored({{"block_hashes", Json::array({Json::binary(std::move(raw))})}});
    };
    CHECK(decode_events({bytes({0, 0, 0, 0, 0, 0, 0x30, 0x39})}).events.at(0).hashes[0] == 12345);
    CHECK(decode_events({bytes({0x30, 0x39})}).events.at(0).hashes[0] == 12345);
    CHECK(skip_of(bytes({})) == "bad_hash");
    CHECK(skip_of(bytes(Bytes(65))) == "bad_hash");
    CHECK(skip_of(stored({{"block_hashes", Json::array({"not a hash"})}})) == "malformed");
  }
}

TEST_SUITE("KvEventDecoder, bad input") {
  TEST_CASE("an event with more hashes than the limit is skipped, its neighbors are used") {
    Json many = Json::array();
    for (int i = 0; i < 65'537; ++i) many.push_back(i);

    const KvBatch batch = decode_events({stored({{"block_hashes", many}}), stored()});

    CHECK(batch.events.size() == 1);
    CHECK(batch.skipped[static_cast<std::size_t>(Skip::kTooMany)] == 1);
    CHECK(batch.hashes.size() == 2);
  }

  TEST_CASE("block sizes of 0 and above 8,192 are refused") {
    CHECK(skip_of(stored({{"block_size", 0}})) == "bad_size");
    CHECK(skip_of(stored({{"block_size", 8193}})) == "bad_size");
    CHECK(decode_events({stored({{"block_size", 8192}})}).events.size() == 1);
  }

  TEST_CASE("with tokens, their count is that of the blocks or zero; windows have fewer hashes") {
    const KvEventDecoder::Options options{.keep_tokens = true};
    CHECK(skip_of(stored(), options) == "bad_count");
    CHECK(decode_events({stored({{"token_ids", Json::array()}})}, options).events.size() == 1);
    CHECK(decode_events({stored({{"kv_cache_spec_kind", "mamba"}})}, options).events.size() == 1);
  }

  TEST_CASE("hashes of different lengths, and a field that comes twice, are refused") {
    const Json lengths = {Json::binary(Bytes(8)), Json::binary(Bytes(32))};
    CHECK(skip_of(stored({{"block_hashes", lengths}})) == "bad_hash");
    const Json mixed = Json::array({Json::binary(Bytes(8)), 7});
    CHECK(skip_of(stored({{"block_hashes", mixed}})) == "bad_hash");

    Bytes twice = {0x92, 0x01, 0x91, 0x83, 0xa4, 't', 'y', 'p', 'e', 0xac};
    for (const char c : std::string_view("BlockRemoved")) twice.push_back(std::uint8_t(c));
    for (int i = 0; i < 2; ++i) {
      twice.push_back(0xac);
      for (const char c : std::string_view("block_hashes")) twice.push_back(std::uint8_t(c));
      twice.insert(twice.end(), {0x91, 0x05});
    }
    const Result<KvBatch> batch = decode(twice);
    REQUIRE(batch);
    CHECK(batch->events.empty());
    CHECK(batch->hashes.empty());
    CHECK(batch->skipped[static_cast<std::size_t>(Skip::kMalformed)] == 1);
  }

  TEST_CASE("bytes behind the batch, and every cut, make it undecodable") {
    Bytes bytes = from_hex(kVllm032);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const Result<KvBatch> cut =
          decode(Bytes(bytes.begin(), bytes.begin() + std::ptrdiff_t(size)));
      REQUIRE_FALSE(cut);
      CHECK(cut.error().code == Errc::kCorrupt);
    }
    bytes.push_back(0);
    CHECK(decode(bytes).error().detail == "decode a batch of KV events: 1 bytes behind its end");
  }

  TEST_CASE("four megabytes of nested arrays are refused without recursion") {
    CHECK(decode(Bytes(std::size_t{4} << 20U, 0x91)).error().code == Errc::kCorrupt);
    Bytes closed(std::size_t{4} << 20U, 0x91);
    closed.back() = 0xc0;
    Bytes batch = {0x92, 0x01, 0x91};
    batch.insert(batch.end(), closed.begin(), closed.end());

    const Result<KvBatch> decoded = decode(batch);

    REQUIRE(decoded);
    CHECK(decoded->skipped[static_cast<std::size_t>(Skip::kTooDeep)] == 1);
  }

  TEST_CASE("counts that cannot be true allocate nothing") {
    // [1, [["BlockRemoved", array of 2^32-1 ...
    Bytes bytes = {0x92, 0x01, 0x91, 0x92, 0xac};
    for (const char c : std::string_view("BlockRemoved")) bytes.push_back(std::uint8_t(c));
    bytes.insert(bytes.end(), {0xdd, 0xff, 0xff, 0xff, 0xff});
    CHECK(decode(bytes).error().code == Errc::kCorrupt);
    CHECK(decode({0x92, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff}).error().code == Errc::kCorrupt);
  }

  TEST_CASE("random damage never breaks the limits") {
    std::mt19937_64 random(testing::seed());
    const Bytes valid = from_hex(kVllm032);
    int decodable = 0;
    for (int round = 0; round < 20'000; ++round) {
      Bytes bytes = valid;
      for (std::uint64_t i = 0; i <= random() % 4; ++i) {
        bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
      }
      const Result<KvBatch> batch = decode(bytes);
      if (!batch) continue;
      ++decodable;
      CHECK(batch->bytes() < sizeof(KvBatch) + 20 * bytes.size());
      for (const KvEvent& event : batch->events) CHECK(event.hashes.size() <= bytes.size());
    }
    CHECK(decodable > 1000);
  }
}

}  // namespace pegaflow::index
