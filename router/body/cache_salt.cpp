#include "router/body/cache_salt.h"

#include <cstdint>
#include <utility>
#include <vector>

#include <sodium.h>

#include <fmt/format.h>

namespace pegaflow::router {
namespace {

constexpr std::string_view kMember = "cache_salt";

/// A part of a text, and its replacement.
struct Replacement {
  std::size_t at = 0;
  std::size_t size = 0;
  std::string text;
};

std::string replaced(std::string_view text, const std::vector<Replacement>& replacements) {
  std::string out;
  out.reserve(text.size() + 80 * replacements.size());
  std::size_t done = 0;
  for (const Replacement& each : replacements) {
    out += text.substr(done, each.at - done);
    out += each.text;
    done = each.at + each.size;
  }
  out += text.substr(done);
  return out;
}

std::size_t offset_in(std::string_view text, std::string_view part) {
  return static_cast<std::size_t>(part.data() - text.data());
}

/// The salt as the first member of the object whose brace is at `brace`.
Replacement first_member(std::size_t brace, const std::string& salt, bool is_only_one) {
  return {brace + 1, 0, fmt::format(R"("{}":"{}"{})", kMember, salt, is_only_one ? "" : ",")};
}

Replacement new_value(std::string_view text, std::string_view value, const Tenant& tenant) {
  return {offset_in(text, value), value.size(),
          fmt::format(R"("{}")", tenant.salts.salt(tenant.name, json_unescape(value)))};
}

/// Inserts the member without parsing the text again: a long prompt would take milliseconds.
void insert_first(std::string& body, std::vector<JsonMember>& members, const Tenant& tenant) {
  struct Place {
    std::size_t key, value, whole;
  };
  std::vector<Place> places;
  places.reserve(members.size());
  for (const JsonMember& each : members) {
    places.push_back(
        {offset_in(body, each.raw_key), offset_in(body, each.value), offset_in(body, each.whole)});
  }
  const Replacement added =
      first_member(body.find('{'), tenant.salts.salt(tenant.name, {}), members.empty());
  body.insert(added.at, added.text);
  const std::string_view text = body;
  const std::size_t shift = added.text.size();
  for (std::size_t i = 0; i < members.size(); ++i) {
    JsonMember& each = members[i];
    each = {text.substr(places[i].key + shift, each.raw_key.size()),
            text.substr(places[i].value + shift, each.value.size()),
            text.substr(places[i].whole + shift, each.whole.size())};
  }
  const std::string_view whole = text.substr(added.at, shift - (members.empty() ? 0 : 1));
  members.insert(members.begin(),
                 {whole.substr(1, kMember.size()), whole.substr(kMember.size() + 3), whole});
}

}  // namespace

CacheSalts::CacheSalts(std::string_view secret) {
  // Turns a secret of any length into a key of 32 bytes.
  (void)::crypto_generichash(key_.data(), key_.size(),
                             reinterpret_cast<const unsigned char*>(secret.data()), secret.size(),
                             nullptr, 0);
}

std::string CacheSalts::salt(std::string_view tenant, std::string_view clients_salt) const {
  ::crypto_generichash_state state;
  std::array<unsigned char, 32> hash{};
  (void)::crypto_generichash_init(&state, key_.data(), key_.size(), hash.size());
  const auto add = [&](std::string_view text) {
    // The length precedes the text, so that no two pairs of texts have the same bytes.
    const std::uint64_t size = text.size();
    std::array<unsigned char, 8> length{};
    for (std::size_t i = 0; i < length.size(); ++i) {
      length[i] = static_cast<unsigned char>(size >> (8 * i));
    }
    (void)::crypto_generichash_update(&state, length.data(), length.size());
    (void)::crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(text.data()),
                                      text.size());
  };
  add("pegaflow cache salt 1");
  add(tenant);
  add(clients_salt);
  (void)::crypto_generichash_final(&state, hash.data(), hash.size());
  std::string out;
  for (const unsigned char byte : hash) out += fmt::format("{:02x}", byte);
  return out;
}

Result<void> set_cache_salt(std::string& body, std::vector<JsonMember>& members,
                            const Tenant& tenant) {
  std::vector<Replacement> replacements;
  for (const JsonMember& each : members) {
    if (!each.is(kMember)) continue;
    const bool is_string = each.value.front() == '"' && each.value != R"("")";
    if (!is_string && each.value != "null") {
      return fail(Errc::kInvalidArgument, "cache_salt must be a non-empty string");
    }
    replacements.push_back(new_value(body, each.value, tenant));
  }
  if (replacements.empty()) {
    insert_first(body, members, tenant);
    return {};
  }
  body = replaced(body, replacements);
  PEGA_TRY_LET(members, read_members(body));
  return {};
}

Result<void> set_cache_salt_anywhere(std::string& body, const Tenant& tenant) {
  std::vector<Replacement> replacements;
  bool has_own = false;
  bool has_members = false;
  std::vector<JsonCut> none;
  PEGA_TRY(find_members(
      body,
      [&](std::size_t level, const JsonMember*, const JsonMember& member) {
        has_members = has_members || level == 1;
        if (!member.is(kMember)) return false;
        has_own = has_own || level == 1;
        if (member.value.front() == '"' || member.value == "null") {
          replacements.push_back(new_value(body, member.value, tenant));
        }
        return false;
      },
      none));
  const std::size_t brace = body.find_first_not_of(" \t\r\n");
  if (!has_own && body[brace] == '{') {
    replacements.insert(replacements.begin(),
                        first_member(brace, tenant.salts.salt(tenant.name, {}), !has_members));
  }
  body = replaced(body, replacements);
  return {};
}

}  // namespace pegaflow::router
