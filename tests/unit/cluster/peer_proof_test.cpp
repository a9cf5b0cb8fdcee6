#include "cluster/peer_proof.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <string>

#include <sys/stat.h>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"

namespace pegaflow::testing {
namespace {

cluster::PeerSecret secret_of(const TemporaryDirectory& directory, const std::string& text) {
  const std::string path = (directory.path() / "secret").string();
  std::ofstream(path) << text;
  ::chmod(path.c_str(), 0600);
  return cluster::PeerSecrets::read(path).value().first();
}

cluster::PeerSecret::Greeting greeting() {
  return {.dialer = Id128::random(),
          .answerer = Id128::random(),
          .dialer_challenge = cluster::random_bytes32(),
          .answerer_challenge = cluster::random_bytes32()};
}

TEST_SUITE("PeerSecret") {
  TEST_CASE("a proof is valid for one greeting, one side and one secret") {
    const TemporaryDirectory directory;
    const cluster::PeerSecret ours = secret_of(directory, "a secret of 16 bytes or more\n");
    const cluster::PeerSecret same = secret_of(directory, "a secret of 16 bytes or more");
    const cluster::PeerSecret other = secret_of(directory, "a secret of 16 bytes or More");
    using Side = cluster::PeerSecret::Side;
    const auto said = greeting();
    const Bytes32 proof = ours.prove(Side::kDialer, said);

    CHECK(same.is_proof(Side::kDialer, said, proof));
    CHECK_FALSE(same.is_proof(Side::kAnswerer, said, proof));
    CHECK_FALSE(other.is_proof(Side::kDialer, said, proof));
    CHECK_FALSE(cluster::PeerSecret().is_proof(Side::kDialer, said, proof));
    CHECK_FALSE(same.is_proof(Side::kDialer, said, std::span(proof).first(31)));
    CHECK_FALSE(same.is_proof(Side::kDialer, said, {}));
    for (const auto change : {0, 1, 2, 3}) {
      auto changed = said;
      if (change == 0) ++changed.dialer.low;
      if (change == 1) ++changed.answerer.high;
      if (change == 2) changed.dialer_challenge[31] ^= std::byte{1};
      if (change == 3) changed.answerer_challenge[0] ^= std::byte{1};
      CHECK_FALSE(same.is_proof(Side::kDialer, changed, proof));
    }
    // What the other side proved is no proof of ours, though all else were swapped.
    const cluster::PeerSecret::Greeting swapped{.dialer = said.answerer,
                                                .answerer = said.dialer,
                                                .dialer_challenge = said.answerer_challenge,
                                                .answerer_challenge = said.dialer_challenge};
    CHECK_FALSE(same.is_proof(Side::kAnswerer, swapped, proof));
  }

  TEST_CASE("nodes without a secret accept each other") {
    const auto said = greeting();
    CHECK(cluster::PeerSecret().is_proof(
        cluster::PeerSecret::Side::kDialer, said,
        cluster::PeerSecret().prove(cluster::PeerSecret::Side::kDialer, said)));
  }

  TEST_CASE("a short, long, world-readable or missing secret is refused with the reason") {
    const TemporaryDirectory directory;
    const std::string path = (directory.path() / "secret").string();
    CHECK(cluster::PeerSecrets::read(path).error().code == Errc::kRefused);
    const auto write = [&](std::size_t bytes, mode_t mode) {
      std::string secret(bytes, 'x');
      std::iota(secret.begin(), secret.begin() + 10, '0');
      std::ofstream(path) << secret << "  \n";
      ::chmod(path.c_str(), mode);
      return cluster::PeerSecrets::read(path);
    };
    CHECK(write(15, 0600).error().code == Errc::kInvalidArgument);
    CHECK(write(4097, 0600).error().code == Errc::kInvalidArgument);
    const auto open = write(16, 0604);
    REQUIRE_FALSE(open);
    CHECK(open.error().code == Errc::kRefused);
    CHECK(open.error().detail.find("chmod o=") != std::string::npos);
    CHECK(write(16, 0640));
  }

  TEST_CASE("a secret of a few different bytes is refused, with a command that makes a good one") {
    const TemporaryDirectory directory;
    const std::string path = (directory.path() / "secret").string();
    std::ofstream(path) << "aaaabbbbccccddddeeee\n";
    ::chmod(path.c_str(), 0600);

    const auto guessed = cluster::PeerSecrets::read(path);
    REQUIRE_FALSE(guessed);
    CHECK(guessed.error().code == Errc::kInvalidArgument);
    CHECK(guessed.error().detail.find("/dev/urandom") != std::string::npos);
  }

  TEST_CASE("a file has two secrets with a blank line between them, and one without") {
    const TemporaryDirectory directory;
    const std::string path = (directory.path() / "secret").string();
    const auto read = [&](const std::string& text) {
      std::ofstream(path, std::ios::binary) << text;
      ::chmod(path.c_str(), 0600);
      return cluster::PeerSecrets::read(path);
    };
    const std::string one = "the first secret, in one line";
    const std::string two = "the second secret";
    const auto both = read(one + "\n\n" + two + "\n").value();
    CHECK(both.count() == 2);
    CHECK(both.first() == cluster::PeerSecret(one));
    CHECK(both == read(one + " \r\n \t\r\n\n" + two + "\r\n\r\n").value());
    CHECK(both.shortest() == two.size());
    // As before there could be two: base64 breaks long lines.
    CHECK(read(one + "\n" + two + "\n").value().first() == cluster::PeerSecret(one + "\n" + two));
    CHECK(read(one + "\n" + two).value().count() == 1);
    // Of random bytes each pair is as likely as any other.
    const std::string binary = "\x01\x02 binary \xff\n\n and more of it";
    CHECK(read(binary).value().first() == cluster::PeerSecret(binary));

    CHECK(read(one + "\n\ntoo short").error().code == Errc::kInvalidArgument);
    CHECK(read(one + "\n\n" + two + "\n\n" + one + "?").error().code == Errc::kInvalidArgument);
    CHECK(read("\n\n").error().code == Errc::kInvalidArgument);
    CHECK(read("").error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a proof by either secret is found") {
    const TemporaryDirectory directory;
    const std::string path = (directory.path() / "secret").string();
    std::ofstream(path) << "the former secret\n\nthe coming secret\n";
    ::chmod(path.c_str(), 0600);
    const cluster::PeerSecrets both = cluster::PeerSecrets::read(path).value();
    const auto said = greeting();
    const auto side = cluster::PeerSecret::Side::kDialer;
    const auto find = [&](const std::string& secret) {
      return both.find(side, said, cluster::PeerSecret(secret).prove(side, said));
    };

    REQUIRE(find("the coming secret") != nullptr);
    CHECK(*find("the coming secret") == cluster::PeerSecret("the coming secret"));
    CHECK(*find("the former secret") == both.first());
    CHECK(find("a stranger's secret") == nullptr);
    // Without a file: the secret that all such nodes have, and no other.
    CHECK(cluster::PeerSecrets().find(side, said, cluster::PeerSecret().prove(side, said)) !=
          nullptr);
    CHECK(cluster::PeerSecrets().find(
              side, said, cluster::PeerSecret("the former secret").prove(side, said)) == nullptr);
  }
}

TEST_SUITE("space_name") {
  TEST_CASE("equal lists and pages have one name, all others another") {
    const std::vector<engine::NamespaceFactor> factors = {{"a", "bc"}, {"d", ""}};
    const std::vector<std::uint64_t> pages = {4096, 8192};
    std::vector<Bytes32> names = {
        cluster::space_name(factors, pages),
        cluster::space_name(std::vector<engine::NamespaceFactor>{{"ab", "c"}, {"d", ""}}, pages),
        cluster::space_name(std::vector<engine::NamespaceFactor>{{"a", "bc"}}, pages),
        cluster::space_name(std::vector<engine::NamespaceFactor>{{"a", "bcd"}, {"", ""}}, pages),
        cluster::space_name(factors, std::vector<std::uint64_t>{8192, 4096}),
        cluster::space_name(factors, std::vector<std::uint64_t>{4096}),
        cluster::space_name({}, {}),
        // Kinds of blocks, by number, rule, tokens and block.
        cluster::space_name(factors, pages, std::vector<std::uint64_t>{1, 1, 1023, 16}),
        cluster::space_name(factors, pages, std::vector<std::uint64_t>{2, 1, 1023, 16}),
        cluster::space_name(factors, pages, std::vector<std::uint64_t>{1, 2, 1023, 16}),
        cluster::space_name(factors, pages, std::vector<std::uint64_t>{1, 1, 1024, 16}),
        cluster::space_name(factors, pages, std::vector<std::uint64_t>{1, 1, 1023, 32}),
    };
    CHECK(cluster::space_name(factors, pages) == names.front());
    std::sort(names.begin(), names.end());
    CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
  }
}

}  // namespace
}  // namespace pegaflow::testing
