#pragma once
/// \file
/// The proofs by which nodes authenticate each other, and the names of namespaces among nodes.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/id128.h"
#include "capnp/wire/peer_types.h"
#include "engine/types/namespace_factors.h"

namespace pegaflow::cluster {

/// 32 bytes from the kernel's random source.
Bytes32 random_bytes32();

/// A secret that only the nodes of one cluster have.
///
/// It is never sent: each side proves with a keyed BLAKE2b over both challenges and both
/// incarnations that it has the secret. So an observer learns nothing, and a proof is valid for one
/// connection and one direction. Later messages are neither encrypted nor authenticated. Immutable.
class PeerSecret {
 public:
  /// The secret of nodes without a secret file, which admit every host that reaches them.
  PeerSecret() = default;
  explicit PeerSecret(std::string_view text);

  enum class Side : std::uint8_t { kDialer = 1, kAnswerer = 2 };
  /// The messages that a proof covers.
  struct Greeting {
    Id128 dialer;  ///< Incarnations.
    Id128 answerer;
    Bytes32 dialer_challenge{};
    Bytes32 answerer_challenge{};
  };
  /// The proof of `side`.
  [[nodiscard]] Bytes32 prove(Side side, const Greeting& greeting) const;
  /// Whether `proof` is that of `side`, in constant time.
  [[nodiscard]] bool is_proof(Side side, const Greeting& greeting,
                              std::span<const std::byte> proof) const;

  /// A request over HTTP, as its token covers it.
  struct HttpRequest {
    std::uint64_t time = 0;  ///< Seconds since 1970.
    std::string_view method;
    std::string_view target;  ///< Path and query.
    std::string_view body;
  };
  /// The digest of a message that is authenticated as a whole. `purpose` separates the kinds of
  /// messages: none can be passed off as one of another kind.
  [[nodiscard]] Bytes32 seal(std::string_view purpose, std::span<const std::byte> message) const;
  /// The digest in the token of that request; see http_token().
  [[nodiscard]] Bytes32 sign(const HttpRequest& request) const;

  /// A key of its own for another use of the secret.
  [[nodiscard]] Bytes32 derive(std::string_view purpose) const;

  bool operator==(const PeerSecret&) const = default;

 private:
  Bytes32 key_{};
};

/// The content of --peer-secret-file: one secret, or two while one replaces the other.
///
/// A node accepts either. It proves itself with the first as answerer, and as dialer with the one
/// that the answerer has proved. docs/nodes.md has the order of a rotation. A value.
class PeerSecrets {
 public:
  /// The secrets of nodes without a secret file.
  PeerSecrets() : all_(1) {}
  /// White space at the end of a secret is ignored. In a text file a blank line separates two
  /// secrets, of several lines each if need be; a file with other bytes than text is one secret.
  /// Errors: kRefused when the file cannot be read, or others than its owner and group may read it;
  /// kInvalidArgument for a secret of fewer than 16 bytes or more than 4096, with fewer than 6
  /// different bytes, and for more than two.
  static Result<PeerSecrets> read(const std::string& path);

  [[nodiscard]] const PeerSecret& first() const noexcept { return all_.front(); }
  [[nodiscard]] std::span<const PeerSecret> all() const noexcept { return all_; }
  [[nodiscard]] std::size_t count() const noexcept { return all_.size(); }
  /// Bytes of the shortest secret; 0 without a file.
  [[nodiscard]] std::size_t shortest() const noexcept { return shortest_; }
  /// The secret that `proof` of `side` was made with; nullptr: none of them.
  [[nodiscard]] const PeerSecret* find(PeerSecret::Side side, const PeerSecret::Greeting& greeting,
                                       std::span<const std::byte> proof) const;
  /// Whether `digest` is PeerSecret::seal() of one of the secrets. Takes as long for a wrong digest
  /// as for the right one.
  [[nodiscard]] bool is_seal(std::string_view purpose, std::span<const std::byte> message,
                             std::span<const std::byte> digest) const;
  bool operator==(const PeerSecrets&) const = default;

 private:
  std::vector<PeerSecret> all_;  ///< One or two.
  std::size_t shortest_ = 0;
};

/// The greatest difference between the clocks of a router and a server that tokens allow. A token
/// that was observed can repeat its request for as long; it fits no other request.
inline constexpr std::chrono::seconds kHttpTokenTime{120};

/// "pf1.TIME.DIGEST", for the header `Authorization: Bearer ...`: the time in seconds since 1970
/// and 64 hexadecimal digits of PeerSecret::sign(). docs/nodes.md has the format for other
/// programs.
std::string http_token(const PeerSecret& secret, const PeerSecret::HttpRequest& request);

/// Whether `token` is one that a holder of one of the secrets made for this request at most
/// kHttpTokenTime before or after `now`, in seconds since 1970. `request.time` is not used. Takes
/// as long for a wrong digest as for the right one.
bool is_http_token(const PeerSecrets& secrets, PeerSecret::HttpRequest request,
                   std::string_view token, std::uint64_t now);

/// The name of a namespace among nodes: BLAKE2b-256 over its canonical factors and the bytes of its
/// pages, shard by shard. Equal names are equal namespaces. A namespace that registered its kinds
/// of blocks has a name for each: `kind` has its number and the rules of all of them. It is empty
/// for one that registered none.
Bytes32 space_name(std::span<const engine::NamespaceFactor> canonical,
                   std::span<const std::uint64_t> page_bytes,
                   std::span<const std::uint64_t> kind = {});

}  // namespace pegaflow::cluster
