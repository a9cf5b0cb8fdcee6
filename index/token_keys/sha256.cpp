#include "index/token_keys/sha256.h"

// The functions that replace these allocate for each hash, and take 20 % longer.
// OpenSSL's name. NOLINTNEXTLINE(readability-identifier-naming)
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

namespace pegaflow::index {

std::array<std::byte, 32> sha256(std::span<const std::uint8_t> bytes) {
  std::array<std::byte, 32> digest;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, bytes.data(), bytes.size());
  SHA256_Final(reinterpret_cast<unsigned char*>(digest.data()), &context);
  return digest;
}

}  // namespace pegaflow::index
