#include "index/events/source.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace pegaflow::index {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

KvBatch batch_of(EventKind kind, std::vector<std::uint64_t> hashes, double timestamp) {
  KvBatch batch;
  batch.timestamp = timestamp;
  batch.wire_bytes = 100 + hashes.size();
  batch.hashes = std::move(hashes);
  KvEvent event;
  event.kind = kind;
  event.block_size = kind == EventKind::kStored ? 16 : 0;
  event.hashes = batch.hashes;
  batch.events.push_back(event);
  return batch;
}

// A source with the actions that it has taken, in words.
struct Rig {
  explicit Rig(Source::Options options = {.can_replay = true}) : source(options) {}

  void live(std::uint64_t sequence, double timestamp = -1) {
    source.live(sequence, batch(sequence, timestamp), now);
  }
  void replay(std::uint64_t sequence) {
    source.replayed(ticket, sequence, batch(sequence, -1), now);
  }
  void end_replay(bool complete = true) { source.replay_ended(ticket, complete, now); }
  // Connected, and the history of `batches` replayed.
  void sync(std::uint64_t batches) {
    source.connected(now);
    actions();
    for (std::uint64_t i = 0; i < batches; ++i) replay(i);
    end_replay();
    actions();
  }
  void answer(std::uint64_t predicted, std::uint64_t reported, int times = 1) {
    for (int i = 0; i < times; ++i) source.answered(4096, predicted, reported, now);
  }
  // "apply 3", "forget", "replay from 4"; changes of trust are left out.
  std::vector<std::string> actions() {
    std::vector<std::string> words;
    for (SourceAction action; source.next(action);) {
      switch (action.kind) {
        case SourceAction::Kind::kApply:
          words.push_back("apply " + std::to_string(action.sequence));
          break;
        case SourceAction::Kind::kForget:
          words.emplace_back("forget");
          break;
        case SourceAction::Kind::kReplay:
          ticket = action.ticket;
          words.push_back("replay from " + std::to_string(action.from));
          break;
        case SourceAction::Kind::kTrust:
          break;
      }
    }
    return words;
  }
  static KvBatch batch(std::uint64_t sequence, double timestamp) {
    return batch_of(EventKind::kStored, {sequence},
                    timestamp < 0 ? static_cast<double>(sequence) : timestamp);
  }

  Source source;
  TimePoint now{};
  std::uint64_t ticket = 0;
};

using Words = std::vector<std::string>;

}  // namespace

TEST_SUITE("Source, first contact") {
  TEST_CASE("the history is replayed, and live batches wait for it") {
    Rig rig;
    rig.source.connected(rig.now);
    CHECK(rig.actions() == Words{"replay from 0"});
    CHECK(rig.source.trust() == Trust::kSyncing);

    rig.live(2);
    rig.replay(0);
    rig.replay(1);
    rig.replay(2);
    CHECK(rig.actions() == Words{"apply 0", "apply 1", "apply 2"});
    rig.end_replay();
    rig.live(3);

    CHECK(rig.actions() == Words{"apply 3"});
    CHECK(rig.source.trust() == Trust::kExact);
    CHECK(rig.source.reason() == "the engine's whole history was replayed");
    CHECK_FALSE(rig.source.wants_full_report());
  }

  TEST_CASE("an engine without history is exact; a first number above 0 is a gap then") {
    Rig rig;
    rig.sync(0);
    CHECK(rig.source.trust() == Trust::kExact);

    rig.live(1);

    CHECK(rig.actions() == Words{"replay from 0"});
  }

  TEST_CASE("a history that begins later is partial, and 32 full reports are requested") {
    Rig rig;
    rig.source.connected(rig.now);
    rig.actions();
    rig.replay(50);
    rig.end_replay();

    CHECK(rig.actions() == Words{"apply 50"});
    CHECK(rig.source.trust() == Trust::kPartial);
    CHECK(rig.source.reason() == "the engine no longer has batches 0 to 49");
    int reports = 0;
    while (rig.source.take_full_report()) ++reports;
    CHECK(reports == 32);
  }

  TEST_CASE("8 answers as predicted end the full reports") {
    Rig rig({.can_replay = false});
    rig.source.connected(rig.now);
    rig.answer(160, 160, 7);
    CHECK(rig.source.wants_full_report());

    rig.answer(160, 170);

    CHECK_FALSE(rig.source.wants_full_report());
  }

  TEST_CASE("a replay that stays silent for 2 s is given up, and held batches are applied") {
    Rig rig;
    rig.source.connected(rig.now);
    rig.live(7);
    rig.actions();
    rig.now += milliseconds(1999);
    rig.source.tick(rig.now);
    CHECK(rig.source.trust() == Trust::kSyncing);
    CHECK(rig.source.next_deadline() == rig.now + milliseconds(1));

    rig.now += milliseconds(1);
    rig.source.tick(rig.now);

    CHECK(rig.actions() == Words{"apply 7"});
    CHECK(rig.source.trust() == Trust::kPartial);
  }

  TEST_CASE("without a replay endpoint only a stream from number 0 is exact") {
    Rig late({.can_replay = false});
    late.source.connected(late.now);
    late.live(5);
    CHECK(late.source.trust() == Trust::kPartial);
    CHECK(late.source.wants_full_report());

    Rig early({.can_replay = false});
    early.source.connected(early.now);
    early.live(0);
    CHECK(early.source.trust() == Trust::kExact);
    CHECK(early.actions() == Words{"apply 0"});
  }
}

TEST_SUITE("Source, gaps") {
  TEST_CASE("0, 1, 4: the hole is replayed, and 4 is applied once") {
    Rig rig;
    rig.sync(0);
    rig.live(0);
    rig.live(1);
    rig.live(4);
    CHECK(rig.actions() == Words{"apply 0", "apply 1", "replay from 2"});

    rig.replay(2);
    rig.replay(3);
    rig.replay(4);

    CHECK(rig.actions() == Words{"apply 2", "apply 3", "apply 4"});
    CHECK(rig.source.trust() == Trust::kExact);
    CHECK(rig.source.stats().filled == 1);
    CHECK(rig.source.held_batches() == 0);
  }

  TEST_CASE("a late batch fills its hole; the replay's answers are ignored") {
    Rig rig;
    rig.sync(1);
    rig.live(2);
    const std::uint64_t ticket = rig.ticket;
    rig.actions();
    rig.live(1);
    CHECK(rig.actions() == Words{"apply 1", "apply 2"});

    rig.source.replayed(rig.ticket, 1, Rig::batch(1, -1), rig.now);
    rig.source.replayed(ticket, 1, Rig::batch(1, -1), rig.now);

    CHECK(rig.actions().empty());
  }

  TEST_CASE("a hole that the engine no longer has: forget, and go on as partial") {
    Rig rig;
    rig.sync(3);
    rig.live(6);
    rig.actions();

    rig.end_replay();

    CHECK(rig.actions() == Words{"forget", "apply 6"});
    CHECK(rig.source.trust() == Trust::kPartial);
    CHECK(rig.source.reason() == "batches 3 to 5 were lost: the engine no longer has them");
    CHECK(rig.source.stats().lost == 3);
    CHECK(rig.source.wants_full_report());
  }

  TEST_CASE("a replay that begins within the hole") {
    Rig rig;
    rig.sync(3);
    rig.live(6);
    rig.actions();

    rig.replay(4);
    rig.replay(5);

    CHECK(rig.actions() == Words{"forget", "apply 4", "apply 5", "apply 6"});
    CHECK(rig.source.reason() == "batch 3 was lost: the engine no longer has them");
  }

  TEST_CASE("a refused replay, and one that is never answered") {
    for (const bool refused : {true, false}) {
      Rig rig;
      rig.sync(3);
      rig.live(4);
      rig.actions();
      if (refused) {
        rig.end_replay(false);
      } else {
        rig.now += seconds(2);
        rig.source.tick(rig.now);
      }
      CHECK(rig.actions() == Words{"forget", "apply 4"});
      CHECK(rig.source.trust() == Trust::kPartial);
    }
  }

  TEST_CASE("without a replay endpoint a lost batch costs what is known") {
    Rig rig({.can_replay = false});
    rig.source.connected(rig.now);
    rig.live(0);
    rig.live(2);

    CHECK(rig.actions() == Words{"apply 0", "forget", "apply 2"});
    CHECK(rig.source.reason() == "batch 1 was lost: the engine has no replay endpoint");
  }

  TEST_CASE("at most 1,024 batches and 64 MiB are held") {
    Rig rig;
    rig.sync(1);
    for (std::uint64_t i = 2; i < 2 + 1024; ++i) rig.live(i);
    CHECK(rig.source.held_batches() == 1024);
    rig.actions();

    rig.live(1026);

    const Words words = rig.actions();
    CHECK(words.front() == "forget");
    CHECK(words.back() == "apply 1026");
    CHECK(words.size() == 1026);
    CHECK(rig.source.held_batches() == 0);
    CHECK(rig.source.trust() == Trust::kPartial);

    Rig bytes({.can_replay = true, .held_bytes = 10'000});
    bytes.sync(1);
    for (std::uint64_t i = 2; i < 100; ++i) bytes.live(i);
    CHECK(bytes.source.held_bytes() <= 10'000);
    CHECK(bytes.source.stats().forgotten > 0);
  }

  TEST_CASE("batches that wait for the history are held within the same limit") {
    Rig rig;
    rig.source.connected(rig.now);
    for (std::uint64_t i = 10; i < 10 + 3000; ++i) {
      rig.live(i);
      REQUIRE(rig.source.held_batches() <= 1024);
    }
    CHECK(rig.source.trust() == Trust::kPartial);
    CHECK(rig.actions().back() == "apply 3009");
  }

  TEST_CASE("a batch that cannot be decoded counts as lost when its turn comes") {
    Rig rig;
    rig.sync(1);
    KvBatch broken;
    broken.undecodable = true;
    broken.wire_bytes = 9;
    rig.source.live(1, std::move(broken), rig.now);
    rig.live(2);

    CHECK(rig.actions() == Words{"forget", "apply 2"});
    CHECK(rig.source.reason() == "batch 1 could not be decoded");
    CHECK(rig.source.stats().undecodable == 1);
  }

  TEST_CASE("an overflow here is a hole without an end: the engine replays to its newest batch") {
    Rig rig;
    rig.sync(3);
    rig.source.overflowed(rig.now);
    CHECK(rig.actions() == Words{"replay from 3"});
    rig.replay(3);
    rig.live(5);
    rig.replay(4);
    rig.end_replay();

    CHECK(rig.actions() == Words{"apply 3", "apply 4", "apply 5"});
    CHECK(rig.source.trust() == Trust::kExact);
    CHECK(rig.source.stats().forgotten == 0);
  }
}

TEST_SUITE("Source, restarts") {
  TEST_CASE("the same batch again is a duplicate, another one with its number a restart") {
    Rig rig;
    rig.sync(3);
    rig.live(1);
    CHECK(rig.actions().empty());
    CHECK(rig.source.stats().duplicates == 1);

    rig.live(0, 1000);

    CHECK(rig.actions() == Words{"forget", "replay from 0"});
    CHECK(rig.source.stats().restarts == 1);
    rig.source.replayed(rig.ticket, 0, Rig::batch(0, 1000), rig.now);
    rig.end_replay();
    CHECK(rig.actions() == Words{"apply 0"});
    CHECK(rig.source.trust() == Trust::kExact);
  }

  TEST_CASE("a batch that is younger than a held one of a higher number is of another process") {
    Rig rig;
    rig.sync(3);
    rig.live(5);
    rig.actions();

    rig.live(3, 1000);

    CHECK(rig.actions() == Words{"forget", "replay from 0"});
  }

  TEST_CASE("a new connection to the same process: nothing is forgotten") {
    Rig rig;
    rig.sync(3);
    rig.source.disconnected(rig.now);
    rig.source.connected(rig.now);
    CHECK(rig.actions() == Words{"replay from 2"});
    rig.live(4);
    CHECK(rig.source.gives_credit());

    rig.replay(2);
    rig.replay(3);
    rig.end_replay();

    CHECK(rig.actions() == Words{"apply 3", "apply 4"});
    CHECK(rig.source.trust() == Trust::kExact);
    CHECK(rig.source.stats().forgotten == 0);
  }

  TEST_CASE("a new connection to another process whose numbers continue") {
    Rig rig;
    rig.sync(3);
    rig.source.disconnected(rig.now);
    rig.source.connected(rig.now);
    rig.actions();
    rig.live(3, 1003);
    CHECK(rig.actions().empty());

    rig.source.replayed(rig.ticket, 2, Rig::batch(2, 1002), rig.now);

    CHECK(rig.actions() == Words{"forget", "replay from 0"});
    CHECK(rig.source.reason() ==
          "another process answers at the engine's address: the engine's history is being "
          "replayed");
  }

  TEST_CASE("a new process that has published less: the replay is empty") {
    Rig rig;
    rig.sync(3);
    rig.source.disconnected(rig.now);
    rig.source.connected(rig.now);
    rig.actions();

    rig.end_replay();

    CHECK(rig.actions() == Words{"forget", "replay from 0"});
  }

  TEST_CASE("a new connection without a replay endpoint, or evidence of the owner") {
    Rig rig({.can_replay = false});
    rig.source.connected(rig.now);
    rig.live(0);
    rig.actions();
    rig.source.disconnected(rig.now);
    rig.source.connected(rig.now);
    CHECK(rig.actions() == Words{"forget"});
    CHECK(rig.source.trust() == Trust::kPartial);

    Rig evidence;
    evidence.sync(2);
    evidence.source.restarted("the engine has a new start time", evidence.now);
    CHECK(evidence.actions() == Words{"forget", "replay from 0"});
  }

  TEST_CASE("answers to a replay of another ticket are ignored") {
    Rig rig;
    rig.source.connected(rig.now);
    rig.actions();
    const std::uint64_t old = rig.ticket;
    rig.source.restarted("a new id", rig.now);
    rig.actions();

    rig.source.replayed(old, 0, Rig::batch(0, -1), rig.now);
    rig.source.replay_ended(old, true, rig.now);

    CHECK(rig.actions().empty());
    CHECK(rig.source.trust() == Trust::kSyncing);
  }
}

TEST_SUITE("Source, trust") {
  TEST_CASE("AllBlocksCleared makes a partial stream exact") {
    Rig rig({.can_replay = false});
    rig.source.connected(rig.now);
    rig.live(5);
    CHECK(rig.source.trust() == Trust::kPartial);

    rig.source.live(6, batch_of(EventKind::kCleared, {}, 6), rig.now);

    CHECK(rig.source.trust() == Trust::kExact);
  }

  TEST_CASE("wrong predictions: one resync, then untrusted with both numbers, until a restart") {
    Rig rig;
    rig.sync(1);
    rig.answer(1600, 0, 32);
    CHECK(rig.actions() == Words{"forget", "replay from 0"});
    CHECK(rig.source.stats().resyncs == 1);
    rig.replay(0);
    rig.end_replay();
    rig.actions();

    rig.answer(1600, 0, 32);

    CHECK(rig.source.trust() == Trust::kUntrusted);
    CHECK(rig.source.reason() ==
          "over 32 requests 51200 cached tokens were predicted, and the engine reported 0");
    CHECK_FALSE(rig.source.gives_credit());
    rig.live(1);
    rig.live(9);
    CHECK(rig.source.trust() == Trust::kUntrusted);
    rig.source.restarted("a new start time", rig.now);
    CHECK(rig.source.trust() == Trust::kSyncing);
  }

  TEST_CASE("errors of a quarter are tolerated, and a good window arms the resync again") {
    Rig rig;
    rig.sync(1);
    rig.answer(1000, 750, 100);
    CHECK(rig.actions().empty());

    rig.answer(1000, 0, 32);
    CHECK(rig.source.stats().resyncs == 1);
    rig.actions();
    rig.end_replay();
    rig.answer(1000, 1000, 32);
    rig.answer(1000, 0, 32);
    CHECK(rig.source.stats().resyncs == 2);
    CHECK(rig.source.trust() != Trust::kUntrusted);
  }

  TEST_CASE("a partial stream is not judged by blocks that it does not know") {
    Rig rig({.can_replay = false});
    rig.source.connected(rig.now);
    rig.answer(0, 4000, 100);
    CHECK(rig.source.trust() == Trust::kPartial);
    rig.answer(4000, 0, 32);
    CHECK(rig.source.stats().resyncs == 1);
  }

  TEST_CASE("no event while prompts are computed: full reports, then untrusted, then events") {
    Rig rig;
    rig.sync(1);
    rig.live(1);
    rig.now += seconds(60);
    rig.source.tick(rig.now);
    CHECK(rig.source.trust() == Trust::kExact);

    for (int i = 0; i < 4; ++i) rig.source.answered(4096, 0, 0, rig.now);
    rig.source.tick(rig.now);
    CHECK(rig.source.wants_full_report());
    CHECK(rig.source.trust() == Trust::kExact);
    for (int i = 0; i < 4; ++i) rig.source.answered(4096, 0, 0, rig.now);
    rig.source.tick(rig.now);
    CHECK(rig.source.trust() == Trust::kUntrusted);
    CHECK(rig.source.reason() == "no event for 60 s while the engine computed 8 prompts");

    rig.actions();
    rig.live(2);
    CHECK(rig.actions() == Words{"forget", "replay from 0"});
    CHECK(rig.source.trust() == Trust::kSyncing);
  }

  TEST_CASE("answers from the cache alone are no reason for events") {
    Rig rig;
    rig.sync(1);
    rig.now += seconds(600);
    for (int i = 0; i < 100; ++i) rig.source.answered(4096, 4080, 4080, rig.now);
    rig.source.tick(rig.now);
    CHECK_FALSE(rig.source.wants_full_report());
  }

  TEST_CASE("events of another rank") {
    Rig rig({.can_replay = true, .rank = 0});
    rig.sync(1);
    KvBatch batch = Rig::batch(1, -1);
    batch.rank = 3;

    rig.source.live(1, std::move(batch), rig.now);

    CHECK(rig.actions() == Words{"forget"});
    CHECK(rig.source.trust() == Trust::kUntrusted);
    CHECK(rig.source.reason() == "events of rank 3 arrive on the stream of rank 0");
  }

  TEST_CASE("a removed source forgets and ignores everything") {
    Rig rig;
    rig.sync(2);
    rig.source.remove(rig.now);
    CHECK(rig.actions() == Words{"forget"});
    rig.live(2);
    rig.source.connected(rig.now);
    rig.source.overflowed(rig.now);
    CHECK(rig.actions().empty());
    CHECK(rig.source.trust() == Trust::kGone);
  }
}

TEST_SUITE("Source, selection of events") {
  TEST_CASE("groups other than attention, and other media, are left out and counted") {
    Rig rig;
    rig.sync(0);
    KvBatch batch;
    batch.hashes = {1, 2, 3, 4};
    const auto add = [&](EventKind kind, GroupKind group_kind, std::uint32_t group, Medium medium) {
      KvEvent event;
      event.kind = kind;
      event.medium = medium;
      event.group_kind = group_kind;
      event.group = group;
      event.block_size = 16;
      event.hashes = batch.hashes;
      batch.events.push_back(event);
    };
    add(EventKind::kStored, GroupKind::kAttention, 0, Medium::kGpu);
    add(EventKind::kStored, GroupKind::kOther, 1, Medium::kGpu);
    add(EventKind::kRemoved, GroupKind::kUnnamed, 1, Medium::kGpu);
    add(EventKind::kRemoved, GroupKind::kUnnamed, 0, Medium::kGpu);
    add(EventKind::kRemoved, GroupKind::kUnnamed, 7, Medium::kGpu);
    add(EventKind::kStored, GroupKind::kAttention, 0, Medium::kHost);

    rig.source.live(0, std::move(batch), rig.now);

    SourceAction action;
    while (rig.source.next(action) && action.kind != SourceAction::Kind::kApply) {
    }
    REQUIRE(action.batch.events.size() == 2);
    CHECK(action.batch.events[0].kind == EventKind::kStored);
    CHECK(action.batch.events[1].kind == EventKind::kRemoved);
    CHECK(action.batch.events[1].group == 0U);
    CHECK(rig.source.stats().other_groups == 3);
    CHECK(rig.source.stats().other_media == 1);
  }

  TEST_CASE("a stream whose history is incomplete continues from another router's place") {
    Rig known;
    known.sync(3);
    for (std::uint64_t i = 3; i < 8; ++i) known.live(i);
    REQUIRE(known.source.position());
    const Source::Position place = *known.source.position();
    CHECK(place.sequence == 7);
    CHECK(place.is_exact);

    Rig rig;
    rig.source.connected(rig.now);
    rig.actions();
    CHECK_FALSE(rig.source.resume(place, rig.now));
    for (std::uint64_t i = 6; i < 9; ++i) rig.replay(i);
    rig.end_replay();
    rig.actions();
    CHECK(rig.source.trust() == Trust::kPartial);
    CHECK(rig.source.resume(place, rig.now));
    CHECK(rig.actions() == std::vector<std::string>{"forget", "replay from 7"});
    CHECK(rig.source.trust() == Trust::kExact);
    CHECK(rig.source.reason() == "continued from another router's snapshot at batch 7");
    rig.live(9);
    for (std::uint64_t i = 7; i < 9; ++i) rig.replay(i);
    rig.end_replay();
    CHECK(rig.actions() == std::vector<std::string>{"apply 8", "apply 9"});
    // Only once: nothing is missing now.
    CHECK_FALSE(rig.source.resume(place, rig.now));
  }

  TEST_CASE("a place of another process, or one that the engine no longer has, is not kept") {
    Rig known;
    known.sync(8);
    Source::Position place = *known.source.position();
    Rig rig;
    rig.source.connected(rig.now);
    rig.actions();
    for (std::uint64_t i = 6; i < 9; ++i) rig.replay(i);
    rig.end_replay();
    rig.actions();

    place.timestamp += 1;
    CHECK_FALSE(rig.source.resume(place, rig.now));
    place.timestamp -= 1;
    place.bytes += 1;
    CHECK_FALSE(rig.source.resume(place, rig.now));

    place.sequence = 2;  // Not known here: the replay tells.
    CHECK(rig.source.resume(place, rig.now));
    rig.actions();
    rig.end_replay();
    CHECK(rig.actions() == std::vector<std::string>{"forget", "replay from 0"});
    CHECK_FALSE(rig.source.gives_credit());
    CHECK_FALSE(rig.source.position());
  }
}

}  // namespace pegaflow::index
