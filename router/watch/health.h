#pragma once
/// \file
/// Polls the health of engines, the names of engines, and files that may change.

#include <cstdint>
#include <memory>
#include <string>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/os/watched_file.h"
#include "router/state/shared.h"
#include "router/watch/engine_names.h"

namespace pegaflow::router {

/// The files that are read again when they change. Construct it before reading the files.
struct RouterFiles {
  explicit RouterFiles(const RouterOptions& options)
      : engines(options.engines_file),
        api_keys(options.api_keys_file),
        engine_key(options.engine_api_key_file),
        salt_key(options.cache_salt_key_file),
        secrets(options.peer_secret_file) {}

  WatchedFile engines;
  WatchedFile api_keys;
  WatchedFile engine_key;
  WatchedFile salt_key;
  WatchedFile secrets;
};

/// Runs until stop(). Thread-bound.
class HealthChecks {
 public:
  /// `shared` outlives the object, and the io_context runs until stop() has taken effect. `list` is
  /// the initial list of engines, as read from `files`.
  HealthChecks(Shared& shared, const EngineList& list, RouterFiles files);

  /// Runs the io_context until every name has been resolved once, at most --health-timeout, so that
  /// the first client finds engines.
  void find_engines();

  boost::asio::awaitable<void> run();
  void stop();

 private:
  boost::asio::awaitable<void> check(std::shared_ptr<Engine> engine);
  void note(Engine& engine, bool is_good, const std::string& why);
  void look_at_files();
  void use_engines();
  /// Tells the policy kv-aware which engines there are.
  void tell_kv();

  Shared& shared_;
  boost::asio::steady_timer timer_;
  RouterFiles files_;
  EngineNames names_;
  bool stopped_ = false;
};

}  // namespace pegaflow::router
