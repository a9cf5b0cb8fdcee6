#pragma once
/// \file
/// What two fabrics over UCX say to each other: descriptions, and the few words around the GETs.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/id128.h"

namespace pegaflow::ucx {

/// Of the words below; another one is refused.
inline constexpr std::uint32_t kProtocol = 1;
inline constexpr std::size_t kMostRails = 64;
/// Of a worker or of a region, as UCX packs it.
inline constexpr std::size_t kMostPackedBytes = 16384;
/// The identity of a worker, with which each address begins, and one byte more.
inline constexpr std::size_t kLeastAddressBytes = 9;

/// Where one rail of a fabric is reached.
struct RailAddress {
  std::string device;              ///< "mlx5_0:1": rails of one name are paired first.
  std::vector<std::byte> address;  ///< Of the worker that serves, in UCX's words.
};

/// FabricDescriptor::address of this backend.
struct FabricAddress {
  unsigned ucx_version = 0;  ///< 1022 is 1.22.
  std::vector<RailAddress> rails;
};

/// RegionDescriptor::key of this backend: where the owner has it, and UCX's key by rail.
struct RegionKey {
  std::uint64_t base = 0;
  std::vector<std::vector<std::byte>> rail_keys;
};

/// Each carries a checksum: UCX believes what it unpacks.
std::vector<std::byte> pack(const FabricAddress& address);
std::vector<std::byte> pack(const RegionKey& key);
/// Errors: kInvalidArgument when the bytes make no sense.
Result<FabricAddress> unpack_address(std::span<const std::byte> bytes);
Result<RegionKey> unpack_key(std::span<const std::byte> bytes);

/// One active message. Both ends are of the same byte order: UCX's GET needs that anyway.
struct Message {
  enum class Kind : std::uint32_t {
    kHello = 1,     ///< Reader: who it wants; what seal_hello() returns follows.
    kWelcome,       ///< Holder: what it thinks of that.
    kLeaseRequest,  ///< Reader: until when may this region be read?
    kLease,         ///< Holder: for `value` ns from the question on; 0: not.
    kRevoke,        ///< Holder: no further GET in this region; say when the last one is through.
    kRevoked,       ///< Reader: it is, for revocation `value`.
  };
  enum class Verdict : std::uint32_t { kWelcome, kGone, kRefused };

  std::uint32_t protocol = kProtocol;
  Kind kind{};
  std::uint64_t to = 0;    ///< The link's number at whom it is for; 0 in kHello.
  std::uint64_t from = 0;  ///< In kHello and kWelcome, the link's number at whom it is from.
  Id128 incarnation{};     ///< In kHello, whom it wants.
  std::uint32_t region = 0;
  Verdict verdict{};
  std::int64_t value = 0;
};
static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) == 56);

/// Follows kHello: the address of the reader's worker and a checksum of the message and the
/// address. The holder of an earlier version ignores the checksum, as UCX knows where an address
/// ends.
std::vector<std::byte> seal_hello(const Message& hello, std::span<const std::byte> address);
/// The address in `rest` of a hello to `self`, which UCX may unpack.
/// Errors: kInvalidArgument when it is too short, too long or damaged; kGone when it is for another
/// incarnation: only a reader that was let in knows ours.
Result<std::span<const std::byte>> open_hello(const Message& hello, std::span<const std::byte> rest,
                                              const Id128& self);

}  // namespace pegaflow::ucx
