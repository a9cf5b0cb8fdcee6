#include "directory/announcer.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace pegaflow::directory {
namespace {

/// Dead members are removed by one reader in so many: all readers of an anchor meet them.
constexpr std::uint64_t kRepairOneIn = 8;
/// The rest of a budget that is kept for a burst, in seconds.
constexpr double kBurst = 0.25;
/// Members of a bucket that one search looks at.
constexpr std::size_t kSwept = 512;
constexpr Duration kIdle = std::chrono::milliseconds(200);
/// Anchors that one step checks, and removes unless they were listed: a millisecond.
constexpr std::size_t kUnlistedStep = std::size_t{1} << 14;
/// Longer texts, which no node wrote, stay: a node does not send that much for them.
constexpr std::size_t kMostRemoved = 4096;

}  // namespace

void Announcer::Budget::refill(TimePoint now, double rate) {
  const double passed = std::chrono::duration<double>(now - at).count();
  // One more than the burst: a part of a token is left over at each step, and not lost.
  tokens = std::min(tokens + passed * rate, 1.0 + rate * kBurst);
  at = now;
}

Announcer::Announcer(Servers& servers, NodeLeases& leases, const Keys& keys, const Options& options,
                     const Clock& clock, Stats& stats, std::mt19937_64& random)
    : servers_(servers),
      leases_(leases),
      keys_(keys),
      options_(options),
      clock_(clock),
      stats_(stats),
      random_(random),
      state_(servers.count()) {
  fast_.at = slow_.at = next_step_ = clock.now();
}

// ---- the anchors of this node

void Announcer::take(const Announcement& announcement) {
  switch (announcement.kind) {
    case Announcement::Kind::kSpaceOver:
      return remove_space(announcement.space);
    case Announcement::Kind::kStartOver:
      ++round_;
      unlisted_ = 0;
      return;
    case Announcement::Kind::kListed:
      unlisted_ = own_.size();
      return;
    case Announcement::Kind::kChanges:
      break;
  }
  for (const auto& [key, is_findable] : announcement.blocks) {
    const Anchor anchor = anchor_of(keys_.anchors, announcement.name, announcement.epoch, key);
    if (is_findable) {
      add(anchor, announcement.space);
    } else {
      remove(anchor);
    }
  }
}

void Announcer::forget() {
  ++round_;
  unlisted_ = own_.size();
}

void Announcer::add(Anchor anchor, std::uint32_t space) {
  if (const auto known = places_.find(anchor); known != places_.end()) {
    own_[known->second] = {.anchor = anchor, .space = space, .round = round_};
    return;
  }
  if (own_.size() >= options_.most_anchors) return;
  places_.emplace(anchor, static_cast<std::uint32_t>(own_.size()));
  own_.push_back({.anchor = anchor, .space = space, .round = round_});
  queue(anchor, true);
}

void Announcer::remove(Anchor anchor) {
  const auto found = places_.find(anchor);
  if (found == places_.end()) return;
  const std::uint32_t place = found->second;
  places_.erase(found);
  if (place + 1 != own_.size()) {
    own_[place] = own_.back();
    places_[own_[place].anchor] = place;
    // A rebuilding that has passed the place has not seen what is there now.
    const Server& state = state_[servers_.of(own_[place].anchor)];
    if (state.is_rebuilding && place < state.rebuilt) queue(own_[place].anchor, true);
  }
  own_.pop_back();
  queue(anchor, false);
}

void Announcer::remove_space(std::uint32_t space) {
  for (std::size_t i = own_.size(); i-- > 0;) {
    if (own_[i].space == space) remove(own_[i].anchor);
  }
}

/// From the end on, so that an anchor that takes the place of a removed one was looked at before.
void Announcer::remove_unlisted() {
  unlisted_ = std::min(unlisted_, own_.size());
  const std::size_t end = unlisted_ - std::min(unlisted_, kUnlistedStep);
  for (; unlisted_ > end; --unlisted_) {
    const Own& own = own_[unlisted_ - 1];
    if (own.round != round_) remove(own.anchor);
  }
}

void Announcer::queue(Anchor anchor, bool is_added) {
  const std::size_t server = servers_.of(anchor);
  // A server that is away receives what it misses from rebuild() when it is back; sweep() finds
  // what it keeps too long.
  if (!leases_.number() || !servers_.is_ready(server)) return;
  Server& state = state_[server];
  if (state.writes.size() >= options_.most_writes) {
    stats_.dropped += is_added ? 0 : 1;
    // A rebuilding comes to all that it has not passed.
    if (!is_added) return;
    const bool is_ahead = state.is_rebuilding && places_.at(anchor) >= state.rebuilt;
    if (!is_ahead) rebuild(server);
    return;
  }
  if (state.writes.empty()) next_step_ = clock_.now() + options_.collect;
  state.writes.push_back({.anchor = anchor, .is_added = is_added});
}

// ---- writes

bool Announcer::has_room(std::size_t server) {
  return servers_.is_ready(server) && servers_.commands(server).open() < options_.most_open;
}

void Announcer::write(std::size_t server, const Write& write) {
  const std::string bucket = servers_.bucket(server, write.anchor);
  const std::string member =
      to_text({.anchor = write.anchor, .node = *leases_.number(), .life = leases_.life()});
  auto answer = [this, server](Result<Reply>&& reply) {
    if (servers_.expect(reply, Reply::Kind::kInteger)) return;
    const bool is_refused = reply && reply->is(Reply::Kind::kError);
    // A key of another type stays what it is, however often it is written.
    if (is_refused && reply->text.starts_with("WRONGTYPE")) return;
    if (!reply && reply.error().code == Errc::kPeerLost) return;
    // It was full, or only to be read: all follows when it takes the lease of this node again.
    if (reply) leases_.doubt(server);
    rebuild(server);
  };
  ++(write.is_added ? stats_.added : stats_.removed);
  if (write.is_added) {
    servers_.commands(server).send(std::array<std::string_view, 4>{"ZADD", bucket, "0", member},
                                   std::move(answer));
  } else {
    servers_.commands(server).send(std::array<std::string_view, 3>{"ZREM", bucket, member},
                                   std::move(answer));
  }
}

void Announcer::flush(std::size_t server) {
  std::deque<Write>& writes = state_[server].writes;
  if (!servers_.is_ready(server) || !leases_.number()) {
    writes.clear();
    return;
  }
  while (!writes.empty() && has_room(server)) {
    const Write next = writes.front();
    writes.pop_front();
    if (!next.is_added || leases_.is_written(server)) write(server, next);
  }
}

void Announcer::rebuild(std::size_t server) {
  if (!state_[server].is_rebuilding) ++stats_.rebuilds;
  state_[server].is_rebuilding = true;
  state_[server].rebuilt = 0;
  next_step_ = clock_.now();
}

void Announcer::rebuild() {
  for (std::size_t server = 0; server < state_.size(); ++server) rebuild(server);
}

void Announcer::rebuild_some(std::size_t server) {
  Server& one = state_[server];
  if (!leases_.is_written(server)) return;
  while (one.is_rebuilding && fast_.tokens >= 1 && has_room(server)) {
    if (one.rebuilt >= own_.size()) {
      one.is_rebuilding = false;
      return;
    }
    const Anchor anchor = own_[one.rebuilt++].anchor;
    if (servers_.of(anchor) != server) continue;
    fast_.tokens -= 1;
    write(server, {.anchor = anchor, .is_added = true});
  }
}

void Announcer::repeat_some() {
  while (slow_.tokens >= 1 && !own_.empty()) {
    slow_.tokens -= 1;
    const Anchor anchor = own_[next_repeat_++ % own_.size()].anchor;
    const std::size_t server = servers_.of(anchor);
    if (!has_room(server) || !leases_.is_written(server)) continue;
    ++stats_.repeated;
    write(server, {.anchor = anchor, .is_added = true});
    if (random_() % options_.sweep_one_in == 0) sweep(server, anchor);
  }
}

/// Looks for members of nodes that are gone, which no other reader removes, and for members of this
/// node that it does not have.
void Announcer::sweep(std::size_t server, Anchor anchor) {
  if (leases_.is_known()) search(server, anchor, "-");
}

void Announcer::search(std::size_t server, Anchor anchor, std::string_view from) {
  const std::string bucket = servers_.bucket(server, anchor);
  const std::string most = std::to_string(kSwept);
  const bool is_first = from == "-";
  servers_.commands(server).send(
      std::array<std::string_view, 7>{"ZRANGEBYLEX", bucket, from, "+", "LIMIT", "0", most},
      [this, server, anchor, is_first](Result<Reply>&& reply) {
        if (!servers_.expect(reply, Reply::Kind::kArray)) return;
        clean(server, anchor, *reply);
        // The bucket has more members: all its anchors together come to them.
        const bool has_more = reply->items.size() >= kSwept;
        if (is_first && has_more && has_room(server)) {
          search(server, anchor, range_of(anchor).first);
        }
      });
}

void Announcer::clean(std::size_t server, Anchor anchor, const Reply& reply) {
  std::vector<Member> unknown;
  for (const Reply& item : reply.items) {
    const auto member = member_of(item.text);
    if (!member) {
      ++stats_.bad_members;
      remove_bad(server, anchor, item.text);
    } else if (member->node == leases_.number() && member->life == leases_.life()) {
      if (!has(member->anchor)) remove_member(server, *member);
    } else if (leases_.find(member->node, member->life) == nullptr) {
      unknown.push_back(*member);
    }
  }
  check_members(server, std::move(unknown));
}

void Announcer::repair(std::size_t server, std::vector<Member> members) {
  if (random_() % kRepairOneIn == 0) check_members(server, std::move(members));
}

/// Removes members only after their leases were read: a node may have joined since all were.
void Announcer::check_members(std::size_t server, std::vector<Member> members) {
  if (members.empty() || !has_room(server)) return;
  leases_.check(server, std::move(members), [this, server](const std::vector<Member>& gone) {
    for (const Member& member : gone) remove_member(server, member);
  });
}

void Announcer::remove_member(std::size_t server, const Member& member) {
  if (!has_room(server)) return;
  ++stats_.repaired;
  const std::string bucket = servers_.bucket(server, member.anchor);
  servers_.commands(server).send(
      std::array<std::string_view, 3>{"ZREM", bucket, to_text(member)},
      [this](Result<Reply>&& reply) { servers_.expect(reply, Reply::Kind::kInteger); });
}

void Announcer::remove_bad(std::size_t server, Anchor anchor, const std::string& text) {
  const bool may = has_room(server) && text.size() <= kMostRemoved && !text.empty();
  if (!may || random_() % kRepairOneIn != 0) return;
  ++stats_.repaired;
  const std::string bucket = servers_.bucket(server, anchor);
  servers_.commands(server).send(
      std::array<std::string_view, 3>{"ZREM", bucket, text},
      [this](Result<Reply>&& reply) { servers_.expect(reply, Reply::Kind::kInteger); });
}

void Announcer::step() {
  const TimePoint now = clock_.now();
  if (now < next_step_) return;
  fast_.refill(now, options_.fast_rate);
  const double circle = std::chrono::duration<double>(options_.least_circle).count();
  slow_.refill(now, std::min(options_.slow_rate, static_cast<double>(own_.size()) / circle));
  remove_unlisted();
  bool is_busy = unlisted_ != 0;
  stats_.pending = 0;
  // In turn: one that loses its data again and again takes not all of the budget.
  ++turn_;
  for (std::size_t i = 0; i < state_.size(); ++i) {
    const std::size_t server = (turn_ + i) % state_.size();
    flush(server);
    if (leases_.number()) rebuild_some(server);
    stats_.pending += state_[server].writes.size();
    const bool is_rebuilding = state_[server].is_rebuilding && leases_.is_written(server);
    is_busy = is_busy || !state_[server].writes.empty() || is_rebuilding;
  }
  if (leases_.number()) repeat_some();
  stats_.anchors = own_.size();
  next_step_ = now + (is_busy ? options_.collect : kIdle);
}

TimePoint Announcer::next_step() const { return next_step_; }

}  // namespace pegaflow::directory
