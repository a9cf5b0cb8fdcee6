#pragma once
/// \file
/// The networks in which a node may be dialed that another node named.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace pegaflow::cluster {

/// A list of networks, IPv4 and IPv6. Immutable.
class Networks {
 public:
  Networks() = default;
  /// Each is ADDRESS/BITS, or an address alone. Errors: kInvalidArgument for another text, and for
  /// an address with bits behind the network's.
  static Result<Networks> parse(const std::vector<std::string>& texts);

  [[nodiscard]] bool is_empty() const noexcept { return all_.empty(); }
  /// Whether `address` is IP:PORT, or [IP]:PORT, with an IP in one of the networks. False for
  /// names.
  [[nodiscard]] bool contains(const std::string& address) const;

 private:
  /// IPv4 is mapped into IPv6.
  using Bytes = std::array<std::uint8_t, 16>;
  struct Network {
    Bytes bytes{};
    unsigned bits = 0;
  };
  std::vector<Network> all_;
};

}  // namespace pegaflow::cluster
