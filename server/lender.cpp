#include "server/lender.h"

#include <algorithm>
#include <utility>

#include <kj/vector.h>

namespace pegaflow {

bool Lenders::has_ready() const {
  return std::any_of(lenders_.begin(), lenders_.end(),
                     [](const Lender* lender) { return lender->is_ready(); });
}

kj::Promise<std::vector<Lenders::Owner>> Lenders::owners(const Bytes32& space,
                                                         std::span<const BlockKey> keys) {
  kj::Vector<kj::Promise<Owner>> asked;
  for (Lender* const lender : lenders_) {
    if (!lender->is_ready()) continue;
    asked.add(lender->locate(space, keys)
                  .then([lender, life = lender->life()](Result<std::size_t>&& blocks) {
                    // Who does not answer has nothing.
                    return Owner{.peer = lender, .life = life, .blocks = blocks ? *blocks : 0};
                  }));
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

}  // namespace pegaflow
