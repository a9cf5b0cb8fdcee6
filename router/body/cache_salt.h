#pragma once
/// \file
/// The `cache_salt` that keeps the cached prompts of tenants apart.

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
  /// The fewest bytes of a secret.
  static constexpr std::size_t kMinSecretBytes = 16;

  /// An empty `secret` stands for a key that everybody knows: salts then keep tenants apart, but
  /// who knows a tenant's name can compute its salt.
  explicit CacheSalts(std::string_view secret);

  /// A keyed hash (BLAKE2b) of the tenant and of the salt that its client sent, empty without one:
  /// 64 hexadecimal digits. vLLM accepts up to 128 characters, and no '/', '\\' or '@'.
  [[nodiscard]] std::string salt(std::string_view tenant, std::string_view clients_salt) const;

 private:
  std::array<unsigned char, 32> key_{};
};

/// A tenant whose request is salted. Views: both outlive the call that they are passed to.
struct Tenant {
  const CacheSalts& salts;
  std::string_view name;
};

/// Gives a JSON object the tenant's `cache_salt`: in place of the client's one, which is folded
/// into it, else as the first member. `members` are those of `body` before and after.
/// Errors: kInvalidArgument when the client's salt is neither null nor a string that is not empty,
/// as vLLM has it.
Result<void> set_cache_salt(std::string& body, std::vector<JsonMember>& members,
                            const Tenant& tenant);

/// The same for any JSON of a path that the router does not know: each `cache_salt` that is a
/// string or null is replaced, at every depth, and an object at the top that has none gets one.
/// Errors: kInvalidArgument as read_members().
Result<void> set_cache_salt_anywhere(std::string& body, const Tenant& tenant);

}  // namespace pegaflow::router
