#include "directory/lookups.h"

#include <algorithm>
#include <array>
#include <utility>

namespace pegaflow::directory {

/// A lookup whose answer is not known yet.
struct Lookups::Open {
  Question question;
  std::vector<std::size_t> probed;  ///< Candidates that were asked for, in both rounds.
  std::vector<bool> found;          ///< By index in `probed`.
  std::size_t waiting = 0;          ///< Replies of the present round.
  unsigned rounds = 0;
  bool is_any_answered = false;
  std::vector<Found::Owner> owners;
};

Lookups::Lookups(Servers& servers, NodeLeases& leases, Announcer& announcer, const Keys& keys,
                 const Clock& clock, Stats& stats, Answer answer)
    : servers_(servers),
      leases_(leases),
      announcer_(announcer),
      keys_(keys),
      clock_(clock),
      stats_(stats),
      answer_(std::move(answer)) {}

void Lookups::ask(Question question) {
  auto open = std::make_shared<Open>();
  open->question = std::move(question);
  ++count_;
  if (!leases_.is_known() || count_ > kMostOpen) return finish(open);
  begin_round(open, first_probes(open->question.candidates));
}

void Lookups::begin_round(const OneOpen& open, std::vector<std::size_t> probes) {
  ++open->rounds;
  const std::size_t first = open->probed.size();
  open->probed.insert(open->probed.end(), probes.begin(), probes.end());
  open->found.resize(open->probed.size());
  // One more, so that replies that come at once do not end the round.
  open->waiting = 1;
  for (std::size_t index = first; index < open->probed.size(); ++index) probe(open, index);
  if (open->waiting > 1) ++stats_.trips;
  if (--open->waiting == 0) end_round(open);
}

void Lookups::probe(const OneOpen& open, std::size_t index) {
  const Question& question = open->question;
  const Anchor anchor = anchor_of(keys_.anchors, question.space, question.epoch,
                                  question.candidates[open->probed[index]].key);
  const std::size_t server = servers_.of(anchor);
  if (!servers_.is_prompt(server)) return;
  ++open->waiting;
  ++stats_.members;
  const std::string bucket = servers_.bucket(server, anchor);
  const Range range = range_of(anchor);
  servers_.commands(server).send(
      std::array<std::string_view, 7>{"ZRANGEBYLEX", bucket, range.first, range.end, "LIMIT", "0",
                                      kMostMembers},
      [this, open, index, anchor, server](Result<Reply>&& reply) {
        if (servers_.expect(reply, Reply::Kind::kArray)) {
          open->is_any_answered = true;
          take(*open, index, anchor, server, *reply);
        }
        if (--open->waiting == 0) end_round(open);
      });
}

void Lookups::take(Open& open, std::size_t index, Anchor anchor, std::size_t server,
                   const Reply& reply) {
  std::vector<Member> unknown;
  for (const Reply& item : reply.items) {
    const auto member = item.is(Reply::Kind::kText) ? member_of(item.text) : std::nullopt;
    if (!member || member->anchor != anchor) {
      ++stats_.bad_members;
      if (!member) announcer_.remove_bad(server, anchor, item.text);
      continue;
    }
    if (member->node == leases_.number() && member->life == leases_.life()) continue;
    const Lease* const lease = leases_.find(member->node, member->life);
    if (lease == nullptr) {
      ++stats_.dead;
      unknown.push_back(*member);
      continue;
    }
    open.found[index] = true;
    const std::uint32_t place = open.question.candidates[open.probed[index]].place;
    const auto known = std::find_if(open.owners.begin(), open.owners.end(),
                                    [&](const auto& owner) { return owner.node == lease->node; });
    if (known == open.owners.end()) {
      open.owners.push_back({.node = lease->node, .address = lease->address, .place = place});
    } else {
      known->place = std::max(known->place, place);
    }
  }
  announcer_.repair(server, std::move(unknown));
}

void Lookups::end_round(const OneOpen& open) {
  if (open->rounds == 1 && clock_.now() < open->question.deadline) {
    auto more = second_probes(open->question.candidates, open->probed, open->found);
    if (!more.empty()) return begin_round(open, std::move(more));
  }
  finish(open);
}

void Lookups::finish(const OneOpen& open) {
  --count_;
  std::vector<Found::Owner>& owners = open->owners;
  std::stable_sort(owners.begin(), owners.end(),
                   [](const auto& one, const auto& other) { return one.place > other.place; });
  if (owners.size() > kMostOwners) owners.resize(kMostOwners);
  Found found{.ticket = open->question.ticket,
              .owners = std::move(owners),
              .is_alone = !leases_.knows_others()};
  if (!found.owners.empty()) {
    found.result = Found::Result::kFound;
    ++stats_.found;
  } else if (open->is_any_answered) {
    found.result = Found::Result::kNone;
    ++stats_.none;
  } else {
    ++stats_.down;
  }
  answer_(std::move(found));
}

}  // namespace pegaflow::directory
