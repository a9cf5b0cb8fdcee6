#pragma once
/// \file
/// Reads the pools' journals and links from pegaflow-servers.

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "router/state/shared.h"
#include "router/upstream/upstream.h"
#include "router/watch/engine_names.h"

namespace pegaflow::router {

/// Asks each server of --servers for its links every --health-interval, and follows the journal of
/// each of its pools. Thread-bound.
class PoolWatch {
 public:
  /// `shared` outlives the object, and the io_context runs until stop() has taken effect. It uses
  /// Shared::kv and Shared::secrets, which are set.
  PoolWatch(Shared& shared, const std::vector<EngineUrl>& servers);

  boost::asio::awaitable<void> run();
  void stop();

 private:
  using Place = std::shared_ptr<Engine>;  ///< A server's address, as an Engine outside the fleet.

  void use_servers();
  boost::asio::awaitable<void> ask_links(Place place);
  /// Follows one pool until it is dropped.
  boost::asio::awaitable<void> follow(Place place, std::string space);
  boost::asio::awaitable<Result<ShortResponse>> get(Place place, std::string target,
                                                    Duration timeout, std::size_t limit);
  [[nodiscard]] std::string request_for(const Engine& place, std::string_view target) const;

  Shared& shared_;
  boost::asio::steady_timer timer_;
  EngineNames names_;
  std::map<std::string, Place> places_;                      // By URL.
  std::set<std::pair<std::string, std::string>> following_;  // URLs and namespaces.
  std::set<std::string> asking_;
  std::set<boost::asio::steady_timer*> pauses_;  // Of follow(), after failures.
  bool stopped_ = false;
};

}  // namespace pegaflow::router
