#include "router/config/event_endpoints.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::router {
namespace {

using index::Dialect;
using index::EventAddress;

EventEndpoints parsed(const std::vector<std::string>& values) {
  auto endpoints = EventEndpoints::parse(values);
  REQUIRE_MESSAGE(endpoints, endpoints.error().detail);
  return std::move(*endpoints);
}

/// The error of the last value, without the option and the value in front of it.
std::string error_of(const std::vector<std::string>& values) {
  const auto endpoints = EventEndpoints::parse(values);
  REQUIRE_FALSE(endpoints);
  CHECK(endpoints.error().code == Errc::kInvalidArgument);
  const std::string begin = "--kv-events: \"" + values.back() + "\": ";
  const std::string& detail = endpoints.error().detail;
  REQUIRE(detail.starts_with(begin));
  return detail.substr(begin.size());
}

EngineUrl url(const char* text) { return EngineUrl::parse(text).value(); }

/// The streams that the values name for an engine.
std::vector<EventAddress> streams(const std::vector<std::string>& values, const char* engine) {
  return parsed(values).of(url(engine));
}

TEST_SUITE("EventEndpoints") {
  TEST_CASE("an endpoint alone is the stream of rank 0, in vLLM's format and without replays") {
    const auto named =
        streams({"http://10.0.0.1:8000/=tcp://10.0.0.2:5557"}, "http://10.0.0.1:8000");
    REQUIRE(named.size() == 1);
    CHECK(named[0] == EventAddress{.rank = 0,
                                   .endpoint = "tcp://10.0.0.2:5557",
                                   .replay_endpoint = {},
                                   .topic = {},
                                   .is_configured = true});
    CHECK(streams({"http://a:1=tcp://a:2"}, "http://b:1").empty());
    CHECK(parsed({}).empty());
    CHECK(streams({"http://[::1]:1=ipc:///run/events"}, "http://[::1]:1")[0].endpoint ==
          "ipc:///run/events");
  }

  TEST_CASE("fields follow in any order, and each rank has the next port of both endpoints") {
    const auto named =
        streams({"http://a:1=tcp://"
                 "[fd00::7]:5557+format=sglang+rank=2+ranks=3+topic=kv+replay=tcp://b:6000"},
                "http://a:1");
    REQUIRE(named.size() == 3);
    for (std::uint32_t i = 0; i < 3; ++i) {
      CHECK(named[i] == EventAddress{.rank = 2 + i,
                                     .endpoint = "tcp://[fd00::7]:" + std::to_string(5557 + i),
                                     .replay_endpoint = "tcp://b:" + std::to_string(6000 + i),
                                     .topic = "kv",
                                     .dialect = Dialect::kSglang,
                                     .wants_body_session = true,
                                     .is_configured = true});
    }
  }

  TEST_CASE("several values name the ranks of one engine") {
    const auto named = streams({"http://a:1=tcp://y:5558+rank=1+format=vllm",
                                "http://b:1=tcp://b:5557", "http://a:1=tcp://x:5557"},
                               "http://a:1");
    REQUIRE(named.size() == 2);
    CHECK(named[0].endpoint == "tcp://x:5557");
    CHECK(named[1].endpoint == "tcp://y:5558");
    CHECK(named[1].rank == 1);
    CHECK(named[1].dialect == Dialect::kVllm);
    CHECK(streams({"http://a:1=tcp://a:2+format=trtllm"}, "http://a:1")[0].dialect ==
          Dialect::kTensorRtLlm);
  }

  TEST_CASE("the host of a name stands for each of its addresses") {
    const EventEndpoints endpoints =
        parsed({"dns://e.svc:8000=tcp://e.svc:5557+replay=tcp://e.svc:5558",
                "http://10.0.0.9:8000=tcp://10.0.0.9:7"});
    EngineUrl engine = url("http://10.0.0.1:8000");
    CHECK(endpoints.of(engine).empty());
    engine.name = "dns://e.svc:8000";
    REQUIRE(endpoints.of(engine).size() == 1);
    CHECK(endpoints.of(engine)[0].endpoint == "tcp://10.0.0.1:5557");
    CHECK(endpoints.of(engine)[0].replay_endpoint == "tcp://10.0.0.1:5558");
    engine = url("http://[fd00::7]:8000");
    engine.name = "dns://e.svc:8000";
    CHECK(endpoints.of(engine)[0].endpoint == "tcp://[fd00::7]:5557");
    // An address that is named itself is not that of the name.
    engine = url("http://10.0.0.9:8000");
    engine.name = "dns://e.svc:8000";
    CHECK(endpoints.of(engine)[0].endpoint == "tcp://10.0.0.9:7");
    CHECK(endpoints.of(engine)[0].replay_endpoint.empty());
  }

  TEST_CASE("engines that are not in the list are found, unless a name may resolve to them") {
    const EventEndpoints endpoints =
        parsed({"http://a:1=tcp://a:2", "http://b:1=tcp://b:2", "dns://c:3=tcp://c:4"});
    using Urls = std::vector<std::string>;
    const auto unlisted = [&](const char* engines) {
      return endpoints.unlisted(EngineList::parse(engines).value());
    };
    CHECK(unlisted("prefill http://a:1\ndecode http://b:1\ndecode dns://c:3").empty());
    CHECK(unlisted("decode http://a:1") == Urls{"dns://c:3", "http://b:1"});
    CHECK(unlisted("decode dns://c:3\ndecode http://a:1") == Urls{"http://b:1"});
    CHECK(unlisted("decode dns://c:1") == Urls{"dns://c:3"});
  }

  TEST_CASE("errors name the value, the reason and the fix") {
    CHECK(error_of({"http://a:1"}) ==
          "the form is ENGINE=ENDPOINT, as in http://10.0.0.1:8000=tcp://10.0.0.1:5557");
    CHECK(error_of({"a:1=tcp://a:2"}).starts_with("\"a:1\" is not http://HOST:PORT"));
    CHECK(error_of({"http://a:1="}) ==
          "event endpoint: '' is neither tcp://HOST:PORT nor ipc:///PATH");
    for (const std::string bad :
         {"tcp://a", "tcp://a:0", "tcp://a:65536", "udp://a:1", "a:1", "ipc://x", "http://a:1"}) {
      CAPTURE(bad);
      CHECK(error_of({"http://a:1=" + bad}) ==
            "event endpoint: '" + bad + "' is neither tcp://HOST:PORT nor ipc:///PATH");
    }
    for (const std::string host : {"*", "0.0.0.0", "[::]"}) {
      CAPTURE(host);
      const std::string reason = "event endpoint: 'tcp://" + host +
                                 ":5557' is an address to listen at; name the host to connect to, "
                                 "as in tcp://10.0.0.1:5557";
      CHECK(error_of({"http://a:1=tcp://" + host + ":5557"}) == reason);
      CHECK(error_of({"http://a:1=tcp://a:1+replay=tcp://" + host + ":5557"}) == reason);
    }
    CHECK(error_of({"http://a:1=tcp://a:2+replay"}) ==
          "event endpoint: '' is neither tcp://HOST:PORT nor ipc:///PATH");
  }

  TEST_CASE("fields that are unknown, repeated or out of range are rejected") {
    CHECK(error_of({"http://a:1=tcp://a:2+ranks=2+ranks=2"}) == "it has ranks twice");
    CHECK(error_of({"http://a:1=tcp://a:2+port=3"}) ==
          "\"port\" is none of the fields replay, topic, rank, ranks and format, each as "
          "+FIELD=VALUE");
    CHECK(error_of({"http://a:1=tcp://a:2+format=mooncake"}) ==
          "format=mooncake is none of vllm, sglang and trtllm");
    CHECK(error_of({"http://a:1=tcp://a:2+ranks=0"}) == "ranks=0 is not a number from 1 to 1024");
    CHECK(error_of({"http://a:1=tcp://a:2+rank=x"}) == "rank=x is not a number from 0 to 1023");
    CHECK(error_of({"http://a:1=tcp://a:2+rank=1023+ranks=2"}) ==
          "its last rank is 1024; the highest is 1023");
    CHECK(error_of({"http://a:1=tcp://a:65535+ranks=3"}) ==
          "the port of a later rank would be 65536; the highest is 65535");
    CHECK(error_of({"http://a:1=ipc:///run/e+ranks=2"}) ==
          "\"ipc:///run/e\" has no port, so ranks=N has no effect on it: name each rank by a value "
          "of its own with rank=R");
    CHECK(error_of({"dns://e:1=tcp://10.0.0.1:2"}) ==
          "\"tcp://10.0.0.1:2\" is one endpoint for all addresses of dns://e:1; write "
          "tcp://e:PORT, whose host stands for each of them");
  }

  TEST_CASE("a rank and an endpoint are named once") {
    CHECK(error_of({"http://a:1=tcp://a:2", "http://a:1=tcp://a:3"}) ==
          "rank 0 of http://a:1 is named twice; give each rank one value, with rank=R");
    const std::string twice =
        " is named twice; each rank has its own endpoint for events and another one for replays";
    CHECK(error_of({"http://a:1=tcp://x:2", "http://b:1=tcp://x:2"}) == "tcp://x:2" + twice);
    CHECK(error_of({"http://a:1=tcp://x:2+replay=tcp://x:2"}) == "tcp://x:2" + twice);
    CHECK(error_of({"http://a:1=tcp://x:2+replay=tcp://x:3+ranks=2"}) == "tcp://x:3" + twice);
  }
}

}  // namespace
}  // namespace pegaflow::router
