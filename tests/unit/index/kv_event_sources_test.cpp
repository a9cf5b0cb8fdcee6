#include "index/events/kv_event_sources.h"

#include <string>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

// As vLLM 0.32 returned it.
constexpr const char* kVllm032 =
    R"({"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5657",)"
    R"("replay_endpoint":"tcp://*:5658","buffer_steps":10000,"hwm":100000,)"
    R"("max_queue_size":100000,"topic":""}})";

std::string with_endpoint(const std::string& endpoint) {
  return R"({"0":{"publisher":"zmq","endpoint":")" + endpoint + R"("}})";
}

std::string endpoint_of(const std::string& endpoint, const char* host) {
  const auto sources = parse_kv_event_sources(with_endpoint(endpoint), host);
  return sources ? sources->at(0).endpoint : to_string(sources.error().code).data();
}

}  // namespace

TEST_SUITE("parse_kv_event_sources") {
  TEST_CASE("the response of vLLM 0.32, with the engine's host for the wildcard") {
    const auto sources = parse_kv_event_sources(kVllm032, "10.0.0.7");

    REQUIRE(sources);
    CHECK(*sources == std::vector<EventAddress>{{.rank = 0,
                                                 .endpoint = "tcp://10.0.0.7:5657",
                                                 .replay_endpoint = "tcp://10.0.0.7:5658",
                                                 .topic = "",
                                                 .block_size = 0}});
  }

  TEST_CASE("ranks are ordered by number; those without events are left out") {
    const auto sources = parse_kv_event_sources(
        R"({"10":{"publisher":"zmq","endpoint":"tcp://*:3","topic":"kv@","block_size":32},)"
        R"("9":{"publisher":"zmq","endpoint":"tcp://*:2","replay_endpoint":null},)"
        R"("1":{"publisher":"null","endpoint":"tcp://*:1"},)"
        R"("2":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":"tcp://*:1"}})",
        "::1");

    REQUIRE(sources);
    REQUIRE(sources->size() == 2);
    CHECK(sources->at(0).rank == 9);
    CHECK(sources->at(0).endpoint == "tcp://[::1]:2");
    CHECK(sources->at(0).replay_endpoint.empty());
    CHECK(sources->at(1).topic == "kv@");
    CHECK(sources->at(1).block_size == 32);
    CHECK(parse_kv_event_sources("{}", "a")->empty());
  }

  TEST_CASE("wildcards and the engine's own host are dialed, other hosts are not") {
    CHECK(endpoint_of("tcp://0.0.0.0:7", "engine-1") == "tcp://engine-1:7");
    CHECK(endpoint_of("tcp://[::]:7", "engine-1") == "tcp://engine-1:7");
    CHECK(endpoint_of("tcp://10.0.0.7:7", "10.0.0.7") == "tcp://10.0.0.7:7");
    CHECK(endpoint_of("tcp://127.0.0.1:7", "localhost") == "tcp://localhost:7");
    CHECK(endpoint_of("tcp://169.254.169.254:80", "10.0.0.7") == "refused");
    CHECK(endpoint_of("tcp://127.0.0.1:7", "10.0.0.7") == "refused");
    CHECK(endpoint_of("tcp://*:0", "10.0.0.7") == "refused");
    CHECK(endpoint_of("ipc:///run/events", "127.0.0.1") == "ipc:///run/events");
    CHECK(endpoint_of("ipc:///run/events", "10.0.0.7") == "refused");
    const auto error = parse_kv_event_sources(with_endpoint("tcp://evil:1"), "10.0.0.7").error();
    CHECK(error.detail ==
          "events of rank 0: 'tcp://evil:1' names another host than the engine's, 10.0.0.7; "
          "publish to tcp://*:PORT");
  }

  TEST_CASE("invalid text is corrupt") {
    std::string nested(20'000, '[');
    for (const std::string& text :
         {std::string(), std::string("[]"), std::string("{\"0\":1}"), std::string("{\"x\":{}}"),
          std::string("{\"0\":{}}"), std::string("{\"-1\":{}}"), nested, nested + "1",
          std::string(kMaxSourcesText + 1, ' ')}) {
      const auto sources = parse_kv_event_sources(text, "a");
      REQUIRE_FALSE(sources);
      CHECK(sources.error().code == Errc::kCorrupt);
    }
    for (const char* endpoint : {"udp://*:1", "tcp://*", "tcp://*:99999", "tcp://a b:1",
                                 "tcp://a;tcp://b:1", "inproc://x", ""}) {
      CHECK(endpoint_of(endpoint, "10.0.0.7") == "corrupt");
    }
    CHECK(parse_kv_event_sources("{}", "").error().code == Errc::kInvalidArgument);
  }
}

TEST_SUITE("parse_server_info") {
  // As SGLang 0.5.23 describes its publisher, among other members.
  const std::string kSglang0523 =
      R"({"model_path":"m","internal_states":[{"a":[[[[[[[[[1]]]]]]]]]}],"kv_events":{)"
      R"("publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv",)"
      R"("block_size":64,"dp_size":2,"load_endpoint_port_base":5559,"load_topic":"load",)"
      R"("replay_endpoint_port_base":5657},"version":"0.5.23"})";

  TEST_CASE("SGLang's ranks have consecutive ports, and the engine's host for the wildcard") {
    const auto sources = parse_server_info(kSglang0523, "10.0.0.7");
    REQUIRE(sources);
    CHECK(*sources == std::vector<EventAddress>{{.rank = 0,
                                                 .endpoint = "tcp://10.0.0.7:5557",
                                                 .replay_endpoint = "tcp://10.0.0.7:5657",
                                                 .topic = "kv",
                                                 .block_size = 64,
                                                 .dialect = Dialect::kSglang,
                                                 .wants_body_session = true},
                                                {.rank = 1,
                                                 .endpoint = "tcp://10.0.0.7:5558",
                                                 .replay_endpoint = "tcp://10.0.0.7:5658",
                                                 .topic = "kv",
                                                 .block_size = 64,
                                                 .dialect = Dialect::kSglang,
                                                 .wants_body_session = true}});
    const auto at = [](const std::string& host, const char* engine) {
      const auto read = parse_server_info(R"({"kv_events":{"publisher":"zmq","endpoint_host":")" +
                                              host + R"(","endpoint_port_base":7,"dp_size":1}})",
                                          engine);
      return read ? read->at(0).endpoint : to_string(read.error().code).data();
    };
    CHECK(at("::", "fd00::7") == "tcp://[fd00::7]:7");
    CHECK(at("10.0.0.7", "10.0.0.7") == "tcp://10.0.0.7:7");
    CHECK(at("10.0.0.8", "10.0.0.7") == "refused");
  }

  TEST_CASE("an engine whose sessions are opened by their id is not sent one") {
    std::string text = kSglang0523;
    text.insert(1, R"("enable_session_radix_cache":true,)");
    CHECK_FALSE(parse_server_info(text, "a")->at(0).wants_body_session);
    text.replace(text.find("true"), 4, "false");
    CHECK(parse_server_info(text, "a")->at(0).wants_body_session);
  }

  TEST_CASE("other engines, and SGLang without events, have no streams") {
    for (const char* text : {"{}", R"({"kv_events":null})", R"({"other":{"kv_events":{}}})",
                             R"({"kv_events":{"publisher":"null"}})"}) {
      const auto sources = parse_server_info(text, "a");
      REQUIRE(sources);
      CHECK(sources->empty());
    }
  }

  TEST_CASE("invalid text is rejected") {
    for (
        const char* text :
        {"", "[]", "7", R"({"kv_events":{"publisher":"zmq"}})",
         R"({"kv_events":{"publisher":"zmq","endpoint_port_base":-1,"dp_size":1}})",
         R"({"kv_events":{"publisher":"zmq","endpoint_port_base":65536,"dp_size":1}})",
         R"({"kv_events":{"publisher":"zmq","endpoint_port_base":65535,"dp_size":2}})",
         R"({"kv_events":{"publisher":"zmq","endpoint_port_base":1,"dp_size":1025}})",
         R"({"kv_events":{"publisher":"zmq","endpoint_host":"a b","endpoint_port_base":1,"dp_size":1}})"}) {
      CAPTURE(text);
      const auto sources = parse_server_info(text, "a");
      REQUIRE_FALSE(sources);
      CHECK(sources.error().code == Errc::kCorrupt);
    }
    CHECK_FALSE(parse_server_info(std::string(kMaxServerInfoText + 1, ' '), "a"));
    CHECK_FALSE(parse_server_info(std::string(100'000, '['), "a"));
    CHECK(parse_server_info("{}", "").error().code == Errc::kInvalidArgument);
  }
}

TEST_SUITE("check_event_endpoint") {
  TEST_CASE("tcp with host and port, and ipc with a path") {
    CHECK(check_event_endpoint("tcp://10.0.0.7:5557"));
    CHECK(check_event_endpoint("tcp://[fd00::7]:5557"));
    CHECK(check_event_endpoint("ipc:///run/vllm/events"));
    for (const char* endpoint : {"tcp://*:5557", "tcp://0.0.0.0:1", "tcp://a:0", "tcp://a",
                                 "ipc://", "inproc://a", "a:1"}) {
      CHECK(check_event_endpoint(endpoint).error().code == Errc::kInvalidArgument);
    }
    CHECK(check_event_endpoint("tcp://[::]:7").error().detail ==
          "event endpoint: 'tcp://[::]:7' is an address to listen at; name the host to connect to, "
          "as in tcp://10.0.0.1:7");
  }
}

}  // namespace pegaflow::index
