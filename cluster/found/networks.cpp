#include "cluster/found/networks.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include <arpa/inet.h>

namespace pegaflow::cluster {
namespace {

using Bytes = std::array<std::uint8_t, 16>;
constexpr unsigned kMappedBits = 96;

struct Address {
  Bytes bytes{};
  bool is_v4 = false;
};

std::optional<Address> address_of(const std::string& text) {
  Address address;
  if (::inet_pton(AF_INET6, text.c_str(), address.bytes.data()) == 1) return address;
  std::array<std::uint8_t, 4> v4{};
  if (::inet_pton(AF_INET, text.c_str(), v4.data()) != 1) return {};
  address.is_v4 = true;
  address.bytes[10] = address.bytes[11] = 0xff;
  std::copy(v4.begin(), v4.end(), address.bytes.begin() + 12);
  return address;
}

bool bit_of(const Bytes& bytes, unsigned place) {
  return (bytes[place / 8] >> (7 - place % 8) & 1) != 0;
}

std::optional<unsigned> number_of(std::string_view text, unsigned most) {
  unsigned number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status != std::errc() || end != text.data() + text.size() || number > most) return {};
  return number;
}

}  // namespace

Result<Networks> Networks::parse(const std::vector<std::string>& texts) {
  Networks networks;
  for (const std::string& text : texts) {
    const std::size_t slash = text.find('/');
    const auto address = address_of(text.substr(0, slash));
    if (!address) {
      return fail(Errc::kInvalidArgument, "--peer-networks: \"{}\" is not ADDRESS/BITS", text);
    }
    const unsigned most = address->is_v4 ? 32 : 128;
    const auto bits = slash == std::string::npos
                          ? most
                          : number_of(std::string_view(text).substr(slash + 1), most);
    if (!bits) {
      return fail(Errc::kInvalidArgument, "--peer-networks: \"{}\": BITS is a number from 0 to {}",
                  text, most);
    }
    Network network{.bytes = address->bytes, .bits = *bits + (address->is_v4 ? kMappedBits : 0)};
    for (unsigned place = network.bits; place < 128; ++place) {
      if (!bit_of(network.bytes, place)) continue;
      return fail(Errc::kInvalidArgument,
                  "--peer-networks: \"{}\" has bits behind the first {}; write the address of the "
                  "network",
                  text, *bits);
    }
    networks.all_.push_back(network);
  }
  return networks;
}

bool Networks::contains(const std::string& address) const {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return false;
  const auto port = number_of(std::string_view(address).substr(colon + 1), 65535);
  std::string host = address.substr(0, colon);
  const bool has_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (has_brackets) host = host.substr(1, host.size() - 2);
  const auto found = address_of(host);
  if (!found || found->is_v4 == has_brackets || !port || *port == 0) return false;
  return std::any_of(all_.begin(), all_.end(), [&](const Network& network) {
    for (unsigned place = 0; place < network.bits; ++place) {
      if (bit_of(network.bytes, place) != bit_of(found->bytes, place)) return false;
    }
    return true;
  });
}

}  // namespace pegaflow::cluster
