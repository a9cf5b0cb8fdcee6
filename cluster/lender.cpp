#include "cluster/lender.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <kj/vector.h>

namespace pegaflow::cluster {

bool Lenders::has_ready() const {
  return std::any_of(lenders_.begin(), lenders_.end(),
                     [](const Lender* lender) { return lender->is_ready(); });
}

/// Queries one peer, first for a few keys: a peer that lacks one of them does not receive the rest.
/// `rest` holds a copy of the other keys, if there are any.
kj::Promise<Lenders::Owner> Lenders::ask(Lender& lender, const Bytes32& space,
                                         std::span<const BlockKey> first,
                                         const std::shared_ptr<const Rest>& rest) {
  const std::uint64_t life = lender.life();
  return lender.locate(space, first)
      .then([&lender, life, asked = first.size(),
             rest](Result<Lender::Prefix>&& found) -> kj::Promise<Owner> {
        // A peer that does not respond counts as having nothing.
        Owner owner{.peer = &lender, .life = life, .blocks = 0};
        if (found) {
          owner.blocks = found->blocks;
          owner.on_disks = found->on_disks;
        }
        const bool may_have_more = rest != nullptr && owner.blocks == asked;
        if (!may_have_more || !lender.is_ready() || lender.life() != life) return owner;
        return lender.locate(rest->space, rest->keys)
            .then([owner](Result<Lender::Prefix>&& more) mutable {
              if (!more) return owner;
              owner.blocks += more->blocks;
              const std::size_t before = owner.on_disks.blocks;
              if (more->on_disks.blocks != 0) owner.on_disks = more->on_disks;
              owner.on_disks.blocks = before + more->on_disks.blocks;
              return owner;
            });
      });
}

kj::Promise<std::vector<Lenders::Owner>> Lenders::owners(const Bytes32& space,
                                                         std::span<const BlockKey> keys,
                                                         std::span<const Id128> only) {
  const auto first = keys.first(std::min(keys.size(), kFirstKeys));
  std::shared_ptr<const Rest> rest;
  if (first.size() != keys.size()) {
    rest = std::make_shared<const Rest>(
        Rest{.space = space, .keys = {keys.begin() + kFirstKeys, keys.end()}});
  }
  kj::Vector<kj::Promise<Owner>> asked;
  for (Lender* const lender : lenders_) {
    const bool is_meant =
        only.empty() || std::find(only.begin(), only.end(), lender->node()) != only.end();
    if (is_meant && lender->is_ready()) asked.add(ask(*lender, space, first, rest));
  }
  return kj::joinPromises(asked.releaseAsArray()).then([](kj::Array<Owner>&& answers) {
    std::vector<Owner> owners;
    for (const Owner& owner : answers) {
      if (owner.blocks != 0) owners.push_back(owner);
    }
    std::stable_sort(owners.begin(), owners.end(),
                     [](const Owner& a, const Owner& b) { return a.blocks > b.blocks; });
    return owners;
  });
}

kj::Promise<std::vector<Lenders::Holder>> Lenders::holders(const Bytes32& space,
                                                           std::span<const BlockKey> keys) {
  return holders(space, keys, {});
}

kj::Promise<std::vector<Lenders::Holder>> Lenders::holders(const Bytes32& space,
                                                           std::span<const BlockKey> keys,
                                                           std::span<const Id128> only) {
  kj::Vector<kj::Promise<Holder>> asked;
  for (Lender* const lender : lenders_) {
    const bool is_meant =
        only.empty() || std::find(only.begin(), only.end(), lender->node()) != only.end();
    if (!is_meant || !lender->is_ready()) continue;
    asked.add(lender->locate_each(space, keys)
                  .then([lender, life = lender->life()](Result<Lender::Present>&& present) {
                    if (!present) return Holder{.peer = lender, .life = life, .has = {}};
                    return Holder{.peer = lender,
                                  .life = life,
                                  .has = std::move(present->has),
                                  .on_disks = present->on_disks};
                  }));
  }
  return kj::joinPromises(asked.releaseAsArray()).then([](kj::Array<Holder>&& answers) {
    std::vector<Holder> holders;
    for (Holder& each : answers) {
      if (std::find(each.has.begin(), each.has.end(), true) == each.has.end()) continue;
      holders.push_back(std::move(each));
    }
    return holders;
  });
}

}  // namespace pegaflow::cluster
