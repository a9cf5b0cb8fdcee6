#include "server/pool/kept_names.h"

#include <string>
#include <utility>

#include <nlohmann/json.hpp>

namespace pegaflow::server {
namespace {

using nlohmann::json;

json to_json(const engine::BlockStore::FormerShape& shape) {
  json shards = json::array();
  for (const engine::Shape::Shard& shard : shape.shape.shards) {
    shards.push_back({shard.page_bytes, shard.numa_node});
  }
  return {{"number", shape.number}, {"shards", std::move(shards)}};
}

json to_json(const KeptNames::Namespace& space) {
  json factors = json::array();
  // Bytes of a client, which need not be UTF-8.
  for (const engine::NamespaceFactor& factor : space.factors) {
    factors.push_back({json::binary_t({factor.name.begin(), factor.name.end()}),
                       json::binary_t({factor.value.begin(), factor.value.end()})});
  }
  json rules = json::array();
  for (const engine::BlockKind& kind : space.rules.kinds) {
    rules.push_back({static_cast<int>(kind.rule), kind.tokens, kind.block_tokens});
  }
  json kinds = json::array();
  for (const KeptNames::Kind& kind : space.kinds) {
    kinds.push_back({kind.shape, static_cast<std::uint32_t>(kind.space)});
  }
  return {{"factors", std::move(factors)},
          {"rules", std::move(rules)},
          {"unit_tokens", space.rules.unit_tokens},
          {"alignment_tokens", space.rules.alignment_tokens},
          {"kinds", std::move(kinds)},
          {"generation", space.generation},
          {"epoch", {space.epoch.counter, space.epoch.id}}};
}

std::string text_of(const json& bytes) {
  const json::binary_t& binary = bytes.get_binary();
  return {binary.begin(), binary.end()};
}

engine::BlockStore::FormerShape shape_of(const json& record) {
  engine::BlockStore::FormerShape shape;
  shape.number = record.at("number").get<std::uint32_t>();
  for (const json& shard : record.at("shards")) {
    shape.shape.shards.push_back({.page_bytes = shard.at(0).get<std::uint64_t>(),
                                  .numa_node = shard.at(1).get<std::uint32_t>()});
  }
  return shape;
}

KeptNames::Namespace namespace_of(const json& record) {
  KeptNames::Namespace space;
  for (const json& factor : record.at("factors")) {
    space.factors.push_back({text_of(factor.at(0)), text_of(factor.at(1))});
  }
  for (const json& rule : record.at("rules")) {
    space.rules.kinds.push_back({.rule = static_cast<engine::KindRule>(rule.at(0).get<int>()),
                                 .tokens = rule.at(1).get<std::uint32_t>(),
                                 .block_tokens = rule.at(2).get<std::uint32_t>()});
  }
  space.rules.unit_tokens = record.at("unit_tokens").get<std::uint32_t>();
  space.rules.alignment_tokens = record.at("alignment_tokens").get<std::uint32_t>();
  for (const json& kind : record.at("kinds")) {
    space.kinds.push_back({.shape = kind.at(0).get<std::uint32_t>(),
                           .space = engine::SpaceId{kind.at(1).get<std::uint32_t>()}});
  }
  space.generation = record.at("generation").get<std::uint64_t>();
  space.epoch = {.counter = record.at("epoch").at(0).get<std::uint64_t>(),
                 .id = record.at("epoch").at(1).get<std::uint64_t>()};
  return space;
}

}  // namespace

std::vector<std::byte> write_names(const KeptNames& names) {
  json shapes = json::array();
  for (const auto& shape : names.shapes) shapes.push_back(to_json(shape));
  json namespaces = json::array();
  for (const auto& space : names.namespaces) namespaces.push_back(to_json(space));
  const std::vector<std::uint8_t> written =
      json::to_cbor(json{{"shapes", std::move(shapes)}, {"namespaces", std::move(namespaces)}});
  const auto bytes = std::as_bytes(std::span(written));
  return {bytes.begin(), bytes.end()};
}

Result<KeptNames> read_names(std::span<const std::byte> bytes) {
  try {
    const auto* const first = reinterpret_cast<const std::uint8_t*>(bytes.data());
    const json record = json::from_cbor(first, first + bytes.size());
    KeptNames names;
    for (const json& shape : record.at("shapes")) names.shapes.push_back(shape_of(shape));
    for (const json& space : record.at("namespaces")) {
      names.namespaces.push_back(namespace_of(space));
      if (!names.namespaces.back().rules.kinds.empty()) {
        PEGA_TRY(names.namespaces.back().rules.check());
      }
    }
    return names;
  } catch (const json::exception& problem) {
    return fail(Errc::kCorrupt, "read the names of the kept pool: {}", problem.what());
  }
}

}  // namespace pegaflow::server
