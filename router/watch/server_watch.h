#pragma once
/// \file
/// Polls pegaflow-servers for the namespaces of their engines.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "router/routing/namespaces.h"
#include "router/state/shared.h"
#include "router/watch/engine_names.h"

namespace pegaflow::router {

/// Polls the servers of --servers every --health-interval, compares the namespaces that they
/// report, and updates Shared::namespaces. Logs each change of the differences. Thread-bound.
class ServerWatch {
 public:
  /// `shared` outlives the object, and the io_context runs until stop() has taken effect.
  ServerWatch(Shared& shared, const std::vector<EngineUrl>& servers);

  /// Polls until stop(); returns at once without --servers.
  boost::asio::awaitable<void> run();
  void stop();

 private:
  struct Server {
    std::shared_ptr<Engine> place;  ///< The server's address, as an Engine outside the fleet.
    bool is_up = false;
    bool was_asked = false;
    bool is_asked = false;
    std::vector<InstanceNamespace> instances;
  };
  boost::asio::awaitable<void> ask(std::shared_ptr<Server> server);
  void use_servers();
  void compare();
  void pair(std::span<const ServedInstance> instances);

  Shared& shared_;
  boost::asio::steady_timer timer_;
  EngineNames names_;
  std::map<std::string, std::shared_ptr<Server>> servers_;  ///< By URL.
  std::string last_text_;
  std::optional<std::string> last_direct_text_;  ///< Unset: nothing was logged yet.
  bool stopped_ = false;
};

}  // namespace pegaflow::router
