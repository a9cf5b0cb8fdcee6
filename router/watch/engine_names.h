#pragma once
/// \file
/// What names of engines stand for: each address of dns://NAME:PORT is an engine.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "router/routing/fleet.h"

namespace pegaflow::router {

/// Turns a list of engines with names in it into the engines behind them. Thread-bound.
///
/// What a name stood for stays while a question is open and when there is no answer: a name server
/// that is away takes no engine away, health checks do.
class EngineNames {
 public:
  static constexpr std::size_t kAddresses = 1024;  ///< Of one name; the others are left out.

  /// `on_change` is called when names stand for other engines than before; `on_failure` for each
  /// answer that is none, with a sentence that is empty while the name goes on failing.
  EngineNames(boost::asio::io_context& io, std::function<void()> on_change,
              std::function<void(const std::string& sentence)> on_failure);
  ~EngineNames();
  EngineNames(const EngineNames&) = delete;
  EngineNames& operator=(const EngineNames&) = delete;

  /// The engines and names of `list` from now on. Names that stay keep their addresses.
  void set(EngineList list);
  /// Asks for every name about which no question is open. Nothing cuts the system's resolver
  /// short, so run() of the io_context returns only after the answers.
  void ask();
  /// Whether a question is open about a name that has never been answered.
  [[nodiscard]] bool is_searching() const;
  /// The list with engines in place of names, by their addresses; those of IPv6 only where a name
  /// has no other ones, since both are mostly one engine's.
  [[nodiscard]] EngineList engines() const;
  /// Answers that come from now on change nothing.
  void stop();

 private:
  struct Name;
  static boost::asio::awaitable<void> look_up(std::shared_ptr<Name> name);

  boost::asio::io_context& io_;
  std::function<void()> on_change_;
  std::function<void(const std::string&)> on_failure_;
  EngineList list_;
  std::map<std::string, std::shared_ptr<Name>> names_;  // By URL.
};

}  // namespace pegaflow::router
