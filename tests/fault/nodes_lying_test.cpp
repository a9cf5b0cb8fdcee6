// A node that knows the secret and has the requested blocks, but sends wrong bytes. In every case:
// no byte of the pool changes except where a read is open, none of the wrong bytes is sealed, the
// engine receives a result, and another owner's bytes are loaded.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string>

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/fault/lying_node.h"
#include "tests/support/nodes.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPiece = kLyingPageBytes / 2;
/// Bytes of the reader itself, next to the slots that are read into.
constexpr std::uint64_t kOwn = 5001;
constexpr std::size_t kOwnBlocks = 48;

constexpr const char* kWhole = "pegaflow_fetch_blocks_total{result=\"whole\"}";

/// tests/fault/lying_node as a child process.
class LyingNode {
 public:
  LyingNode(const std::string& address, const std::string& secret, Lie lie)
      : log_(directory_.path() / "lies") {
    const UniqueFd output(
        ::open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, S_IRUSR | S_IWUSR));
    REQUIRE(output);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, output.get(), STDOUT_FILENO);
    std::array<std::string, 4> words{PEGA_LYING_NODE, address, secret,
                                     std::to_string(static_cast<int>(lie))};
    const std::array<char*, 5> arguments{words[0].data(), words[1].data(), words[2].data(),
                                         words[3].data(), nullptr};
    REQUIRE(::posix_spawn(&pid_, PEGA_LYING_NODE, &actions, nullptr, arguments.data(), environ) ==
            0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~LyingNode() {
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  LyingNode(const LyingNode&) = delete;
  LyingNode& operator=(const LyingNode&) = delete;

  /// The number of lies so far: one line each.
  [[nodiscard]] std::size_t lies() const { return std::filesystem::file_size(log_) / 5; }

 private:
  TemporaryDirectory directory_;
  std::filesystem::path log_;
  pid_t pid_ = -1;
};

/// The number of wrong bytes in the pool of a server, in pieces of 16.
std::size_t lies_in_pool(const ServerProcess& server) {
  std::array<std::byte, 16> lie{};
  for (std::size_t i = 0; i < lie.size(); ++i) lie[i] = lying_byte(i);
  std::size_t pools = 0;
  std::size_t found = 0;
  const std::filesystem::path descriptors = fmt::format("/proc/{}/fd", server.pid());
  for (const auto& entry : std::filesystem::directory_iterator(descriptors)) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.rfind("/memfd:", 0) != 0) continue;
    const UniqueFd pool(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    REQUIRE(::fstat(pool.get(), &status) == 0);
    const auto size = static_cast<std::size_t>(status.st_size);
    void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, pool.get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    ++pools;
    for (std::size_t at = 0; at + lie.size() <= size; at += lie.size()) {
      const auto* const piece = static_cast<const std::byte*>(mapped) + at;
      if (std::memcmp(piece, lie.data(), lie.size()) == 0) found += lie.size();
    }
    ::munmap(mapped, size);
  }
  REQUIRE(pools > 0);
  return found;
}

/// The reader, a node that lies, which is read from first, and one that does not.
struct Cluster {
  explicit Cluster(Lie lie) : liar(at[0], secret, lie), own_engine(reader, kPiece, kOwnBlocks) {
    REQUIRE(own_engine.engine->save(numbers_from(kOwn, kOwnBlocks), blocks_from(0, kOwnBlocks))
                .blocks == kOwnBlocks);
  }

  /// Claims and loads the blocks that the liar announces; loaded bytes are right. Returns the
  /// number of loaded blocks.
  std::size_t load() {
    // A peer whose lie was detected is lost, and greeted again.
    REQUIRE(sees(reader, at[0]));
    REQUIRE(sees(reader, at[1]));
    const auto claimed =
        own_engine.engine->claim(numbers_from(kFirstLyingBlock, kLyingBlocks)).value();
    if (claimed.blocks == 0) return 0;
    return own_engine.load_and_check(claimed, kFirstLyingBlock).blocks;
  }
  void check_own_blocks() {
    const auto claimed = own_engine.engine->claim(numbers_from(kOwn, kOwnBlocks)).value();
    CHECK(claimed.blocks == kOwnBlocks);
    CHECK(claimed.coming == 0);
    CHECK(own_engine.load_and_check(claimed, kOwn).blocks == kOwnBlocks);
  }

  std::vector<std::string> at = node_addresses(3);
  TemporaryDirectory directory;
  std::string secret = secret_file(directory.path(), "one-secret-for-all-of-them");
  LyingNode liar;
  ServerProcess other{node_options(at[1], {}, {"--peer-secret-file", secret})};
  ServerProcess reader{node_options(at[2], {at[0], at[1]}, {"--peer-secret-file", secret})};
  EngineAt own_engine;
};

/// `in_place`: wrong bytes may lie where a read of them was open, and nowhere else.
void check_lie(Lie lie, bool in_place = false) {
  Cluster nodes(lie);

  CHECK(nodes.load() == 0);
  CHECK(nodes.reader.metric(kWhole) == 0);
  check_nothing_is_left(nodes.reader, 0);
  const std::size_t lies = nodes.liar.lies();
  CHECK(lies > 0);
  if (!in_place) CHECK(lies_in_pool(nodes.reader) == 0);
  nodes.check_own_blocks();

  // Greeted again, the liar is read from first again, and then the other node.
  REQUIRE(nodes.reader.metric_becomes(
      fmt::format("pegaflow_peer_greetings_total{{peer=\"{}\"}}", nodes.at[0]), 2));
  EngineAt engine(nodes.other, kPiece, kLyingBlocks);
  REQUIRE(engine.engine
              ->save(numbers_from(kFirstLyingBlock, kLyingBlocks), blocks_from(0, kLyingBlocks))
              .blocks == kLyingBlocks);
  CHECK(nodes.load() == kLyingBlocks);
  CHECK(nodes.reader.metric(kWhole) == kLyingBlocks);
  CHECK(nodes.liar.lies() > lies);
  check_nothing_is_left(nodes.reader, 0);
  if (!in_place) CHECK(lies_in_pool(nodes.reader) == 0);
  nodes.check_own_blocks();
}

TEST_SUITE("a node that lies") {
  TEST_CASE("right bytes are accepted from it") {
    Cluster nodes(Lie::kNone);

    CHECK(nodes.load() == kLyingBlocks);
    CHECK(nodes.reader.metric(kWhole) == kLyingBlocks);
    CHECK(nodes.liar.lies() == 0);
    check_nothing_is_left(nodes.reader, 0);
  }

  TEST_CASE("bytes for a request that was never sent are discarded") { check_lie(Lie::kUnasked); }
  TEST_CASE("bytes under the slot of another request are discarded") {
    check_lie(Lie::kOtherPlace);
  }
  TEST_CASE("bytes under an unknown slot are discarded") { check_lie(Lie::kBeyondPlaces); }
  TEST_CASE("more bytes than requested are rejected") { check_lie(Lie::kLonger); }
  TEST_CASE("fewer bytes than requested are rejected") { check_lie(Lie::kShorter); }
  TEST_CASE("bytes that differ from their checksum are rejected") {
    check_lie(Lie::kOtherBytes, true);
  }
  TEST_CASE("a response as a former incarnation is rejected") { check_lie(Lie::kOldLife); }
  TEST_CASE("a response that denies its incarnation is rejected") { check_lie(Lie::kOldVerdict); }

  TEST_CASE("a second response to one request is discarded") {
    Cluster nodes(Lie::kTwice);

    (void)nodes.load();  // Bytes that came before the lie was detected are right.
    CHECK(nodes.liar.lies() > 0);
    CHECK(lies_in_pool(nodes.reader) == 0);
    check_nothing_is_left(nodes.reader, 0);
    nodes.check_own_blocks();
  }
}

}  // namespace
}  // namespace pegaflow::testing
