#pragma once
/// \file
/// Asks the engines' pegaflow-servers which namespaces their engines have.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "router/routing/namespaces.h"
#include "router/state/shared.h"
#include "router/watch/engine_names.h"

namespace pegaflow::router {

/// Asks the servers of --servers with each --health-interval, and keeps Shared::namespaces up to
/// date. A difference is logged when it comes, changes and goes. Runs until stop(). Thread-bound.
class ServerWatch {
 public:
  /// `shared` outlives it, and the io_context runs until stop() has taken effect.
  ServerWatch(Shared& shared, const std::vector<EngineUrl>& servers);

  boost::asio::awaitable<void> run();
  void stop();

 private:
  struct Server {
    std::shared_ptr<Engine> place;  // Where it listens; it is in no fleet.
    bool is_up = false;
    bool was_asked = false;
    bool is_asked = false;
    std::vector<InstanceNamespace> instances;
  };
  boost::asio::awaitable<void> ask(std::shared_ptr<Server> server);
  void use_servers();
  void compare();

  Shared& shared_;
  boost::asio::steady_timer timer_;
  EngineNames names_;
  std::map<std::string, std::shared_ptr<Server>> servers_;  // By URL.
  std::string last_text_;
  bool stopped_ = false;
};

}  // namespace pegaflow::router
