// An engine in one page: saves blocks of its memory, asks what the cache has of a prompt, loads it.
//
//   c++ save_and_load.cpp $(pkg-config --cflags --libs pegaflow) -o save_and_load
//   ./save_and_load /run/pegaflow/50055.sock
//
// The engine here keeps its KV cache in ordinary memory: 2 layers, 16 blocks. A real one computes
// what is missing; this one fills blocks with numbers, so that it can see what came back.
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <poll.h>
#include <unistd.h>

#include "client/cache_session.h"
#include "client/mover.h"
#include "transport/host/host_device.h"

namespace {

using namespace pegaflow;
using std::chrono::seconds;

constexpr std::size_t kLayers = 2;
constexpr std::size_t kBlocks = 16;
constexpr std::size_t kPrompt = 8;            // Blocks of the prompt that is saved and loaded.
constexpr std::size_t kSegmentBytes = 64000;  // Of one block in one layer.

// This program has nothing else to do. An engine has: it keeps the deadlines of LinkOptions, which
// are milliseconds, and computes what is not there by then.
constexpr seconds kPatience{20};

using Memory = std::vector<std::byte>;  // One layer's blocks, one after the other.

/// Where block b of each layer lies; the cache needs to know nothing else about the memory.
Result<PageLayout> layout_of(std::vector<Memory>& layers) {
  std::vector<Segment> segments;
  for (Memory& layer : layers) segments.push_back({layer.data(), kSegmentBytes, kSegmentBytes});
  return PageLayout::create(std::move(segments), kBlocks);
}

/// An engine takes its own chained hash at the end of each block; equal keys mean equal prompts up
/// to there. Ours differ with each run, for the process' number is in them.
std::vector<BlockKey> keys_of_prompt() {
  std::vector<BlockKey> keys(kPrompt);
  for (std::size_t i = 0; i < kPrompt; ++i) {
    const std::uint64_t words[] = {(i + 1) * 0x9E3779B97F4A7C15u, std::uint64_t(::getpid())};
    std::memcpy(keys[i].bytes.data(), words, sizeof words);
  }
  return keys;
}

/// An engine polls take_finished() between its steps; a program without steps waits for its
/// descriptor. Each accepted job is reported exactly once, so this ends.
Mover::Finished wait_for_job(Mover& mover) {
  while (true) {
    std::vector<Mover::Finished> finished = mover.take_finished();
    if (!finished.empty()) return finished.front();
    pollfd readable{mover.finished_fd(), POLLIN, 0};
    ::poll(&readable, 1, -1);
  }
}

LinkOptions link_to(const std::string& socket_path) {
  LinkOptions link;
  link.socket_path = socket_path;
  link.instance = "example-" + std::to_string(::getpid());
  link.build = "save_and_load 1";
  link.lookup_deadline = link.open_deadline = link.reserve_deadline = kPatience;
  return link;
}

/// Both connect in the background: an engine goes on meanwhile, a program like this one waits.
Result<void> wait_until_connected(Mover& mover, CacheSession& session) {
  if (!mover.wait_for(LinkState::kReady, kPatience)) {
    return fail(Errc::kPeerLost, "the worker is not connected: {}", mover.status().detail);
  }
  if (!session.wait_for(LinkState::kReady, kPatience)) {
    return fail(Errc::kPeerLost, "the scheduler is not connected: {}", session.status().detail);
  }
  return {};
}

/// "Computes" the prompt into blocks 0 to 7 and saves them. They may be used again once the job has
/// been reported, and not before.
Result<void> save(Mover& mover, const std::vector<BlockKey>& keys, std::vector<Memory>& layers) {
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    for (std::size_t i = 0; i < kPrompt * kSegmentBytes; ++i) {
      layers[layer][i] = std::byte((i / kSegmentBytes + 31 * layer + i % 251) & 0xff);
    }
  }
  std::vector<std::uint32_t> blocks(kPrompt);
  std::iota(blocks.begin(), blocks.end(), 0);
  PEGA_TRY(mover.save(Id128::random(), 1, keys, blocks, Device::Event::kNow));
  const Mover::Finished saved = wait_for_job(mover);
  if (saved.error) return tl::unexpected(*saved.error);
  std::printf("saved %zu blocks, %llu bytes\n", saved.blocks, (unsigned long long)saved.bytes);
  return {};
}

/// Asks how much of this prompt the cache has. A lookup holds nothing and returns soon.
Result<void> look_up(CacheSession& session, const std::vector<BlockKey>& keys) {
  PEGA_TRY_LET(const auto asked, session.lookup(keys));
  const auto found = session.take(asked, kPatience);
  if (!found) return fail(Errc::kTimeout, "no answer to the lookup yet: compute the prompt");
  if (!*found) return tl::unexpected(found->error());
  std::printf("found %zu of %zu blocks\n", (*found)->blocks, keys.size());
  return {};
}

/// A claim keeps the blocks until the worker opens it with its load, here into blocks 8 to 15.
/// Returns the number of blocks that were loaded.
Result<std::size_t> load(Mover& mover, CacheSession& session, const std::vector<BlockKey>& keys) {
  PEGA_TRY_LET(const auto wanted, session.claim(keys));
  const auto claim = session.take(wanted, kPatience);
  if (!claim) return fail(Errc::kTimeout, "no answer to the claim yet: compute the prompt");
  if (!*claim) return tl::unexpected(claim->error());
  if ((*claim)->blocks == 0) return fail(Errc::kGone, "evicted in between: compute the prompt");
  std::vector<std::uint32_t> into((*claim)->blocks);
  std::iota(into.begin(), into.end(), std::uint32_t{kPrompt});
  PEGA_TRY(mover.load(1, (*claim)->token, 0, into));
  const Mover::Finished loaded = wait_for_job(mover);
  session.unclaim((*claim)->token);
  if (loaded.error) return tl::unexpected(*loaded.error);  // failed_blocks are to be computed.
  return loaded.blocks;
}

/// Whether the first blocks at 8 to 15 hold what was computed into those at 0 to 7.
Result<void> compare(const std::vector<Memory>& layers, std::size_t blocks) {
  const std::size_t bytes = blocks * kSegmentBytes;
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    const std::byte* const computed = layers[layer].data();
    if (std::memcmp(computed + kPrompt * kSegmentBytes, computed, bytes) != 0) {
      return fail(Errc::kCorrupt, "layer {} came back different", layer);
    }
  }
  std::printf("loaded %zu blocks, each as it was saved\n", blocks);
  return {};
}

Result<void> run(const std::string& socket_path) {
  std::vector<Memory> layers(kLayers, Memory(kBlocks * kSegmentBytes));
  PEGA_TRY_LET(PageLayout layout, layout_of(layers));

  // One mover a worker, one session for the scheduler, in one process or in two.
  const LinkOptions link = link_to(socket_path);
  Mover::Options options;
  options.link = link;
  options.load_patience = kPatience;
  options.factors = {{"model", "example"}, {"dtype", "bytes"}};  // Equal lists share blocks.
  PEGA_TRY_LET(const auto device, HostDevice::create({}));
  PEGA_TRY_LET(const auto mover, Mover::start(options, std::move(layout), *device));
  PEGA_TRY_LET(const auto session, CacheSession::start(link));
  PEGA_TRY(wait_until_connected(*mover, *session));

  const std::vector<BlockKey> keys = keys_of_prompt();
  PEGA_TRY(save(*mover, keys, layers));
  PEGA_TRY(look_up(*session, keys));
  PEGA_TRY_LET(const std::size_t loaded, load(*mover, *session, keys));
  return compare(layers, loaded);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s SOCKET_OF_PEGAFLOW_SERVER\n", argv[0]);
    return 2;
  }
  const pegaflow::Result<void> done = run(argv[1]);
  if (!done) std::fprintf(stderr, "%s\n", pegaflow::to_string(done.error()).c_str());
  return done ? 0 : 1;
}
