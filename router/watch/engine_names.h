#pragma once
/// \file
/// Resolves names of engines: each address of dns://NAME:PORT is one engine.

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

/// Replaces the names in a list of engines by the engines that they resolve to. Thread-bound.
///
/// The former addresses of a name stay valid during a lookup and after a failed one: an unreachable
/// name server removes no engine, but failed health checks do.
class EngineNames {
 public:
  static constexpr std::size_t kAddresses =
      1024;  ///< Limit per name; further addresses are left out.

  /// `on_change` is called when a name resolves to other addresses than before; `on_failure` for
  /// each failed lookup, with a sentence that is empty if the previous lookup failed as well.
  EngineNames(boost::asio::io_context& io, std::function<void()> on_change,
              std::function<void(const std::string& sentence)> on_failure);
  ~EngineNames();
  EngineNames(const EngineNames&) = delete;
  EngineNames& operator=(const EngineNames&) = delete;

  /// Replaces the list. Names that stay keep their addresses.
  void set(EngineList list);
  /// Begins a lookup of every name without a pending one. The system's resolver cannot be
  /// interrupted, so run() of the io_context returns only after the lookups.
  void ask();
  /// Whether the first lookup of any name is pending.
  [[nodiscard]] bool is_searching() const;
  /// The list with the names replaced by their addresses; IPv6 addresses only where a name has no
  /// others, because both usually belong to one engine.
  [[nodiscard]] EngineList engines() const;
  /// Ignores the results of pending lookups.
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
