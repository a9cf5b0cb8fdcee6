// The options of pegaflow-index.
#include <string_view>

#include "router/config/options.h"
#include "router/config/text_options.h"

namespace pegaflow::router {

using std::chrono::milliseconds;
using std::chrono::minutes;

namespace {

/// Whether `listen` is an address of this host alone.
bool is_loopback(std::string_view listen) {
  return listen.starts_with("127.") || listen.starts_with("localhost:") ||
         listen.starts_with("[::1]:");
}

}  // namespace

void RouterOptions::declare_index(OptionTable& table) {
  is_index = true;
  listen = "127.0.0.1:8090";
  render_timeout = milliseconds(200);
  table.list("engines", decode,
             "The engines, each as http://HOST:PORT, or as dns://NAME:PORT for all addresses of a "
             "name, which the program resolves with each health check.");
  table.text("engines-file", engines_file,
             "A file with lines `prefill URL` and `decode URL`, as for pegaflow-router, instead of "
             "--engines. It is read again when it changes.");
  table.list("servers", servers,
             "The --http-addr of the engines' pegaflow-servers, as http://HOST:PORT or "
             "dns://NAME:PORT, whose pools count with --peer-secret-file.");
  table.list("engine-servers", engine_servers,
             "The server of an engine, as ENGINE=SERVER with the URLs of --engines and of "
             "--servers; by default an engine belongs to the only server on its host.");
  table.text("peer-secret-file", peer_secret_file,
             "The file with the secret that servers and routers share. With it the pools of "
             "--servers count, and a token made with it gives access. It is read again when it "
             "changes.");
  table.text("listen", listen,
             "The HOST:PORT for clients; with port 0 the kernel selects a free port, which is "
             "logged. Another address than this host's own needs --api-keys-file or "
             "--peer-secret-file, because scores tell what others have asked.");
  table.flag("reuse-port", reuse_port,
             "Allows several processes to listen at the same --listen (SO_REUSEPORT).");
  table.text("ready-file", ready_file,
             "A file that the program writes as soon as clients can connect: JSON with listen and "
             "pid.");
  table.text("api-keys-file", api_keys_file,
             "A file with lines `NAME KEY [REQUESTS_PER_SECOND]`. With it each request for scores "
             "needs one of the keys, as a bearer token or x-api-key, or a token made with "
             "--peer-secret-file. It is read again when it changes.");
  table.integer("rate-limit", rate_limit, 0, 1'000'000,
                "The requests per second of each API key without a rate in the file; 0 is "
                "unlimited.");
  table.text("engine-api-key-file", engine_api_key_file,
             "A file with the key that engines and the servers of --render require (vllm serve "
             "--api-key). It is read again when it changes.");
  table.integer("index-blocks", index_blocks, 1024, std::int64_t{1} << 28,
                "The maximum number of blocks in the index, about 20 bytes each, allocated as it "
                "fills; beyond it blocks are forgotten.");
  table.bytes("text-index-bytes", text_index_bytes, 1 << 16, std::uint64_t{1} << 40,
              "The maximum memory for texts whose blocks are known, about 0.7 bytes for each byte "
              "of a text.");
  declare_text_options({.hash_seeds = hash_seeds,
                        .render = render,
                        .render_timeout = render_timeout,
                        .render_inflight = render_inflight},
                       table);
  table.duration("event-sources-interval", event_sources_interval, milliseconds(10), minutes(60),
                 "The time between two requests for the addresses of an engine's KV events.");
  declare_event_option(kv_events, table);
  table.duration("engine-load-interval", engine_load_interval, Duration::zero(), minutes(60),
                 "The time between two GET /metrics to each engine, by which the policy kv-aware "
                 "learns of requests that no router has placed and of full KV memory. 0s: never.");
  table.duration("health-interval", health_interval, milliseconds(10), minutes(10),
                 "The time between two GET /health to each engine.");
  table.duration("health-timeout", health_timeout, milliseconds(10), minutes(1),
                 "The time limit for an engine's answer to such a request.");
  table.integer("health-failures", health_failures, 1, 100,
                "The number of failed checks in a row after which an engine is down.");
  table.duration("models-interval", models_interval, milliseconds(10), minutes(60),
                 "The time between two GET /v1/models to each engine.");
  table.integer("max-connections", max_connections, 1, 1'000'000,
                "The maximum number of open client connections; further connections receive 503.");
  table.bytes("max-body-bytes", max_body_bytes, 1024, std::uint64_t{1} << 30,
              "The maximum size of a request's body, beyond which the client receives 413.");
  table.bytes("body-memory", body_memory_bytes, 1 << 20, std::uint64_t{1} << 40,
              "The maximum size of all request bodies together; beyond it clients receive 503.");
  table.duration("client-timeout", client_timeout, milliseconds(1), minutes(60),
                 "The time limit for a client to send the head of its request, between two pieces "
                 "of its body, and between two requests.");
  table.duration("shutdown-timeout", shutdown_timeout, Duration::zero(), minutes(60),
                 "The maximum time after SIGTERM for requests in flight.");
  table.flag("access-log", access_log, "Logs a line of key=value fields for each request.");
  table.text("log-level", log_level,
             "The lowest level that is logged: trace, debug, info, warn, error or off.");
}

Result<void> RouterOptions::check_index() const {
  if (!is_index || is_loopback(listen) || !api_keys_file.empty() || !peer_secret_file.empty()) {
    return {};
  }
  return fail(Errc::kInvalidArgument,
              "--listen {}: scores tell what others have asked, so an address that other hosts "
              "reach needs --api-keys-file or --peer-secret-file",
              listen);
}

Result<std::vector<EngineUrl>> RouterOptions::render_urls() const {
  std::vector<EngineUrl> urls;
  for (const std::string& text : render) {
    auto url = EngineUrl::parse(text);
    if (url && url->is_name) url = fail(Errc::kInvalidArgument, "\"{}\" is not http://", text);
    if (!url) return fail(Errc::kInvalidArgument, "--render: {}", url.error().detail);
    urls.push_back(std::move(*url));
  }
  return urls;
}

}  // namespace pegaflow::router
