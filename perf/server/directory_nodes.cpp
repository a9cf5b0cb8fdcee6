#include "perf/server/directory_nodes.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <utility>

#include <sys/stat.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "perf/lib/wait_until.h"
#include "perf/lib/workload.h"
#include "perf/server/loopback_nodes.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kFirstMissing = std::uint64_t{1} << 40;
constexpr std::string_view kUsable = "pegaflow_directory_usable";
constexpr std::string_view kReady = "pegaflow_directory_server_ready{";

Result<double> sample(const harness::ServerProcess& server, std::string_view name) {
  PEGA_TRY_LET(const harness::ServerProcess::Metrics metrics, server.metrics());
  const auto found = metrics.find(name);
  if (found == metrics.end()) return fail(Errc::kInternal, "the server has no metric {}", name);
  return found->second;
}

/// The servers of the directory that can be asked.
Result<std::size_t> servers_ready_at(const harness::ServerProcess& server) {
  PEGA_TRY_LET(const harness::ServerProcess::Metrics metrics, server.metrics());
  return static_cast<std::size_t>(std::count_if(
      metrics.begin(), metrics.end(),
      [](const auto& metric) { return metric.first.starts_with(kReady) && metric.second == 1; }));
}

}  // namespace

DirectoryNodes::DirectoryNodes(const Options& options)
    : options_(options),
      files_(harness::TemporaryDirectory::create().value()),
      // The servers of Redis have the first ones.
      addresses_(loopback_addresses(options.redis + options.nodes + 2)),
      io_(kj::setupAsyncIo()),
      missing_(~options.seed) {}

Result<std::unique_ptr<DirectoryNodes>> DirectoryNodes::start(const Options& options) {
  std::unique_ptr<DirectoryNodes> made(new DirectoryNodes(options));
  PEGA_TRY(made->start_redis());
  PEGA_TRY(made->start_nodes());
  PEGA_TRY(made->wait_until_used());
  PEGA_TRY(made->wait_until_announced());
  return made;
}

Result<void> DirectoryNodes::start_redis() {
  for (std::size_t i = 0; i < options_.redis; ++i) {
    PEGA_TRY_LET(harness::RedisProcess one,
                 harness::RedisProcess::start({.address = addresses_[i]}));
    redis_.push_back(std::move(one));
  }
  return {};
}

Result<DirectoryNodes::Node> DirectoryNodes::serve(std::vector<std::string> arguments,
                                                   std::uint64_t blocks) {
  // A response on a busy machine is late, not lost.
  arguments.insert(arguments.end(), {"--nics", "none", "--peer-deadline", "10s",
                                     "--peer-secret-file", files_.path() + "/secret"});
  PEGA_TRY_LET(harness::ServerProcess server,
               harness::ServerProcess::start({.program = options_.program,
                                              .pool_size = std::to_string(pool_bytes_for(blocks)),
                                              .arguments = std::move(arguments)}));
  PEGA_TRY_LET(auto client, harness::WireClient::connect(io_, server.socket_path()));
  PEGA_TRY(client->register_worker("perf", kSmallPageBytes, 1024));
  return Node{.server = std::move(server), .client = std::move(client)};
}

Result<void> DirectoryNodes::start_nodes() {
  std::ofstream(files_.path() + "/secret") << "0123456789abcdef0123456789abcdef\n";
  if (::chmod((files_.path() + "/secret").c_str(), 0600) != 0) {
    return fail_errno(errno, "protect the secret of the nodes");
  }
  std::vector<std::string> urls;
  for (const harness::RedisProcess& one : redis_) urls.push_back(one.url());
  const std::string directory = fmt::format("{}", fmt::join(urls, ","));
  const std::vector<std::string> listens(
      addresses_.begin() + static_cast<std::ptrdiff_t>(options_.redis),
      addresses_.begin() + static_cast<std::ptrdiff_t>(options_.redis + options_.nodes));
  for (std::size_t i = 0; i < listens.size(); ++i) {
    PEGA_TRY_LET(Node node, serve({"--directory", directory, "--peer-listen", listens[i],
                                   "--peer-networks", "127.0.0.0/8"},
                                  kDirectoryBlocks));
    std::uint64_t job = 1;
    PEGA_TRY(fill(*node.client, keys_of(i), kDirectoryBlocks, job));
    nodes_.push_back(std::move(node));
  }
  PEGA_TRY_LET(Node listed, serve({"--peers", fmt::format("{}", fmt::join(listens, ","))}, 1));
  for (const std::string& peer : listens) PEGA_TRY(perf::wait_until_ready(listed.server, peer));
  others_.push_back(std::move(listed));
  PEGA_TRY_LET(harness::ServerProcess server,
               harness::ServerProcess::start(
                   {.program = options_.program, .pool_size = std::to_string(pool_bytes_for(1))}));
  PEGA_TRY_LET(auto client, harness::WireClient::connect(io_, server.socket_path()));
  PEGA_TRY(client->register_worker("perf", kSmallPageBytes, 1024));
  others_.push_back({.server = std::move(server), .client = std::move(client)});
  return {};
}

Result<void> DirectoryNodes::wait_until_announced() const {
  return wait_until("all leases are known, and all anchors written", [this]() -> Result<bool> {
    for (const Node& node : nodes_) {
      PEGA_TRY_LET(const double leases, sample(node.server, "pegaflow_directory_nodes"));
      PEGA_TRY_LET(const double anchors, sample(node.server, "pegaflow_directory_anchors"));
      PEGA_TRY_LET(const double pending, sample(node.server, "pegaflow_directory_pending_writes"));
      if (leases != static_cast<double>(nodes_.size()) || anchors == 0 || pending != 0) {
        return false;
      }
    }
    return true;
  });
}

Result<void> DirectoryNodes::wait_until_used() const {
  return wait_until("all nodes use all servers of the directory", [this]() -> Result<bool> {
    for (const Node& node : nodes_) {
      PEGA_TRY_LET(const double usable, sample(node.server, kUsable));
      PEGA_TRY_LET(const std::size_t ready, servers_ready_at(node.server));
      if (usable == 0 || ready != redis_.size()) return false;
    }
    return true;
  });
}

Result<std::int64_t> DirectoryNodes::stored_keys() const {
  std::int64_t sum = 0;
  for (const harness::RedisProcess& one : redis_) {
    PEGA_TRY_LET(const directory::Reply reply, one.call({"DBSIZE"}));
    sum += reply.integer;
  }
  return sum;
}

Result<double> DirectoryNodes::sum(std::string_view metric) const {
  double sum = 0;
  for (const Node& node : nodes_) {
    PEGA_TRY_LET(const double one, sample(node.server, metric));
    sum += one;
  }
  return sum;
}

Result<double> DirectoryNodes::claim_missing(Way way, std::size_t turn) {
  harness::WireClient& client = way == Way::kDirectory ? *nodes_[turn % nodes_.size()].client
                                : way == Way::kListed  ? *others_[0].client
                                                       : *others_[1].client;
  const auto keys = missing_.range(kFirstMissing + next_missing_, options_.keys);
  next_missing_ += options_.keys;
  const Id128 token = Id128::random();
  const auto begin = Clock::now();
  const auto claimed = client.claim(token, keys);
  const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  if (!claimed) return tl::unexpected<Error>(claimed.error());
  if (claimed->blocks + claimed->elsewhere != 0) {
    return fail(Errc::kInternal, "{} missing keys were found", claimed->blocks);
  }
  PEGA_TRY(client.unclaim(token));
  return us;
}

Result<bool> DirectoryNodes::find_elsewhere(std::size_t turn) {
  const std::size_t reader = turn % nodes_.size();
  const std::size_t owner = (reader + 1 + turn / nodes_.size()) % nodes_.size();
  const std::size_t prompts = kDirectoryBlocks / options_.keys;
  const auto keys = keys_of(owner).range(turn % prompts * options_.keys, options_.keys);
  PEGA_TRY_LET(const harness::WireClient::Found found, nodes_[reader].client->lookup(keys));
  return found.blocks + found.elsewhere == options_.keys;
}

}  // namespace pegaflow::perf
