#pragma once
/// \file
/// What nodes show each other: that they know the secret, and which namespace they mean.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "base/id128.h"
#include "engine/namespace_table.h"

namespace pegaflow {

/// A challenge, a proof or a name: 32 bytes that only their makers can tell apart from chance.
using Bytes32 = std::array<std::byte, 32>;

/// From the kernel's random source.
Bytes32 random_bytes32();

/// What the nodes of one cluster know and others do not.
///
/// It never travels: each side proves with a keyed BLAKE2b over both challenges and both
/// incarnations that it knows it. So a stranger learns nothing, and a proof is good for one
/// connection and one direction. It does not hide or protect what is said afterwards. Immutable.
class PeerSecret {
 public:
  /// That of nodes without a secret: whoever reaches one may enter.
  PeerSecret() = default;
  /// What the file holds, without white space at its end.
  /// Errors: kRefused when it cannot be read, or others than its owner and group may read it;
  /// kInvalidArgument for fewer than 16 bytes or more than 4096.
  static Result<PeerSecret> read(const std::string& path);

  enum class Side : std::uint8_t { kDialer = 1, kAnswerer = 2 };
  /// What was said before a proof.
  struct Greeting {
    Id128 dialer;  ///< Incarnations.
    Id128 answerer;
    Bytes32 dialer_challenge{};
    Bytes32 answerer_challenge{};
  };
  /// The proof of `side`.
  [[nodiscard]] Bytes32 prove(Side side, const Greeting& greeting) const;
  /// Whether `proof` is that of `side`, in the same time whatever it is.
  [[nodiscard]] bool is_proof(Side side, const Greeting& greeting,
                              std::span<const std::byte> proof) const;

 private:
  Bytes32 key_{};
};

/// A namespace by the name that every node gives it: BLAKE2b-256 over its canonical factors and the
/// bytes of its pages, shard by shard. Equal names are equal namespaces, whoever chose the factors.
Bytes32 space_name(std::span<const NamespaceFactor> canonical,
                   std::span<const std::uint64_t> page_bytes);

}  // namespace pegaflow
