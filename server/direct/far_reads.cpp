#include "server/direct/far_reads.h"

#include <algorithm>
#include <utility>

#include "cluster/peers.h"
#include "server/cache/cache_service.h"

namespace pegaflow::server {
namespace {

PeerReader to_wire(const Offers::Reader& reader) {
  return {.group = reader.group, .shard = reader.shard};
}

}  // namespace

std::vector<PeerPiece::Guard> guards_of(const Offers::Found& found) {
  std::vector<PeerPiece::Guard> guards;
  for (const Offers::Run& run : found.guards) {
    guards.push_back({run.guard.place, run.guard.value, run.blocks});
  }
  return guards;
}

bool FarReads::may_read(const Id128& connection, const Id128& node) const {
  const cluster::PeerLink* const link = peers_.ready_link(node);
  if (link == nullptr || !link->has_readable_workers()) return false;
  const auto reach = service_.direct_reach(connection);
  return reach && std::ranges::all_of(reach->workers, [this](const Id128& worker) {
           const OfferedMemory* const memory = offers_.memory_of(worker);
           return memory != nullptr && memory->network.has_value();
         });
}

kj::Promise<std::size_t> FarReads::reach(const Id128& connection, const Id128& node,
                                         std::span<const BlockKey> keys) const {
  const auto wants = service_.wants(connection);
  const auto engine = service_.direct_reach(connection);
  if (!wants || !engine || !may_read(connection, node)) return std::size_t{0};
  const auto workers = offers_.readers(engine->workers);
  if (!workers) return std::size_t{0};
  std::vector<PeerReader> readers;
  for (const Offers::Reader& each : *workers) readers.push_back(to_wire(each));
  return peers_.ready_link(node)
      ->offered(wants->space, keys, readers)
      .then([](Result<PeerOffer>&& offer) {
        return offer ? offer->sealed + offer->offered : std::size_t{0};
      });
}

kj::Promise<Result<PeerPiece>> FarReads::ask(const Id128& connection, const Id128& node,
                                             std::span<const BlockKey> keys,
                                             PeerQuestion question) {
  const auto wants = service_.wants(connection);
  if (!wants) return Result<PeerPiece>(tl::unexpected<Error>(wants.error()));
  const auto reader = offers_.reader(connection);
  if (!reader || !may_read(connection, node)) {
    return Result<PeerPiece>(fail(Errc::kGone, "the prefill engine's node cannot be asked"));
  }
  question.reader = to_wire(*reader);
  for (auto known = sources_.lower_bound({node, 0});
       known != sources_.end() && known->first.first == node; ++known) {
    question.known.push_back(known->first.second);
  }
  return peers_.ready_link(node)->open_next(wants->space, keys, question);
}

void FarReads::end(const Id128& node, std::uint64_t read) const {
  if (auto* const link = peers_.ready_link(node)) link->end_read(read);
}

void FarReads::forget(const Id128& node, std::span<const std::uint64_t> gone) {
  for (const std::uint64_t source : gone) sources_.erase({node, source});
}

Result<FarReads::Source> FarReads::source_of(const Id128& node, PeerPiece& piece) {
  Result<Source> source = checked_source(node, piece);
  cluster::PeerLink* const link = peers_.ready_link(node);
  if (!source && link != nullptr) link->lost(link->life(), source.error().detail);
  return source;
}

Result<FarReads::Source> FarReads::checked_source(const Id128& node, PeerPiece& piece) {
  const Far name{node, piece.source};
  if (piece.memory && !sources_.contains(name)) {
    if (sources_.size() >= kMostSources) forget_lost();
    sources_.emplace(name, Known{.name = offers_.new_name(), .memory = std::move(*piece.memory)});
  }
  const auto found = sources_.find(name);
  if (found == sources_.end()) {
    return fail(Errc::kInternal, "node {} did not describe the memory of its worker {}",
                to_string(node), piece.source);
  }
  const OfferedMemory& memory = found->second.memory;
  const bool has_blocks =
      std::ranges::all_of(piece.blocks, [&](std::uint32_t block) { return block < memory.blocks; });
  const bool has_guards =
      piece.guards.size() <= piece.blocks.size() &&
      std::ranges::all_of(piece.guards, [&](const auto& one) { return one.place < memory.guards; });
  if (!has_blocks || !has_guards) {
    return fail(Errc::kInternal, "node {} named blocks or guards that its worker {} does not have",
                to_string(node), piece.source);
  }
  return Source{.name = found->second.name, .memory = &memory};
}

void FarReads::forget_lost() {
  std::erase_if(sources_, [this](const auto& source) {
    return peers_.ready_link(source.first.first) == nullptr;
  });
  if (sources_.size() >= kMostSources) sources_.erase(sources_.begin());
}

bool FarReads::has(SourceId source) const {
  const auto found = std::ranges::find_if(
      sources_, [source](const auto& each) { return each.second.name == source; });
  return found != sources_.end() && peers_.ready_link(found->first.first) != nullptr;
}

void FarReads::began(const Id128& connection, std::uint64_t pin, const Id128& node,
                     std::uint64_t read, std::size_t blocks) {
  ended(connection, pin);  // A repeated call.
  ++begun_;
  blocks_ += blocks;
  reads_.insert_or_assign({connection, pin}, Far{node, read});
}

void FarReads::ended(const Id128& connection, std::uint64_t pin) {
  const auto read = reads_.extract(Pin{connection, pin});
  if (!read.empty()) end(read.mapped().first, read.mapped().second);
}

void FarReads::left(const Id128& connection) {
  for (auto read = reads_.lower_bound({connection, 0});
       read != reads_.end() && read->first.first == connection;) {
    end(read->second.first, read->second.second);
    read = reads_.erase(read);
  }
}

}  // namespace pegaflow::server
