#include "router/config/options.h"

#include <algorithm>
#include <string_view>

#include "base/os/text_file.h"
#include "router/config/event_endpoints.h"
#include "router/config/text_options.h"
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

/// Whether only processes of this host reach the address.
bool is_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host == "[::1]" || host.starts_with("127.");
}

}  // namespace

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

void RouterOptions::declare(OptionTable& table) {
  table.list(
      "prefill", prefill,
      "The prefill engines, each as http://HOST:PORT, or as dns://NAME:PORT for all addresses of a "
      "name, which the router resolves with each health check. Without a prefill engine no request "
      "is split.");
  table.list("decode", decode, "The decode engines, in the same format; at least one is required.");
  table.text(
      "engines-file", engines_file,
      "A file with lines `prefill URL` and `decode URL`, instead of --prefill and --decode. It is "
      "read again when it changes; an engine that is removed from it finishes its requests.");
  table.list(
      "servers", servers,
      "The --http-addr of the engines' pegaflow-servers, as http://HOST:PORT or dns://NAME:PORT. "
      "The router reads their /instances with each health check, and reports engines that do not "
      "share one namespace: they find no blocks of each other.");
  table.list(
      "engine-servers", engine_servers,
      "The server of an engine, as ENGINE=SERVER with the URLs of --decode or --prefill and of "
      "--servers, where the policy kv-aware cannot tell: by default an engine belongs to the only "
      "server on its host.");
  table.text(
      "peer-secret-file", peer_secret_file,
      "The file with the secret that servers and routers share (pegaflow-server "
      "--peer-secret-file). With it the policy kv-aware also counts what the pools of --servers "
      "hold, and /routes explains its decisions. It is read again when it changes.");
  table.list(
      "replicas", replicas,
      "The --replica-listen of all routers of the same engines, each as HOST:PORT, or as "
      "dns://NAME:PORT for all addresses of a name. The policy kv-aware of each then counts the "
      "requests of the others, and learns from them. The router recognizes its own address. At "
      "most 15 others are used.");
  table.text("replica-listen", replica_listen,
             "The HOST:PORT where this router publishes its placements to the others, over "
             "ZeroMQ. Messages are authenticated by --peer-secret-file, and not encrypted; "
             "without a secret only loopback addresses are allowed.");
  table.list(
      "instances", instances,
      "Compares only instances whose name equals or starts with one of these; useful when the "
      "servers also have other engines. Empty: all connected instances.");
  table.text(
      "listen", listen,
      "The HOST:PORT for clients; with port 0 the kernel selects a free port, which is logged.");
  table.text("own-listen", own_listen,
             "A second HOST:PORT with the same service. When several routers share --listen, it is "
             "the address of this router alone, for probes and scrapes.");
  table.flag("reuse-port", reuse_port,
             "Allows several routers to listen at the same --listen (SO_REUSEPORT); the kernel "
             "distributes connections among them. Each router has one thread.");
  table.text(
      "ready-file", ready_file,
      "A file that the router writes as soon as clients can connect: JSON with listen and pid.");
  table.text("flow", flow,
             "How the decode engine receives the prefill. store: through PegaFlow's cache, which "
             "the engines share. auto: the same, and streamed requests are sent to both engines at "
             "once where the connectors allow it. direct: the same as auto, and the router reports "
             "engines that cannot read the memory of another one (pegaflow.direct_group); it needs "
             "--servers. kv-params: by the prefill engine's "
             "kv_transfer_params, for "
             "connectors like vLLM's NIXL connector.");
  table.text(
      "prefill-policy", prefill_policy,
      "The policy for prefill engines: kv-aware, round-robin, least-load, power-of-two or "
      "consistent-hash. kv-aware sends a prompt to the engine that has the least to compute, as "
      "far "
      "as engines publish their KV events (--kv-events-config), and is least-load for the others.");
  table.text(
      "decode-policy", decode_policy,
      "The policy for decode engines: the same values. consistent-hash uses X-Session-ID, or "
      "else the beginning of the prompt.");
  table.integer("index-blocks", index_blocks, 1024, std::int64_t{1} << 28,
                "The maximum number of blocks in the index of the policy kv-aware, about 20 bytes "
                "each, allocated as it fills; beyond it the router forgets blocks.");
  table.bytes("text-index-bytes", text_index_bytes, 1 << 16, std::uint64_t{1} << 40,
              "The maximum memory for what the policy kv-aware has learned about the blocks of "
              "prompts, about 0.7 bytes for each byte of a prompt.");
  table.bytes("prefetch-key-bytes", prefetch_key_bytes, 0, std::uint64_t{1} << 40,
              "The maximum memory for the full keys of the blocks in the pools of --servers, about "
              "50 bytes each, with which the policy kv-aware lets a server fetch blocks before "
              "their engine asks for them. 0: no prefetches. It needs --peer-secret-file.");
  declare_text_options({.hash_seeds = hash_seeds,
                        .render = render,
                        .render_timeout = render_timeout,
                        .render_inflight = render_inflight},
                       table);
  table.bytes("render-min-bytes", render_min_bytes, 256, std::uint64_t{1} << 30,
              "The minimum size of a text for --render: shorter ones cost less to compute than "
              "to ask about.");
  table.duration("event-sources-interval", event_sources_interval, milliseconds(10), minutes(60),
                 "The time between two requests for the addresses of an engine's KV events; the "
                 "router also requests them when an engine comes up or its stream breaks.");
  declare_event_option(kv_events, table);
  table.duration("engine-load-interval", engine_load_interval, Duration::zero(), minutes(60),
                 "The time between two GET /metrics to each engine, by which the policy kv-aware "
                 "learns of requests that no router has placed and of full KV memory. 0s: never.");
  table.integer("hash-prefix-bytes", hash_prefix_bytes, 1, 1 << 20,
                "The number of bytes of the prompt that consistent-hash uses. It must exceed the "
                "length of a common system prompt, or all requests go to one engine.");
  table.integer(
      "min-prefill-tokens", min_prefill_tokens, 0, 1 << 20,
      "Prompts with fewer tokens (bytes / 4) are not sent to a prefill engine, because the "
      "transfer costs more than the prefill.");
  table.flag(
      "pd-first-token", pd_first_token,
      "Sends the prefill engine's token as the first token of the response, and lets the "
      "decode engine continue from it: for streams of /v1/completions without grammar, seed, "
      "penalties, stop strings or log-probabilities.");
  table.list("pass", pass,
             "Further paths that one decode engine serves. The router denies every path that is "
             "neither listed here nor in docs/router.md, above all the engines' development "
             "endpoints.");

  table.list("cors-origins", cors_origins,
             "The origins whose web pages may call the router, like --allowed-origins of vllm "
             "serve; * allows every origin, and none leaves CORS to the engines.");

  table.text(
      "api-keys-file", api_keys_file,
      "A file with lines `NAME KEY [REQUESTS_PER_SECOND]`. With it every request except "
      "/health, /metrics and /version needs one of the keys, as a bearer token or x-api-key; "
      "keys are never forwarded. The file is read again when it changes.");
  table.text(
      "engine-api-key-file", engine_api_key_file,
      "A file with the key that the engines require (vllm serve --api-key). It is read again "
      "when it changes.");
  table.text(
      "cache-salt-key-file", cache_salt_key_file,
      "A file with a secret of at least 16 bytes, the same for all routers of the same engines. "
      "The cache_salt of each tenant is derived from it, or without it from the tenant's name "
      "alone. It is read again when it changes; blocks that were cached before are then no longer "
      "found.");
  table.flag("share-cache-among-tenants", share_cache_among_tenants,
             "Lets the tenants of --api-keys-file share cached prompts, and passes a client's "
             "cache_salt to the engines unchanged. By default the router salts the prompts of each "
             "tenant (NAME), so that no tenant can detect the prompts of others by timing.");
  table.integer(
      "rate-limit", rate_limit, 0, 1'000'000,
      "The requests per second of each API key without a rate in the file; 0 is unlimited.");

  table.integer("max-connections", max_connections, 1, 1'000'000,
                "The maximum number of open client connections; further connections receive 503.");
  table.integer("max-connections-per-address", max_connections_per_address, 0, 1'000'000,
                "The maximum number of open connections of one client address (for IPv6, of one "
                "/64); further connections receive 429. 0 is unlimited, because all clients behind "
                "a proxy have one address.");
  table.bytes(
      "max-header-bytes", max_header_bytes, 1024, 1 << 20,
      "The maximum size of a request's head, beyond which the client receives 431; and of the "
      "first line of a chunk or the trailer of its body, beyond which it receives 400.");
  table.bytes(
      "max-body-bytes", max_body_bytes, 1024, std::uint64_t{1} << 30,
      "The maximum size of a request's body, beyond which the client receives 413. A prompt "
      "of 1M tokens has about 5 MB, images have more.");
  table.bytes("body-memory", body_memory_bytes, 1 << 20, std::uint64_t{1} << 40,
              "The maximum size of all request bodies together, each kept until its first event; "
              "beyond it clients receive 503.");
  table.integer("max-prefill-inflight", max_prefill_inflight, 1, 100'000,
                "The maximum number of requests in flight at one prefill engine; when all have as "
                "many, the decode engine prefills.");
  table.integer("max-decode-inflight", max_decode_inflight, 1, 100'000,
                "The maximum number of requests in flight at one decode engine; further requests "
                "wait in the queue.");
  table.integer(
      "queue", queue, 0, 1'000'000,
      "The maximum number of requests that wait for a decode engine; further ones receive 429.");
  table.duration("queue-timeout", queue_timeout, milliseconds(1), minutes(60),
                 "The maximum time that a request waits in the queue. Then it is sent to an engine "
                 "with fewer than --max-decode-inflight requests, or receives 503.");
  table.duration("engine-queue-time", engine_queue_time, milliseconds(0), minutes(10),
                 "With the policy kv-aware, requests wait in the router's queue while each engine "
                 "has more than this to compute, as predicted: there the clients share the engines "
                 "fairly, and a request still goes where its cache is when its turn comes. 0: only "
                 "--max-decode-inflight counts.");

  table.duration("connect-timeout", connect_timeout, milliseconds(1), minutes(1),
                 "The time limit for connecting to an engine; within a data center it takes a "
                 "millisecond.");
  table.duration(
      "prefill-timeout", prefill_timeout, milliseconds(1), minutes(60),
      "The time limit for a prefill engine's whole response to a short prompt; then the decode "
      "engine prefills. When the engine's health checks fail, the router stops waiting earlier.");
  table.integer("min-prefill-rate", min_prefill_rate, 0, 1'000'000,
                "The lowest number of tokens (bytes / 4) per second that a prefill engine is "
                "expected to compute: it extends --prefill-timeout for long prompts, up to "
                "--answer-timeout. 0: no extension.");
  table.duration(
      "answer-timeout", answer_timeout, milliseconds(1), minutes(24 * 60),
      "The time limit for the first byte of an engine's response, which comes after the whole "
      "generation when the response is not streamed.");
  table.duration(
      "event-timeout", event_timeout, milliseconds(1), minutes(60),
      "The time limit between two pieces of a response; an engine that hangs sends none.");
  table.duration("client-timeout", client_timeout, milliseconds(1), minutes(60),
                 "The time limit for a client to send the head of its request, between two pieces "
                 "of its body, to receive data, and between two requests. An incomplete request "
                 "then receives 408.");
  table.duration(
      "body-timeout", body_timeout, milliseconds(1), minutes(24 * 60),
      "The time limit for the whole body of a request, beyond which the client receives 408.");
  table.bytes(
      "min-body-rate", min_body_rate, 0, std::uint64_t{1} << 30,
      "The minimum rate, in bytes per second, of a body that takes longer than "
      "--client-timeout; a slower client receives 408. 0: only the two limits above apply.");
  table.duration(
      "engine-idle-time", engine_idle_time, Duration::zero(), minutes(60),
      "The maximum time that an idle connection to an engine is kept; vLLM's server closes idle "
      "connections after 5 s.");
  table.duration("drain-delay", drain_delay, Duration::zero(), minutes(60),
                 "The time after SIGTERM during which the router still accepts connections while "
                 "/health is 503, until load balancers have removed it.");
  table.duration("shutdown-timeout", shutdown_timeout, Duration::zero(), minutes(60),
                 "The maximum time after SIGTERM and --drain-delay for requests in flight.");

  table.duration("health-interval", health_interval, milliseconds(10), minutes(10),
                 "The time between two GET /health to each engine.");
  table.duration("health-timeout", health_timeout, milliseconds(10), minutes(1),
                 "The time limit for the response to GET /health.");
  table.integer(
      "health-failures", health_failures, 1, 100,
      "The number of failed checks in a row after which an engine is down; one successful check "
      "brings it back.");
  table.duration(
      "models-interval", models_interval, milliseconds(10), minutes(60),
      "The time between two GET /v1/models to each engine; a request goes to engines that list its "
      "model.");
  table.flag("pass-unknown-models", pass_unknown_models,
             "Sends a request for a model that no engine lists to any engine instead of returning "
             "404: for engines that load adapters on demand.");
  table.integer("breaker-failures", breaker_failures, 1, 1000,
                "The number of failed requests in a row after which an engine receives none.");
  table.duration("breaker-time", breaker_time, milliseconds(1), minutes(10),
                 "The time for which it receives none; doubled with each relapse, up to 30 s.");
  table.integer("retries", retries, 0, 10,
                "The maximum number of times that a request is sent again, to another engine if "
                "there is one, before its client has received a byte. The cache is addressed by "
                "content, so a repetition is safe.");
  table.duration(
      "retry-delay", retry_delay, milliseconds(1), seconds(10),
      "The mean delay before the first repetition; doubled each time, and varied randomly by up to "
      "half of it.");

  table.flag("access-log", access_log, "Logs a line of key=value fields for each request.");
  table.text("log-level", log_level,
             "The lowest level that is logged: trace, debug, info, warn, error or off.");

  const char* const store_flow = "the store flow needs no such bound.";
  table.ignored("pd-flow-retries", true, "use --retries.");
  table.ignored("pd-max-model-len", true, store_flow);
}

Result<EngineList> RouterOptions::engines() const {
  EngineList list;
  if (!engines_file.empty()) {
    if (!prefill.empty() || !decode.empty()) {
      return fail(Errc::kInvalidArgument,
                  "--engines-file cannot be combined with --prefill and --decode");
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
    return fail(Errc::kInvalidArgument, "no decode engine is configured: add one with --decode");
  }
  return list;
}

Result<std::vector<EngineUrl>> RouterOptions::server_urls() const {
  if (servers.empty() && !instances.empty()) {
    return fail(Errc::kInvalidArgument, "--instances needs --servers");
  }
  if (servers.empty() && flow == kDirectFlow) {
    return fail(Errc::kInvalidArgument,
                "--flow direct needs --servers, which tell the engines that can read each other's "
                "memory; without them use --flow auto");
  }
  std::vector<EngineUrl> urls;
  for (const std::string& text : servers) {
    auto url = EngineUrl::parse(text);
    if (!url) return fail(Errc::kInvalidArgument, "--servers: {}", url.error().detail);
    urls.push_back(std::move(*url));
  }
  return urls;
}

Result<std::vector<std::pair<std::string, std::string>>> RouterOptions::server_of_engines() const {
  if (servers.empty() && !engine_servers.empty()) {
    return fail(Errc::kInvalidArgument, "--engine-servers needs --servers");
  }
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const std::string& text : engine_servers) {
    const std::size_t equals = text.find('=');
    const auto engine = EngineUrl::parse(std::string_view(text).substr(0, equals));
    const auto server =
        EngineUrl::parse(equals == std::string::npos ? std::string_view()
                                                     : std::string_view(text).substr(equals + 1));
    if (!engine || !server) {
      return fail(Errc::kInvalidArgument, "--engine-servers: \"{}\" is not ENGINE=SERVER: {}", text,
                  (engine ? server : engine).error().detail);
    }
    pairs.emplace_back(engine->text, server->text);
  }
  return pairs;
}

Result<std::vector<EngineUrl>> RouterOptions::replica_urls() const {
  if (replicas.empty() != replica_listen.empty()) {
    return fail(Errc::kInvalidArgument, "{}",
                replicas.empty() ? "--replica-listen needs --replicas"
                                 : "--replicas needs --replica-listen HOST:PORT");
  }
  if (replicas.empty()) return std::vector<EngineUrl>();
  if (prefill_policy != "kv-aware" && decode_policy != "kv-aware") {
    return fail(Errc::kInvalidArgument, "--replicas has no effect: no policy is kv-aware");
  }
  const auto parse = [](std::string_view option, const std::string& text) -> Result<EngineUrl> {
    const bool has_scheme = text.find("://") != std::string::npos;
    auto url = EngineUrl::parse(has_scheme ? text : "http://" + text);
    // A port is not optional here: there is no usual one.
    const std::size_t colon = text.rfind(':');
    const bool has_port = colon != std::string::npos && text.find('/', colon) == std::string::npos;
    if (!url || !has_port || text.starts_with("http:")) {
      return fail(Errc::kInvalidArgument, "{}: \"{}\" is neither HOST:PORT nor dns://NAME:PORT",
                  option, text);
    }
    return url;
  };
  std::vector<EngineUrl> urls;
  for (const std::string& text : replicas) {
    PEGA_TRY_LET(EngineUrl url, parse("--replicas", text));
    urls.push_back(std::move(url));
  }
  if (!peer_secret_file.empty()) return urls;
  const std::string own = replica_listen.substr(0, replica_listen.rfind(':'));
  const bool are_local = is_loopback(own) && std::all_of(urls.begin(), urls.end(), [](auto& url) {
                           return !url.is_name && is_loopback(url.host);
                         });
  if (!are_local) {
    return fail(Errc::kInvalidArgument,
                "--replicas: without a secret anyone could send placements; give all routers the "
                "same --peer-secret-file, or use loopback addresses");
  }
  return urls;
}

Result<EventEndpoints> RouterOptions::event_endpoints(const EngineList& list) const {
  PEGA_TRY_LET(EventEndpoints endpoints, EventEndpoints::parse(kv_events));
  if (endpoints.empty()) return endpoints;
  if (prefill_policy != "kv-aware" && decode_policy != "kv-aware") {
    return fail(Errc::kInvalidArgument, "--kv-events has no effect: no policy is kv-aware");
  }
  const std::vector<std::string> unlisted = endpoints.unlisted(list);
  if (!unlisted.empty() && engines_file.empty()) {
    return fail(Errc::kInvalidArgument,
                "--kv-events: \"{}\" is not the URL of an engine; add it to {}, or correct it",
                unlisted.front(), is_index ? "--engines" : "--decode or --prefill");
  }
  return endpoints;
}

Result<std::optional<cluster::PeerSecrets>> RouterOptions::secrets() const {
  if (peer_secret_file.empty()) return std::nullopt;
  auto read = cluster::PeerSecrets::read(peer_secret_file);
  if (!read) {
    return fail(Errc::kInvalidArgument, "--peer-secret-file {}: {}", peer_secret_file,
                read.error().detail);
  }
  return std::optional(std::move(*read));
}

std::size_t RouterOptions::full_key_bytes() const {
  return servers.empty() || peer_secret_file.empty() ? 0 : prefetch_key_bytes;
}

Result<void> RouterOptions::check_passed() const {
  for (const std::string& path : pass) {
    if (!path.starts_with('/')) {
      return fail(Errc::kInvalidArgument, "--pass: \"{}\" is not a path: it must begin with /",
                  path);
    }
    if (path.find('?') != std::string::npos) {
      return fail(Errc::kInvalidArgument, "--pass: \"{}\" has a query: give the path alone", path);
    }
    if (find_route("GET", path, {}).kind != RouteKind::kDenied) {
      return fail(Errc::kInvalidArgument, "--pass: \"{}\" is a path that the router already serves",
                  path);
    }
  }
  return {};
}

Result<void> RouterOptions::check_cors_origins() const {
  if (cors_origins.size() > 1 &&
      std::find(cors_origins.begin(), cors_origins.end(), "none") != cors_origins.end()) {
    return fail(Errc::kInvalidArgument,
                "--cors-origins: \"none\" cannot be combined with other origins");
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
                  "{} {}: the secret has {} bytes, fewer than {}; make one with "
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
    return fail(Errc::kInvalidArgument,
                "--engine-api-key-file {}: the file must have exactly one line",
                engine_api_key_file);
  }
  return text;
}

}  // namespace pegaflow::router
