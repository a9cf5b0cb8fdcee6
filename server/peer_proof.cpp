#include "server/peer_proof.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include <sodium.h>
#include <sys/stat.h>

#include "base/assert.h"

namespace pegaflow {
namespace {

constexpr std::size_t kMinSecretBytes = 16;
constexpr std::size_t kMaxSecretBytes = 4096;

/// BLAKE2b-256, piece by piece. Numbers count as 8 bytes, the least first, and texts come behind
/// their length, so that no two lists look the same.
class Digest {
 public:
  explicit Digest(std::span<const std::byte> key) {
    // Chooses instructions, once; BLAKE2b has nothing that could fail.
    PEGA_ASSERT(::sodium_init() >= 0, "libsodium does not start");
    ::crypto_generichash_init(&state_, key.empty() ? nullptr : bytes_of(key), key.size(),
                              std::tuple_size_v<Bytes32>);
  }

  void add(std::span<const std::byte> bytes) {
    ::crypto_generichash_update(&state_, bytes_of(bytes), bytes.size());
  }
  void add(std::uint64_t number) {
    std::array<std::byte, sizeof number> bytes;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(number >> (8 * i));
    }
    add(std::span<const std::byte>(bytes));
  }
  void add(const Id128& id) {
    add(id.high);
    add(id.low);
  }
  void add(const std::string& text) {
    add(std::uint64_t{text.size()});
    add(std::as_bytes(std::span(text)));
  }

  Bytes32 end() {
    Bytes32 result;
    ::crypto_generichash_final(&state_, reinterpret_cast<unsigned char*>(result.data()),
                               result.size());
    return result;
  }

 private:
  static const unsigned char* bytes_of(std::span<const std::byte> bytes) {
    return reinterpret_cast<const unsigned char*>(bytes.data());
  }

  crypto_generichash_state state_{};
};

}  // namespace

Bytes32 random_bytes32() {
  PEGA_ASSERT(::sodium_init() >= 0, "libsodium does not start");
  Bytes32 bytes;
  ::randombytes_buf(bytes.data(), bytes.size());
  return bytes;
}

Result<PeerSecret> PeerSecret::read(const std::string& path) {
  struct stat about {};
  std::ifstream file(path, std::ios::binary);
  if (!file || ::stat(path.c_str(), &about) != 0) {
    return fail(Errc::kRefused, "--peer-secret-file {}: cannot be read: {}", path,
                std::strerror(errno));
  }
  if ((about.st_mode & S_IRWXO) != 0) {
    return fail(Errc::kRefused, "--peer-secret-file {}: every user may read it; chmod o= {}", path,
                path);
  }
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::size_t last = text.find_last_not_of(" \t\r\n");
  text.resize(last == std::string::npos ? 0 : last + 1);
  if (text.size() < kMinSecretBytes || text.size() > kMaxSecretBytes) {
    return fail(Errc::kInvalidArgument, "--peer-secret-file {}: {} bytes, {} to {} are right", path,
                text.size(), kMinSecretBytes, kMaxSecretBytes);
  }
  Digest digest({});
  digest.add(text);
  PeerSecret secret;
  secret.key_ = digest.end();
  return secret;
}

Bytes32 PeerSecret::prove(Side side, const Greeting& greeting) const {
  Digest digest(key_);
  digest.add(std::string("pegaflow peer 1"));
  digest.add(static_cast<std::uint64_t>(side));
  digest.add(greeting.dialer);
  digest.add(greeting.answerer);
  digest.add(greeting.dialer_challenge);
  digest.add(greeting.answerer_challenge);
  return digest.end();
}

bool PeerSecret::is_proof(Side side, const Greeting& greeting,
                          std::span<const std::byte> proof) const {
  const Bytes32 right = prove(side, greeting);
  return proof.size() == right.size() &&
         ::sodium_memcmp(proof.data(), right.data(), right.size()) == 0;
}

Bytes32 space_name(std::span<const NamespaceFactor> canonical,
                   std::span<const std::uint64_t> page_bytes) {
  Digest digest({});
  digest.add(std::string("pegaflow space 1"));
  digest.add(std::uint64_t{canonical.size()});
  for (const NamespaceFactor& factor : canonical) {
    digest.add(factor.name);
    digest.add(factor.value);
  }
  digest.add(std::uint64_t{page_bytes.size()});
  for (const std::uint64_t bytes : page_bytes) digest.add(bytes);
  return digest.end();
}

}  // namespace pegaflow
