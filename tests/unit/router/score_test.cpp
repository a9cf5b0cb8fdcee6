#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "router/kv/kv_policy.h"
#include "router/score/score_answer.h"
#include "router/score/score_request.h"

namespace pegaflow::router {
namespace {

using index::VllmHasher;
using nlohmann::json;
using std::chrono::seconds;

std::string refusal_of(std::string_view body) {
  const auto request = read_score_request(body);
  REQUIRE_MESSAGE(!request, body);
  CHECK(request.error().code == Errc::kInvalidArgument);
  return request.error().detail;
}

class FixedClock final : public Clock {
 public:
  [[nodiscard]] TimePoint now() const noexcept override { return TimePoint{seconds(1'000)}; }
};

std::vector<std::uint32_t> tokens_from(std::uint32_t first, std::size_t count) {
  std::vector<std::uint32_t> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(first + static_cast<std::uint32_t>(i));
  }
  return tokens;
}

/// Engines A and B of the model m. A publishes events.
class Rig {
 public:
  Rig()
      : fleet({}, {make_policy("least-load", 1).value(), make_policy("least-load", 1).value()},
              clock) {
    KvStreams streams{
        .add = [](index::StreamId, const index::EventSocket::Stream&) { return Result<void>(); },
        .remove = [](index::StreamId) {},
        .replay = [](index::StreamId, std::uint64_t, std::uint64_t) { return Result<void>(); }};
    kv = KvRouting::create({.index_blocks = 65'536, .text_bytes = 1 << 20}, std::move(streams))
             .value();
    EngineList list;
    for (const char* url : {"http://a:1", "http://b:1"}) {
      list.by_role[static_cast<std::size_t>(Role::kDecode)].push_back(
          EngineUrl::parse(url).value());
    }
    fleet.set(list);
    for (const auto& engine : fleet.engines()) engine->models.set({"m"});
    kv->fleet().set_engines(fleet.engines(), clock.now());
    index::EventAddress address;
    address.endpoint = "tcp://a:5557";
    kv->fleet().set_addresses(a().id, {address}, "", clock.now());
    index::Arrival arrival;
    arrival.stream = 1;
    arrival.kind = index::Arrival::Kind::kConnected;
    kv->fleet().arrive(std::move(arrival), clock.now());
  }

  Engine& a() { return *fleet.engines().front(); }

  std::vector<std::uint64_t> hashes(const std::vector<std::uint32_t>& tokens) const {
    std::vector<BlockKey> keys;
    REQUIRE(hasher.hash({.tokens = tokens}, keys));
    std::vector<std::uint64_t> all;
    for (const BlockKey& key : keys) all.push_back(hasher.low64(key));
    return all;
  }
  /// A announces the blocks of a prompt.
  void store(const std::vector<std::uint32_t>& tokens) {
    index::Arrival arrival;
    arrival.stream = 1;
    arrival.kind = index::Arrival::Kind::kLive;
    arrival.sequence = sequence++;
    arrival.batch.hashes = hashes(tokens);
    arrival.batch.tokens = tokens;
    index::KvEvent event;
    event.kind = index::EventKind::kStored;
    event.block_size = 16;
    event.hashes = arrival.batch.hashes;
    event.tokens = arrival.batch.tokens;
    arrival.batch.events.push_back(event);
    kv->fleet().arrive(std::move(arrival), clock.now());
  }

  ScoreAnswer answer(const json& body, bool is_rendered = false) {
    const std::string text = body.dump();
    auto request = read_score_request(text);
    REQUIRE_MESSAGE(request, text);
    return answer_score(*kv, fleet, std::move(*request), is_rendered, clock.now());
  }
  json score(const json& body) {
    const ScoreAnswer got = answer(body);
    REQUIRE(got.status == 200);
    return json::parse(got.text);
  }
  ScoreAnswer learn(const json& body) {
    auto lesson = read_lesson(body.dump());
    REQUIRE(lesson);
    return answer_lesson(*kv, fleet, std::move(*lesson));
  }
  static json of(const json& answer, const std::string& engine) {
    for (const json& each : answer["engines"]) {
      if (each["engine"] == engine) return each;
    }
    return nullptr;
  }

  FixedClock clock;
  Fleet fleet;
  std::unique_ptr<KvRouting> kv;
  VllmHasher hasher = VllmHasher::create({}).value();
  std::uint64_t sequence = 0;
};

TEST_SUITE("score requests") {
  TEST_CASE("a request that is refused names the member, the element and the fix") {
    const std::string one =
        R"(a request has exactly one of "prompt", "messages", "token_ids" and "keys")";
    CHECK(refusal_of("{}") == one);
    CHECK(refusal_of(R"({"prompt":"a","keys":[1]})") == one);
    CHECK(refusal_of(R"({"token_ids":[]})") == "\"token_ids\": the list is empty");
    CHECK(refusal_of(R"({"token_ids":7})") == "\"token_ids\": not a list");
    CHECK(refusal_of(R"({"token_ids":[1,-2]})") ==
          "\"token_ids\": element 1 is not a token id: -2");
    CHECK(refusal_of(R"({"token_ids":[1,4294967296]})").find("element 1") != std::string::npos);
    CHECK(refusal_of(R"({"keys":[1,"abc"]})").find("\"keys\": element 1") == 0);
    CHECK(refusal_of(R"({"keys":["zz00000000000000"]})").find("\"keys\": element 0") == 0);
    CHECK(refusal_of(R"({"keys":[1],"candidates":[3]})") ==
          "\"candidates\": 3 is not an engine's URL");
    CHECK(refusal_of(R"({"keys":[1],"prompt_tokens":0})").find("\"prompt_tokens\": 0") == 0);
    CHECK(refusal_of(R"({"prompt":["a","b"]})").find("\"prompt\": not one prompt") == 0);
    CHECK(refusal_of(R"({"messages":"a"})").find("\"messages\"") == 0);
    std::string many = R"({"keys":[1)";
    for (std::size_t i = 0; i < ScoreRequest::kMaxKeys; ++i) many += ",1";
    CHECK(refusal_of(many + "]}") == "\"keys\": 131073 elements are more than 131072");
    CHECK(refusal_of("[1]").find("not JSON") == 0);
  }

  TEST_CASE("hashes are numbers of 64 bits, or the last 16 hexadecimal digits of longer ones") {
    const auto request = read_score_request(
        R"({"keys":[18446744073709551615,"00000000000000ff","aaaaaaaaaaaaaaaa00000000000000ff"]})");
    REQUIRE(request);
    CHECK(request->keys == std::vector<index::Key>{index::key_of(0, UINT64_MAX),
                                                   index::key_of(0, 255), index::key_of(0, 255)});
    for (const std::uint64_t hash : {std::uint64_t{0}, std::uint64_t{1}, UINT64_MAX}) {
      CHECK(index::hash_of(3, index::key_of(3, hash)) == hash);
    }
  }

  TEST_CASE("the members of this interface do not change what a text is") {
    const auto plain = read_score_request(R"({"model":"m","prompt":"some text"})");
    const auto more = read_score_request(
        R"({"model":"m","prompt":"some text","candidates":["http://a:1/"],"prompt_tokens":3})");
    REQUIRE(plain);
    REQUIRE(more);
    CHECK(plain->prompt.root == more->prompt.root);
    CHECK(more->candidates == std::vector<std::string>{"http://a:1"});
    const auto ids = read_score_request(R"({"model":"m","token_ids":[1, 2]})");
    const auto prompt = read_score_request(R"({"model":"m","prompt":[1, 2]})");
    REQUIRE(ids);
    REQUIRE(prompt);
    CHECK(ids->prompt.root == prompt->prompt.root);
    CHECK(ids->prompt.text == prompt->prompt.text);
    CHECK(ids->form == PromptForm::kTokens);
    CHECK(prompt->form == PromptForm::kTokens);
  }

  TEST_CASE("messages with an image are recognized") {
    const auto request = read_score_request(
        R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]})");
    REQUIRE(request);
    CHECK(request->has_media);
  }
}

TEST_SUITE("score answers") {
  TEST_CASE("token ids are scored without a lesson once an engine has announced any blocks") {
    Rig rig;
    const auto prompt = tokens_from(100, 1'000);
    json before = rig.score({{"model", "m"}, {"token_ids", prompt}});
    CHECK(before["keys"] == "unknown");
    CHECK(before["engines"].size() == 2);
    CHECK(Rig::of(before, "http://b:1")["trust"] == "no_events");
    rig.store(prompt);
    auto longer = prompt;
    longer.push_back(1);
    const json after = rig.score({{"model", "m"}, {"token_ids", longer}});
    CHECK(after["keys"] == "computed");
    CHECK(after["prompt_tokens"] == 1'001);
    CHECK(after["prompt_tokens_exact"] == true);
    CHECK(after["block_tokens"] == 16);
    CHECK(after["engines"][0]["engine"] == "http://a:1");
    CHECK(after["engines"][0]["gpu"] == 62);
    CHECK(after["engines"][0]["uncached_tokens"] == 1'001 - 62 * 16);
    CHECK(Rig::of(after, "http://b:1")["gpu"] == 0);
    CHECK(Rig::of(after, "http://a:1")["cost_ms"].get<double>() <
          Rig::of(after, "http://b:1")["cost_ms"].get<double>());
  }

  TEST_CASE("keys are scored as they are given") {
    Rig rig;
    const auto prompt = tokens_from(1, 64);
    rig.store(prompt);
    json body = {{"model", "m"}, {"keys", rig.hashes(prompt)}};
    json answer = rig.score(body);
    CHECK(answer["keys"] == "given");
    CHECK(answer["prompt_tokens"] == 65);
    CHECK(answer["prompt_tokens_exact"] == false);
    CHECK(Rig::of(answer, "http://a:1")["gpu"] == 4);
    body["prompt_tokens"] = 1'000;
    body["candidates"] = {"http://b:1", "http://c:1"};
    answer = rig.score(body);
    CHECK(answer["engines"].size() == 1);
    CHECK(answer["unknown_candidates"] == json::array({"http://c:1"}));
    CHECK(answer["engines"][0]["uncached_tokens"] == 1'000);
  }

  TEST_CASE("a text is known after a lesson, by token ids and by keys") {
    Rig rig;
    std::string text;
    for (int i = 0; i < 400; ++i) text += "word " + std::to_string(i) + " ";
    const auto tokens = tokens_from(1, 800);
    CHECK(rig.learn({{"model", "m"}, {"prompt", text}, {"token_ids", tokens}}).status == 503);
    rig.store(tokens);
    CHECK(rig.score({{"model", "m"}, {"prompt", text}})["keys"] == "unknown");
    CHECK(rig.learn({{"model", "m"}, {"prompt", text}, {"token_ids", tokens}}).status == 200);
    json answer = rig.score({{"model", "m"}, {"prompt", text}, {"prompt_tokens", 800}});
    CHECK(answer["keys"] == "learned");
    CHECK(Rig::of(answer, "http://a:1")["gpu"].get<int>() >= 45);
    const json messages = json::array({{{"role", "user"}, {"content", text}}});
    CHECK(
        rig.learn({{"model", "m"}, {"messages", messages}, {"keys", rig.hashes(tokens)}}).status ==
        200);
    answer = rig.score({{"model", "m"}, {"messages", messages}, {"prompt_tokens", 800}});
    CHECK(answer["keys"] == "learned");
  }

  TEST_CASE("a lesson names what is missing") {
    CHECK(read_lesson(R"({"prompt":"a"})").error().detail ==
          "a lesson has one of \"prompt\" and \"messages\", and one of \"token_ids\" and \"keys\"");
    CHECK(read_lesson(R"({"prompt":[1,2],"keys":[1]})").error().detail ==
          "\"prompt\": a lesson is about a text, not token ids");
  }

  TEST_CASE("a model that no engine serves is not found, and adapters are not computed") {
    Rig rig;
    const ScoreAnswer answer = rig.answer({{"model", "x"}, {"keys", {1}}});
    CHECK(answer.status == 404);
    CHECK(answer.text == "\"model\": no engine serves `x`");
    const auto prompt = tokens_from(1, 64);
    rig.store(prompt);
    for (const auto& engine : rig.fleet.engines()) {
      engine->models.set({"m", "adapter"});
      engine->models.set_adapters({"adapter"});
    }
    CHECK(rig.score({{"model", "m"}, {"token_ids", prompt}})["keys"] == "computed");
    CHECK(rig.score({{"model", "adapter"}, {"token_ids", prompt}})["keys"] == "unknown");
  }

  TEST_CASE("the dump lists the hashes of one holder in parts") {
    Rig rig;
    const auto prompt = tokens_from(1, 320);
    rig.store(prompt);
    const json sources = json::parse(answer_dump(*rig.kv, "/index/dump").text)["sources"];
    REQUIRE(sources.size() == 2);
    std::vector<std::string> listed;
    for (const json& source : sources) {
      for (json cursor = 0; !cursor.is_null();) {
        const json part = json::parse(answer_dump(*rig.kv, "/index/dump?cursor=" + cursor.dump() +
                                                               "&source=" + source["source"].dump())
                                          .text);
        for (const json& key : part["keys"]) listed.push_back(key);
        cursor = part["cursor"];
      }
    }
    std::vector<std::string> wanted;
    for (const std::uint64_t hash : rig.hashes(prompt))
      wanted.push_back(fmt::format("{:016x}", hash));
    std::sort(listed.begin(), listed.end());
    std::sort(wanted.begin(), wanted.end());
    CHECK(listed == wanted);
    CHECK(answer_dump(*rig.kv, "/index/dump?x=1").status == 400);
    CHECK(answer_dump(*rig.kv, "/index/dump?source=1&cursor=x").status == 400);
    CHECK(json::parse(answer_dump(*rig.kv, "/index/dump?source=999").text)["keys"].empty());
  }
}

}  // namespace
}  // namespace pegaflow::router
