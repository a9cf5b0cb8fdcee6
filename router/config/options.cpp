#include "router/config/options.h"

#include <algorithm>
#include <string_view>

#include "base/os/text_file.h"
#include "router/http/routes.h"

namespace pegaflow::router {
namespace {

/// The text of the file that `option` names.
Result<std::string> read_file_of(std::string_view option, const std::string& path) {
  auto text = read_text_file(path);
  if (!text) {
    return fail(Errc::kInvalidArgument, "{} {}: {}", option, path, text.error().detail);
  }
  return text;
}

}  // namespace

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

void RouterOptions::declare(OptionTable& table) {
  table.list(
      "prefill", prefill,
      "Engines that prefill, as http://HOST:PORT, or dns://NAME:PORT for all addresses of a name, "
      "asked for with each health check. Without one every request goes to a decode engine whole.");
  table.list("decode", decode, "Engines that decode, named likewise; one at least.");
  table.text(
      "engines-file", engines_file,
      "A file with lines `prefill URL` and `decode URL` instead of the two above. It is read "
      "again when it changes; an engine that is gone from it finishes what it has.");
  table.list(
      "servers", servers,
      "The pegaflow-servers of the engines (--http-addr of each), as http://HOST:PORT or "
      "dns://NAME:PORT. Their /instances are asked for with each health check, and engines that do "
      "not share one namespace are reported: they find nothing of each other.");
  table.list("instances", instances,
             "Only instances with these names, or with names that begin so, are compared: for "
             "servers that have other engines too. Empty: all that are connected.");
  table.text("listen", listen, "HOST:PORT for clients; port 0 picks one and logs it.");
  table.text("own-listen", own_listen,
             "A second HOST:PORT with the same service. Where several routers share --listen it is "
             "the address of this router alone, for probes and scrapes.");
  table.flag("reuse-port", reuse_port,
             "Several routers may listen at the same --listen (SO_REUSEPORT), and the kernel "
             "distributes connections among them. Each router has one thread.");
  table.text("ready-file", ready_file,
             "A file that is written once clients can connect: JSON with listen and pid.");
  table.text("flow", flow,
             "How the decode engine learns of the prefill. store: the engines share PegaFlow's "
             "cache. kv-params: the prefill engine's kv_transfer_params are handed over, for "
             "connectors in the manner of NIXL's.");
  table.text("prefill-policy", prefill_policy,
             "Which prefill engine: round-robin, least-load, power-of-two or consistent-hash.");
  table.text("decode-policy", decode_policy,
             "Which decode engine: the same. consistent-hash goes by X-Session-ID, else by the "
             "beginning of the prompt.");
  table.integer("hash-prefix-bytes", hash_prefix_bytes, 1, 1 << 20,
                "How much of the prompt consistent-hash looks at: beyond a usual system prompt, or "
                "all would go to one engine.");
  table.integer("min-prefill-tokens", min_prefill_tokens, 0, 1 << 20,
                "Shorter prompts (bytes / 4) are not prefilled apart: the way costs more than the "
                "prefill.");
  table.flag("pd-first-token", pd_first_token,
             "The token that the prefill engine computes is sent as the first one of the answer, "
             "and the decode engine goes on behind it: for streams of /v1/completions without "
             "grammar, seed, penalties, stop strings or log-probabilities.");
  table.list("pass", pass,
             "Further paths that one decode engine may answer. All that is neither here nor in "
             "docs/router.md is denied, above all the engines' development endpoints.");

  table.list("cors-origins", cors_origins,
             "Origins whose web pages may call the router, like --allowed-origins of vllm serve; * "
             "allows every origin, and the value none leaves CORS to the engines.");

  table.text("api-keys-file", api_keys_file,
             "A file with lines `NAME KEY [REQUESTS_PER_SECOND]`. With it every request but "
             "/health, /metrics and /version needs one of the keys, as a bearer or x-api-key; keys "
             "are never forwarded. It is read again when it changes.");
  table.text("engine-api-key-file", engine_api_key_file,
             "A file with the key that engines want (vllm serve --api-key). It is read again when "
             "it changes.");
  table.text(
      "cache-salt-key-file", cache_salt_key_file,
      "A file with a secret of 16 bytes or more, the same for all routers of the same engines. The "
      "cache_salt of each tenant is derived from it, or without it from the tenant's name alone. "
      "It is read again when it changes; blocks that were cached before are then no longer found.");
  table.flag("share-cache-among-tenants", share_cache_among_tenants,
             "Tenants of --api-keys-file share cached prompts, and a client's cache_salt is passed "
             "to the engines unchanged. By default the router salts the prompts of each tenant "
             "(NAME), so that no tenant can find out by timing what others have asked.");
  table.integer(
      "rate-limit", rate_limit, 0, 1'000'000,
      "Requests a second for each API key that names no rate itself; 0 is without limit.");

  table.integer("max-connections", max_connections, 1, 1'000'000,
                "Connections of clients at once; the next ones get 503.");
  table.integer("max-connections-per-address", max_connections_per_address, 0, 1'000'000,
                "Connections of one client address (of IPv6, one /64) at once; further ones get "
                "429. 0 is no limit, because behind a proxy all clients have its address.");
  table.bytes(
      "max-header-bytes", max_header_bytes, 1024, 1 << 20,
      "Of a request's head; beyond it 431. And of the first line of a chunk, or of a trailer, "
      "of its body; beyond it 400.");
  table.bytes("max-body-bytes", max_body_bytes, 1024, std::uint64_t{1} << 30,
              "Of a request's body; beyond it 413. A prompt of 1M tokens has about 5 MB, images "
              "have more.");
  table.bytes("body-memory", body_memory_bytes, 1 << 20, std::uint64_t{1} << 40,
              "Of all bodies that are kept until their first event; beyond it 503.");
  table.integer("max-prefill-inflight", max_prefill_inflight, 1, 100'000,
                "Requests of one prefill engine at once; when all have as many, the decode engine "
                "prefills.");
  table.integer("max-decode-inflight", max_decode_inflight, 1, 100'000,
                "Requests of one decode engine at once; the next ones wait in the queue.");
  table.integer("queue", queue, 0, 1'000'000,
                "Requests that wait for a decode engine; beyond it 429.");
  table.duration("queue-timeout", queue_timeout, milliseconds(1), minutes(60),
                 "How long a request waits there before 503.");

  table.duration("connect-timeout", connect_timeout, milliseconds(1), minutes(1),
                 "For a connection to an engine. Within a data center it takes a millisecond.");
  table.duration(
      "prefill-timeout", prefill_timeout, milliseconds(1), minutes(60),
      "For the prefill engine's whole answer to a short prompt; then the decode engine prefills. "
      "When the engine's health checks fail, the router stops waiting before that.");
  table.integer("min-prefill-rate", min_prefill_rate, 0, 1'000'000,
                "The lowest number of tokens (bytes / 4) per second that a prefill engine is "
                "expected to compute: it extends --prefill-timeout for long prompts, up to "
                "--answer-timeout. 0: no extension.");
  table.duration(
      "answer-timeout", answer_timeout, milliseconds(1), minutes(24 * 60),
      "For the first byte of an engine's answer: a whole answer when it is not streamed.");
  table.duration("event-timeout", event_timeout, milliseconds(1), minutes(60),
                 "Between two pieces of an answer. An engine that is stopped sends none.");
  table.duration("client-timeout", client_timeout, milliseconds(1), minutes(60),
                 "For a client to send the head of its request, between two pieces of its body, to "
                 "receive what is sent to it, and between two requests. When it expires a request "
                 "that has begun gets 408.");
  table.duration("body-timeout", body_timeout, milliseconds(1), minutes(24 * 60),
                 "For the whole body of a request, at any rate; beyond it 408.");
  table.bytes("min-body-rate", min_body_rate, 0, std::uint64_t{1} << 30,
              "Bytes per second that a body must reach once it has taken longer than "
              "--client-timeout; below it 408. 0: only the two limits above apply.");
  table.duration(
      "engine-idle-time", engine_idle_time, Duration::zero(), minutes(60),
      "How long a connection to an engine is kept unused. vLLM's server closes them after "
      "5 s.");
  table.duration("drain-delay", drain_delay, Duration::zero(), minutes(60),
                 "After SIGTERM: how long new connections are still accepted while /health is 503, "
                 "until load balancers have removed the router.");
  table.duration("shutdown-timeout", shutdown_timeout, Duration::zero(), minutes(60),
                 "After SIGTERM and --drain-delay: how long requests in flight may continue.");

  table.duration("health-interval", health_interval, milliseconds(10), minutes(10),
                 "Between two GET /health of each engine.");
  table.duration("health-timeout", health_timeout, milliseconds(10), minutes(1), "For its answer.");
  table.integer(
      "health-failures", health_failures, 1, 100,
      "Checks in a row that fail until an engine counts as down; one that succeeds brings "
      "it back.");
  table.duration(
      "models-interval", models_interval, milliseconds(10), minutes(60),
      "Between two GET /v1/models to each engine. A request goes to engines that list its model.");
  table.flag("pass-unknown-models", pass_unknown_models,
             "A model that no engine lists goes to any engine instead of getting 404: for engines "
             "that load adapters on demand.");
  table.integer("breaker-failures", breaker_failures, 1, 1000,
                "Requests in a row that fail until an engine is left alone.");
  table.duration("breaker-time", breaker_time, milliseconds(1), minutes(10),
                 "For how long; doubled with each relapse, up to 30 s.");
  table.integer("retries", retries, 0, 10,
                "How often a request is sent again, to another engine if there is one, while its "
                "client has got nothing. Engines find by content, so a repetition is safe.");
  table.duration(
      "retry-delay", retry_delay, milliseconds(1), seconds(10),
      "Before the first repetition; doubled each time, and drawn between half and one and "
      "a half of it.");

  table.flag("access-log", access_log, "A line of key=value fields for each request.");
  table.text("log-level", log_level, "trace, debug, info, warn, error or off.");

  const char* const store_flow = "requests take the store flow, which needs no such bound.";
  table.ignored("pd-flow-retries", true, "--retries says it.");
  table.ignored("pd-max-model-len", true, store_flow);
}

Result<EngineList> RouterOptions::engines() const {
  EngineList list;
  if (!engines_file.empty()) {
    if (!prefill.empty() || !decode.empty()) {
      return fail(
          Errc::kInvalidArgument,
          "--engines-file does not go with --prefill and --decode: one of them says it all");
    }
    PEGA_TRY_LET(const std::string text, read_file_of("--engines-file", engines_file));
    auto parsed = EngineList::parse(text);
    if (!parsed) {
      return fail(Errc::kInvalidArgument, "--engines-file {}: {}", engines_file,
                  parsed.error().detail);
    }
    list = std::move(*parsed);
  }
  const auto add = [&](Role role, const std::vector<std::string>& urls) -> Result<void> {
    for (const std::string& text : urls) {
      auto url = EngineUrl::parse(text);
      if (!url) {
        return fail(Errc::kInvalidArgument, "--{}: {}", to_string(role), url.error().detail);
      }
      list.by_role[static_cast<std::size_t>(role)].push_back(std::move(*url));
    }
    return {};
  };
  PEGA_TRY(add(Role::kPrefill, prefill));
  PEGA_TRY(add(Role::kDecode, decode));
  if (list.by_role[static_cast<std::size_t>(Role::kDecode)].empty()) {
    return fail(Errc::kInvalidArgument, "there is no decode engine: name one with --decode");
  }
  return list;
}

Result<std::vector<EngineUrl>> RouterOptions::server_urls() const {
  if (servers.empty() && !instances.empty()) {
    return fail(Errc::kInvalidArgument, "--instances needs --servers, which are asked for them");
  }
  std::vector<EngineUrl> urls;
  for (const std::string& text : servers) {
    auto url = EngineUrl::parse(text);
    if (!url) return fail(Errc::kInvalidArgument, "--servers: {}", url.error().detail);
    urls.push_back(std::move(*url));
  }
  return urls;
}

Result<void> RouterOptions::check_passed() const {
  for (const std::string& path : pass) {
    if (!path.starts_with('/')) {
      return fail(Errc::kInvalidArgument, "--pass: \"{}\" is no path: it begins with /", path);
    }
    if (path.find('?') != std::string::npos) {
      return fail(Errc::kInvalidArgument, "--pass: \"{}\" has a query: name the path alone", path);
    }
    if (find_route("GET", path, {}).kind != RouteKind::kDenied) {
      return fail(Errc::kInvalidArgument,
                  "--pass: \"{}\" is a path that the router serves itself, in its own way", path);
    }
  }
  return {};
}

Result<void> RouterOptions::check_cors_origins() const {
  if (cors_origins.size() > 1 &&
      std::find(cors_origins.begin(), cors_origins.end(), "none") != cors_origins.end()) {
    return fail(Errc::kInvalidArgument,
                "--cors-origins: \"none\" leaves CORS to the engines; it does not go with others");
  }
  return {};
}

Result<std::optional<AccessList>> RouterOptions::access() const {
  if (api_keys_file.empty()) return std::optional<AccessList>();
  PEGA_TRY_LET(const std::string text, read_file_of("--api-keys-file", api_keys_file));
  auto access = AccessList::parse(text, rate_limit);
  if (!access) {
    return fail(Errc::kInvalidArgument, "--api-keys-file {}: {}", api_keys_file,
                access.error().detail);
  }
  return std::optional<AccessList>(std::move(*access));
}

Result<std::optional<CacheSalts>> RouterOptions::cache_salts() const {
  constexpr std::string_view kOption = "--cache-salt-key-file";
  if (!cache_salt_key_file.empty() && (api_keys_file.empty() || share_cache_among_tenants)) {
    return fail(Errc::kInvalidArgument, "{} {}", kOption,
                api_keys_file.empty() ? "needs --api-keys-file, whose names are the tenants"
                                      : "has no effect with --share-cache-among-tenants");
  }
  if (api_keys_file.empty() || share_cache_among_tenants) return std::optional<CacheSalts>();
  std::string secret;
  if (!cache_salt_key_file.empty()) {
    PEGA_TRY_LET(secret, read_file_of(kOption, cache_salt_key_file));
    secret.erase(secret.find_last_not_of(" \t\r\n") + 1);
    if (secret.size() < CacheSalts::kMinSecretBytes) {
      return fail(Errc::kInvalidArgument,
                  "{} {}: it has {} bytes, fewer than {}; make one with "
                  "`head -c 32 /dev/urandom | base64`",
                  kOption, cache_salt_key_file, secret.size(), CacheSalts::kMinSecretBytes);
    }
  }
  return std::optional<CacheSalts>(CacheSalts(secret));
}

Result<std::string> RouterOptions::engine_key() const {
  if (engine_api_key_file.empty()) return std::string();
  PEGA_TRY_LET(std::string text, read_file_of("--engine-api-key-file", engine_api_key_file));
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  if (text.empty() || text.find_first_of("\r\n") != std::string::npos) {
    return fail(Errc::kInvalidArgument, "--engine-api-key-file {}: it has to be one line",
                engine_api_key_file);
  }
  return text;
}

}  // namespace pegaflow::router
