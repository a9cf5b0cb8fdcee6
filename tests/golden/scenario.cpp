#include "tests/golden/scenario.h"

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include <poll.h>

#include "client/cache_session.h"
#include "client/mover.h"
#include "tests/support/engine_memory.h"
#include "tests/support/patience.h"
#include "tests/support/slow_device.h"

namespace pegaflow::testing {
namespace {

/// Throws unless the expectation `what` holds.
void require(bool is_so, const char* what) {
  if (!is_so) throw std::runtime_error(std::string("the scenario expects: ") + what);
}

std::vector<BlockKey> golden_keys(std::size_t first, std::size_t count) {
  std::vector<BlockKey> keys(count);
  for (std::size_t i = 0; i < count; ++i) keys[i].bytes.fill(static_cast<std::byte>(first + i + 1));
  return keys;
}

template <typename T>
T taken(std::optional<Result<T>> answer, const char* what) {
  require(answer.has_value(), what);
  if (!*answer) throw std::runtime_error(std::string(what) + ": " + to_string(answer->error()));
  return std::move(**answer);
}

LinkOptions golden_link(const std::string& socket) {
  LinkOptions link;
  link.socket_path = socket;
  link.instance = "golden";
  link.build = "golden";
  link.scheduler = {.high = 0x676f6c64656e, .low = 1};
  for (Duration* each : {&link.connect_deadline, &link.lookup_deadline, &link.open_deadline,
                         &link.reserve_deadline}) {
    *each = kHang;
  }
  return link;
}

Mover::Finished next_finished(Mover& mover) {
  for (;;) {
    auto finished = mover.take_finished();
    if (!finished.empty()) return finished.front();
    pollfd wanted{mover.finished_fd(), POLLIN, 0};
    constexpr auto kPatience = std::chrono::duration_cast<std::chrono::milliseconds>(kHang);
    require(::poll(&wanted, 1, static_cast<int>(kPatience.count())) > 0, "a job ends");
  }
}

CacheSession::Answer lookup(CacheSession& session, std::size_t first, std::size_t count) {
  const auto ticket = session.lookup(golden_keys(first, count));
  require(ticket.has_value(), "a lookup is sent");
  return taken(session.take(*ticket, kHang), "lookup");
}

}  // namespace

void run_golden_scenario(const std::string& socket) {
  EngineMemory memory = engine_memory(1, kGoldenPageBytes, 8);
  SlowDevice device;
  const LinkOptions link = golden_link(socket);
  auto started = CacheSession::start(link);
  require(started.has_value(), "a session starts");
  auto session = std::move(*started);
  require(session->wait_for(LinkState::kReady, kHang), "the session is ready");
  Mover::Options options;
  options.link = link;
  options.factors = {{"model", "golden"}};
  options.load_patience = kHang;
  options.verify = Mover::Verify::kAll;
  auto registered = Mover::start(options, memory.layout(), device);
  require(registered.has_value(), "a mover starts");
  Mover& mover = **registered;
  require(mover.wait_for(LinkState::kReady, kHang), "the mover is ready");

  const auto begun = session->journal(0, CacheSession::kJournalEnd);
  require(begun.has_value(), "the journal is requested");
  const auto journal = taken(session->take_journal(*begun, kHang), "journal");
  require(lookup(*session, 0, 3).blocks == 0, "nothing is found before the save");

  const std::vector<std::uint32_t> blocks = {0, 1, 2};
  for (const std::uint32_t block : blocks) memory.fill(block, block + 1);
  require(mover.save(link.scheduler, 1, golden_keys(0, 3), blocks, Device::Event::kNow).has_value(),
          "a save is accepted");
  require(next_finished(mover).blocks == 3, "three blocks are saved");
  const auto wait =
      session->await_job(session->status().server, {link.scheduler, 1}, std::chrono::seconds(2));
  require(wait.has_value(), "the wait is sent");
  const auto over = session->take_wait(*wait, kHang);
  require(over.has_value() && over->has_value(), "the save is over");
  require(lookup(*session, 0, 4).blocks == 3, "three blocks of four are found");

  const auto asked = session->claim(golden_keys(0, 4));
  require(asked.has_value(), "a claim is sent");
  const CacheSession::Answer claim = taken(session->take(*asked, kHang), "claim");
  require(claim.blocks == 3 && !claim.token.is_none(), "three blocks are claimed");
  require(mover.load(1, claim.token, 0, std::vector<std::uint32_t>{4, 5, 6}).has_value(),
          "a load is accepted");
  const Mover::Finished loaded = next_finished(mover);
  require(loaded.blocks == 3 && !loaded.error, "three blocks are loaded");
  for (const std::uint32_t block : {0U, 1U, 2U}) {
    require(memory.holds(block + 4, block + 1), "the loaded blocks have the saved bytes");
  }
  session->unclaim(claim.token);
  require(lookup(*session, 0, 3).blocks == 3, "the blocks stay after the claim");

  device.fail_page(0);
  require(mover
              .save(link.scheduler, 2, golden_keys(8, 1), std::vector<std::uint32_t>{7},
                    Device::Event::kNow)
              .has_value(),
          "a second save is accepted");
  require(next_finished(mover).error.has_value(), "a save whose copy failed is abandoned");
  require(lookup(*session, 8, 1).blocks == 0, "its block is not found");

  const auto later = session->journal(journal.space, journal.position);
  require(later.has_value(), "the journal is requested again");
  const auto said = taken(session->take_journal(*later, kHang), "journal");
  require(said.keys.size() >= 3 && !said.lost, "the journal names the saved blocks");

  require(session->reset_cache(kHang).has_value(), "the cache is reset");
  require(lookup(*session, 0, 3).blocks == 0, "nothing is found after the reset");
  mover.close();
  session.reset();
}

}  // namespace pegaflow::testing
