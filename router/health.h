#pragma once
/// \file
/// Asks engines how they are, and the file of engines whether it changed.

#include <cstdint>
#include <memory>
#include <string>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include "router/shared.h"

namespace pegaflow {

/// Runs until stop(). Thread-bound.
class HealthChecks {
 public:
  /// `shared` outlives it, and the io_context runs until stop() has taken effect.
  explicit HealthChecks(Shared& shared);

  boost::asio::awaitable<void> run();
  void stop();

 private:
  boost::asio::awaitable<void> check(std::shared_ptr<Engine> engine);
  void note(Engine& engine, bool is_good, const std::string& why);
  void look_at_file();

  Shared& shared_;
  boost::asio::steady_timer timer_;
  std::string file_stamp_;  // Changes when the file does.
  bool stopped_ = false;
};

}  // namespace pegaflow
