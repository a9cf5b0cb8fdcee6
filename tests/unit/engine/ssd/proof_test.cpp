#include "engine/ssd/proof.h"

#include <array>

#include <doctest/doctest.h>

#include "tests/unit/engine/ssd/ssd_fixture.h"

namespace pegaflow::engine::ssd {

TEST_SUITE("the proof of a block") {
  const Origin kOrigin{.name = name_of(1), .kind = 2, .epoch = {3, 4}};
  const std::array<std::uint64_t, 2> kPages = {5, 6};

  TEST_CASE("the same block in the same life proves itself") {
    CHECK(Proven::prove(kOrigin, key_of(7), 8, kPages, proof_of(kOrigin, key_of(7), 8, kPages)));
  }

  TEST_CASE("another name, kind, epoch, key, life or page does not") {
    const std::uint64_t proof = proof_of(kOrigin, key_of(7), 8, kPages);
    Origin name = kOrigin;
    name.name[31] = std::byte{1};
    Origin kind = kOrigin;
    kind.kind = 0;
    Origin counter = kOrigin;
    counter.epoch.counter = 9;
    Origin id = kOrigin;
    id.epoch.id = 9;
    const std::array<std::uint64_t, 2> swapped = {6, 5};
    const std::array<std::uint64_t, 1> fewer = {5};

    for (const Origin& other : {name, kind, counter, id}) {
      CHECK_FALSE(Proven::prove(other, key_of(7), 8, kPages, proof));
    }
    CHECK_FALSE(Proven::prove(kOrigin, key_of(6), 8, kPages, proof));
    CHECK_FALSE(Proven::prove(kOrigin, key_of(7), 9, kPages, proof));
    CHECK_FALSE(Proven::prove(kOrigin, key_of(7), 8, swapped, proof));
    CHECK_FALSE(Proven::prove(kOrigin, key_of(7), 8, fewer, proof));
  }

  TEST_CASE("one key has another fingerprint under another number") {
    CHECK(fingerprint_of(1, key_of(7)) != fingerprint_of(2, key_of(7)));
    CHECK(fingerprint_of(1, key_of(7)) == fingerprint_of(1, key_of(7)));
  }
}

}  // namespace pegaflow::engine::ssd
