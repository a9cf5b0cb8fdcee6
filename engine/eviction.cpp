#include "engine/eviction.h"

#include <array>
#include <utility>

#include "engine/eviction_lru.h"

namespace pegaflow {

namespace {

struct Name {
  EvictionKind kind;
  std::string_view name;
};
constexpr std::array kNames = {Name{EvictionKind::kLru, "lru"}};

}  // namespace

std::string_view to_string(EvictionKind kind) {
  for (const Name& each : kNames) {
    if (each.kind == kind) return each.name;
  }
  return "?";
}

std::string eviction_names() {
  std::string all;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (i != 0) all += i + 1 == kNames.size() ? " or " : ", ";
    all += kNames[i].name;
  }
  return all;
}

Result<EvictionKind> eviction_kind(std::string_view name) {
  for (const Name& each : kNames) {
    if (each.name == name) return each.kind;
  }
  return fail(Errc::kInvalidArgument, "there is no eviction policy \"{}\", but {}", name,
              eviction_names());
}

Result<std::unique_ptr<EvictionRows>> EvictionRows::create(std::size_t count) {
  PEGA_TRY_LET(auto rows, ZeroPages<EvictionRow>::create(count));
  return std::unique_ptr<EvictionRows>(new EvictionRows(std::move(rows)));
}

Result<std::unique_ptr<EvictionPolicy>> EvictionPolicy::create(EvictionKind kind,
                                                               EvictionRows& rows,
                                                               std::uint32_t /*row_count*/) {
  switch (kind) {
    case EvictionKind::kLru:
      return std::make_unique<LruPolicy>(rows);
  }
  return fail(Errc::kInternal, "an eviction policy without a name");
}

}  // namespace pegaflow
