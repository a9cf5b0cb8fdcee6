#include "cluster/peer_proof.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <set>
#include <string_view>
#include <system_error>
#include <vector>

#include <sodium.h>
#include <sys/stat.h>

#include "base/assert.h"
#include "base/hex.h"
#include "base/os/text_file.h"

namespace pegaflow::cluster {
namespace {

constexpr std::size_t kMinSecretBytes = 16;
constexpr std::size_t kMaxSecretBytes = 4096;
constexpr std::size_t kMaxSecrets = 2;
/// 16 random hexadecimal digits have fewer only once in some 100,000 times.
constexpr std::size_t kMinDifferentBytes = 6;

/// BLAKE2b-256, piece by piece. Numbers count as 8 bytes, the least first, and texts come behind
/// their length, so that no two lists have the same digest input.
class Digest {
 public:
  explicit Digest(std::span<const std::byte> key) {
    // Selects CPU instructions once; BLAKE2b itself cannot fail.
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

constexpr std::string_view kSpace = " \t\r\n";

std::string_view without_space_at_end(std::string_view text) {
  const std::size_t last = text.find_last_not_of(kSpace);
  return text.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

/// The secrets of a file, which blank lines separate. A file with other bytes than text is one
/// secret, in which two line ends are as likely as any other pair.
std::vector<std::string_view> parts_of(std::string_view text) {
  const std::string_view whole = without_space_at_end(text);
  const bool is_text = std::all_of(whole.begin(), whole.end(), [](char byte) {
    return kSpace.find(byte) != std::string_view::npos || (byte >= 0x20 && byte < 0x7f);
  });
  if (!is_text) return {whole};
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  std::size_t line = 0;
  while (line <= whole.size()) {
    const std::size_t end = std::min(whole.find('\n', line), whole.size());
    const bool is_blank = without_space_at_end(whole.substr(line, end - line)).empty();
    if (is_blank || end == whole.size()) {
      const std::string_view part =
          without_space_at_end(whole.substr(begin, (is_blank ? line : end) - begin));
      if (!part.empty()) parts.push_back(part);
      begin = end + 1;
    }
    line = end + 1;
  }
  if (parts.empty()) parts.push_back({});
  return parts;
}

constexpr std::string_view kTokenPrefix = "pf1.";

/// Takes as long for a wrong text as for the right one.
bool is_same(std::string_view given, std::string_view wanted) {
  if (given.size() != wanted.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(wanted[i]);
  }
  return difference == 0;
}

}  // namespace

Bytes32 random_bytes32() {
  PEGA_ASSERT(::sodium_init() >= 0, "libsodium does not start");
  Bytes32 bytes;
  ::randombytes_buf(bytes.data(), bytes.size());
  return bytes;
}

PeerSecret::PeerSecret(std::string_view text) {
  Digest digest({});
  digest.add(std::string(text));
  key_ = digest.end();
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

Bytes32 PeerSecret::seal(std::string_view purpose, std::span<const std::byte> message) const {
  Digest digest(key_);
  digest.add(std::string("pegaflow message 1"));
  digest.add(std::string(purpose));
  digest.add(std::uint64_t{message.size()});
  digest.add(message);
  return digest.end();
}

Bytes32 PeerSecret::sign(const HttpRequest& request) const {
  Digest digest(key_);
  digest.add(std::string("pegaflow http 1"));
  digest.add(request.time);
  digest.add(std::string(request.method));
  digest.add(std::string(request.target));
  digest.add(std::string(request.body));
  return digest.end();
}

Bytes32 PeerSecret::derive(std::string_view purpose) const {
  Digest digest(key_);
  digest.add(std::string("pegaflow key 1"));
  digest.add(std::string(purpose));
  return digest.end();
}

Result<PeerSecrets> PeerSecrets::read(const std::string& path) {
  struct stat about {};
  const Result<std::string> text = read_text_file(path);
  if (!text) return fail(Errc::kRefused, "--peer-secret-file {}: {}", path, text.error().detail);
  if (::stat(path.c_str(), &about) != 0) return fail_errno(errno, "--peer-secret-file " + path);
  if ((about.st_mode & S_IRWXO) != 0) {
    return fail(Errc::kRefused, "--peer-secret-file {}: every user may read it; chmod o= {}", path,
                path);
  }
  PeerSecrets secrets;
  secrets.all_.clear();
  secrets.shortest_ = kMaxSecretBytes;
  for (const std::string_view one : parts_of(*text)) {
    if (one.size() < kMinSecretBytes || one.size() > kMaxSecretBytes) {
      return fail(Errc::kInvalidArgument,
                  "--peer-secret-file {}: a secret has {} bytes, {} to {} are allowed", path,
                  one.size(), kMinSecretBytes, kMaxSecretBytes);
    }
    if (std::set<char>(one.begin(), one.end()).size() < kMinDifferentBytes) {
      return fail(Errc::kInvalidArgument,
                  "--peer-secret-file {}: a secret has fewer than {} different bytes and can be "
                  "guessed; make one with `head -c 32 /dev/urandom | base64`",
                  path, kMinDifferentBytes);
    }
    secrets.all_.emplace_back(one);
    secrets.shortest_ = std::min(secrets.shortest_, one.size());
  }
  if (secrets.all_.size() > kMaxSecrets) {
    return fail(Errc::kInvalidArgument, "--peer-secret-file {}: {} secrets, the limit is {}", path,
                secrets.all_.size(), kMaxSecrets);
  }
  return secrets;
}

const PeerSecret* PeerSecrets::find(PeerSecret::Side side, const PeerSecret::Greeting& greeting,
                                    std::span<const std::byte> proof) const {
  const PeerSecret* found = nullptr;
  // All are compared, so that the time does not reveal which one matched.
  for (const PeerSecret& secret : all_) {
    if (secret.is_proof(side, greeting, proof) && found == nullptr) found = &secret;
  }
  return found;
}

bool PeerSecrets::is_seal(std::string_view purpose, std::span<const std::byte> message,
                          std::span<const std::byte> digest) const {
  bool is_good = false;
  for (const PeerSecret& secret : all_) {
    const Bytes32 right = secret.seal(purpose, message);
    const bool is_this = digest.size() == right.size() &&
                         ::sodium_memcmp(digest.data(), right.data(), right.size()) == 0;
    is_good = is_this || is_good;
  }
  return is_good;
}

std::string http_token(const PeerSecret& secret, const PeerSecret::HttpRequest& request) {
  return fmt::format("{}{}.{}", kTokenPrefix, request.time, to_hex(secret.sign(request)));
}

bool is_http_token(const PeerSecrets& secrets, PeerSecret::HttpRequest request,
                   std::string_view token, std::uint64_t now) {
  if (!token.starts_with(kTokenPrefix)) return false;
  const std::string_view number =
      token.substr(kTokenPrefix.size(), token.find('.', kTokenPrefix.size()) - kTokenPrefix.size());
  const auto [end, status] =
      std::from_chars(number.data(), number.data() + number.size(), request.time);
  if (status != std::errc() || end != number.data() + number.size()) return false;
  const std::uint64_t apart = now > request.time ? now - request.time : request.time - now;
  if (apart > static_cast<std::uint64_t>(kHttpTokenTime.count())) return false;
  bool is_good = false;
  for (const PeerSecret& secret : secrets.all()) {
    is_good = is_same(token, http_token(secret, request)) || is_good;
  }
  return is_good;
}

Bytes32 space_name(std::span<const engine::NamespaceFactor> canonical,
                   std::span<const std::uint64_t> page_bytes, std::span<const std::uint64_t> kind) {
  Digest digest({});
  digest.add(std::string("pegaflow space 1"));
  digest.add(std::uint64_t{canonical.size()});
  for (const engine::NamespaceFactor& factor : canonical) {
    digest.add(factor.name);
    digest.add(factor.value);
  }
  digest.add(std::uint64_t{page_bytes.size()});
  for (const std::uint64_t bytes : page_bytes) digest.add(bytes);
  for (const std::uint64_t each : kind) digest.add(each);
  return digest.end();
}

}  // namespace pegaflow::cluster
