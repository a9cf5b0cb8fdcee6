#pragma once
/// \file
/// The formats between two fabrics over UCX: descriptions, and the messages beside the GETs.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/id128.h"

namespace pegaflow::ucx {

/// The version of the messages below; other versions are rejected.
inline constexpr std::uint32_t kProtocol = 1;
inline constexpr std::size_t kMostRails = 64;
/// The largest packed address of a worker or key of a region.
inline constexpr std::size_t kMostPackedBytes = 16384;
/// An address begins with the worker's identity; one byte more is the minimum.
inline constexpr std::size_t kLeastAddressBytes = 9;

/// The address of one rail of a fabric.
struct RailAddress {
  std::string device;              ///< "mlx5_0:1": rails with the same name are paired first.
  std::vector<std::byte> address;  ///< The serving worker's, packed by UCX.
};

/// The content of FabricDescriptor::address for this backend.
struct FabricAddress {
  unsigned ucx_version = 0;  ///< 1022 is 1.22.
  std::vector<RailAddress> rails;
};

/// The content of RegionDescriptor::key for this backend: the owner's address of the region, and
/// UCX's key per rail.
struct RegionKey {
  std::uint64_t base = 0;
  std::vector<std::vector<std::byte>> rail_keys;
};

/// Both add a checksum, since UCX trusts what it unpacks.
std::vector<std::byte> pack(const FabricAddress& address);
std::vector<std::byte> pack(const RegionKey& key);
/// Errors: kInvalidArgument when the bytes are invalid.
Result<FabricAddress> unpack_address(std::span<const std::byte> bytes);
Result<RegionKey> unpack_key(std::span<const std::byte> bytes);

/// One active message. Both ends have the same byte order, which UCX's GET requires anyway.
struct Message {
  enum class Kind : std::uint32_t {
    kHello = 1,     ///< Reader: the expected incarnation, and what seal_hello() returns.
    kWelcome,       ///< Holder: the verdict.
    kLeaseRequest,  ///< Reader: requests a lease for a region.
    kLease,         ///< Holder: `value` ns from the request on; 0: none.
    kRevoke,        ///< Holder: no further GET in this region; confirm when the last has ended.
    kRevoked,       ///< Reader: confirms revocation `value`.
  };
  enum class Verdict : std::uint32_t { kWelcome, kGone, kRefused };

  std::uint32_t protocol = kProtocol;
  Kind kind{};
  std::uint64_t to = 0;    ///< The receiver's number of the path; 0 in kHello.
  std::uint64_t from = 0;  ///< In kHello and kWelcome, the sender's number of the path.
  Id128 incarnation{};     ///< In kHello, the expected one.
  std::uint32_t region = 0;
  Verdict verdict{};
  std::int64_t value = 0;
};
static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) == 56);

/// Returns the payload of kHello: the address of the reader's worker and a checksum of the message
/// and the address. A holder of an earlier version ignores the checksum, as UCX knows where an
/// address ends.
std::vector<std::byte> seal_hello(const Message& hello, std::span<const std::byte> address);
/// Returns the address in the payload `rest` of a hello to `self`; UCX may unpack it.
/// Errors: kInvalidArgument when it is too short, too long or damaged; kGone when it is for another
/// incarnation: only a reader with our description knows ours.
Result<std::span<const std::byte>> open_hello(const Message& hello, std::span<const std::byte> rest,
                                              const Id128& self);

}  // namespace pegaflow::ucx
