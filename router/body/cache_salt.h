#pragma once
/// \file
/// The `cache_salt` that separates the cached prompts of tenants.

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "router/http/json_text.h"

namespace pegaflow::router {

/// Derives salts from one key. Immutable. Routers with the same key derive the same salts.
class CacheSalts {
 public:
  /// The minimum length of a secret.
  static constexpr std::size_t kMinSecretBytes = 16;

  /// An empty `secret` selects a public key: salts then still separate tenants, but anyone who
  /// knows a tenant's name can compute its salt.
  explicit CacheSalts(std::string_view secret);

  /// A keyed hash (BLAKE2b) of the tenant and of the salt that its client sent (empty: none), as
  /// 64 hexadecimal digits. vLLM accepts up to 128 characters, and no '/', '\\' or '@'.
  [[nodiscard]] std::string salt(std::string_view tenant, std::string_view clients_salt) const;

 private:
  std::array<unsigned char, 32> key_{};
};

/// A tenant whose request is salted. Both members outlive the call that receives them.
struct Tenant {
  const CacheSalts& salts;
  std::string_view name;
};

/// Adds the tenant's `cache_salt` to a JSON object: in place of the client's salt, which is mixed
/// into it, or as the first member. `members` are the members of `body`, before and after.
/// Errors: kInvalidArgument when the client's salt is neither null nor a non-empty string, as in
/// vLLM.
Result<void> set_cache_salt(std::string& body, std::vector<JsonMember>& members,
                            const Tenant& tenant);

/// Does the same for JSON of a path of --pass: replaces each `cache_salt` that is a string or null,
/// at every depth, and adds one to a top-level object without any.
/// Errors: kInvalidArgument, as from read_members().
Result<void> set_cache_salt_anywhere(std::string& body, const Tenant& tenant);

}  // namespace pegaflow::router
