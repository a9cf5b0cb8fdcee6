#include "transport/ucx/wire.h"

#include <cstring>

#include "transport/checksum.h"

namespace pegaflow::ucx {
namespace {

class Writer {
 public:
  template <typename T>
  void number(T value) {
    const auto* const begin = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), begin, begin + sizeof value);
  }
  void bytes(std::span<const std::byte> bytes) {
    number(static_cast<std::uint32_t>(bytes.size()));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> sealed() && {
    number(PageChecksum::of(bytes_));
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  Result<void> check_seal() {
    if (rest_.size() < sizeof(std::uint64_t)) return too_short();
    const auto body = rest_.first(rest_.size() - sizeof(std::uint64_t));
    std::uint64_t sum = 0;
    std::memcpy(&sum, rest_.data() + body.size(), sizeof sum);
    if (sum != PageChecksum::of(body)) {
      return fail(Errc::kInvalidArgument, "a peer's description is damaged");
    }
    rest_ = body;
    return {};
  }
  template <typename T>
  Result<T> number() {
    if (rest_.size() < sizeof(T)) return too_short();
    T value{};
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_ = rest_.subspan(sizeof value);
    return value;
  }
  Result<std::vector<std::byte>> bytes() {
    PEGA_TRY_LET(const auto size, number<std::uint32_t>());
    if (size == 0 || size > kMostPackedBytes || size > rest_.size()) return too_short();
    std::vector<std::byte> taken(rest_.begin(), rest_.begin() + size);
    rest_ = rest_.subspan(size);
    return taken;
  }
  Result<std::uint32_t> rails() {
    PEGA_TRY_LET(const auto count, number<std::uint32_t>());
    if (count >= 1 && count <= kMostRails) return count;
    return fail(Errc::kInvalidArgument, "a peer's description has {} rails, outside of 1 to {}",
                count, kMostRails);
  }
  Result<void> end() const {
    if (rest_.empty()) return {};
    return fail(Errc::kInvalidArgument, "a peer's description has {} bytes too many", rest_.size());
  }

 private:
  static tl::unexpected<Error> too_short() {
    return fail(Errc::kInvalidArgument, "a peer's description is too short");
  }
  std::span<const std::byte> rest_;
};

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// XXH3 of the message and the address behind it.
std::uint64_t hello_checksum(const Message& hello, std::span<const std::byte> address) {
  std::vector<std::byte> bytes(sizeof hello + address.size());
  std::memcpy(bytes.data(), &hello, sizeof hello);
  std::memcpy(bytes.data() + sizeof hello, address.data(), address.size());
  return PageChecksum::of(bytes);
}

}  // namespace

std::vector<std::byte> seal_hello(const Message& hello, std::span<const std::byte> address) {
  std::vector<std::byte> sealed(address.begin(), address.end());
  const std::uint64_t sum = hello_checksum(hello, address);
  const auto* const begin = reinterpret_cast<const std::byte*>(&sum);
  sealed.insert(sealed.end(), begin, begin + sizeof sum);
  return sealed;
}

Result<std::span<const std::byte>> open_hello(const Message& hello, std::span<const std::byte> rest,
                                              const Id128& self) {
  if (hello.incarnation != self) {
    return fail(Errc::kGone, "a reader's hello is for another incarnation");
  }
  std::uint64_t sum = 0;
  if (rest.size() < kLeastAddressBytes + sizeof sum ||
      rest.size() > kMostPackedBytes + sizeof sum) {
    return fail(Errc::kInvalidArgument, "a reader's hello has {} bytes of address", rest.size());
  }
  const auto address = rest.first(rest.size() - sizeof sum);
  std::memcpy(&sum, rest.data() + address.size(), sizeof sum);
  if (sum != hello_checksum(hello, address)) {
    return fail(Errc::kInvalidArgument, "a reader's hello is damaged");
  }
  return address;
}

std::vector<std::byte> pack(const FabricAddress& address) {
  Writer writer;
  writer.number(kProtocol);
  writer.number(static_cast<std::uint32_t>(address.ucx_version));
  writer.number(static_cast<std::uint32_t>(address.rails.size()));
  for (const RailAddress& rail : address.rails) {
    writer.bytes(bytes_of(rail.device));
    writer.bytes(rail.address);
  }
  return std::move(writer).sealed();
}

std::vector<std::byte> pack(const RegionKey& key) {
  Writer writer;
  writer.number(key.base);
  writer.number(static_cast<std::uint32_t>(key.rail_keys.size()));
  for (const auto& rail_key : key.rail_keys) writer.bytes(rail_key);
  return std::move(writer).sealed();
}

Result<FabricAddress> unpack_address(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  PEGA_TRY(reader.check_seal());
  PEGA_TRY_LET(const auto protocol, reader.number<std::uint32_t>());
  if (protocol != kProtocol) {
    return fail(Errc::kRefused, "the peer's lane has protocol version {}, this node's {}", protocol,
                kProtocol);
  }
  FabricAddress address;
  PEGA_TRY_LET(address.ucx_version, reader.number<std::uint32_t>());
  PEGA_TRY_LET(const std::uint32_t rails, reader.rails());
  for (std::uint32_t i = 0; i < rails; ++i) {
    RailAddress rail;
    PEGA_TRY_LET(const auto name, reader.bytes());
    rail.device.assign(reinterpret_cast<const char*>(name.data()), name.size());
    PEGA_TRY_LET(rail.address, reader.bytes());
    address.rails.push_back(std::move(rail));
  }
  PEGA_TRY(reader.end());
  return address;
}

Result<RegionKey> unpack_key(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  PEGA_TRY(reader.check_seal());
  RegionKey key;
  PEGA_TRY_LET(key.base, reader.number<std::uint64_t>());
  PEGA_TRY_LET(const std::uint32_t rails, reader.rails());
  for (std::uint32_t i = 0; i < rails; ++i) {
    PEGA_TRY_LET(auto rail_key, reader.bytes());
    key.rail_keys.push_back(std::move(rail_key));
  }
  PEGA_TRY(reader.end());
  return key;
}

}  // namespace pegaflow::ucx
