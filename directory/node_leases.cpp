#include "directory/node_leases.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "base/log.h"

namespace pegaflow::directory {
namespace {

constexpr Log kLog{"directory"};

constexpr std::string_view kPurpose = "lease 1";
constexpr std::size_t kMostAddress = 64;
constexpr std::size_t kMostLanes = 64;
/// Leases of one MGET.
constexpr std::size_t kTogether = 256;
/// Longer entries, which no node wrote, stay: a node does not send that much for them.
constexpr std::size_t kMostRemoved = 4096;
/// Commands at one server, above which entries are left to others.
constexpr std::size_t kMostOpen = 512;
/// Dead entries of others are removed by one reader in so many.
constexpr std::uint64_t kRepairOneIn = 8;

std::string lease_key(NodeNumber number) {
  return {'n', ':', static_cast<char>(number >> 8), static_cast<char>(number)};
}

void put(std::string& text, std::uint64_t number) {
  for (std::size_t i = 8; i-- > 0;) text.push_back(static_cast<char>(number >> (8 * i)));
}

std::uint64_t get(std::string_view text) {
  std::uint64_t number = 0;
  for (const char byte : text) number = number << 8 | static_cast<unsigned char>(byte);
  return number;
}

}  // namespace

std::string Lease::sealed(const Bytes32& key) const {
  std::string text;
  put(text, node.high);
  put(text, node.low);
  text += address;
  text.push_back('\0');
  text += lanes;
  return seal(key, kPurpose, text);
}

std::optional<Lease> Lease::unsealed(std::span<const Bytes32> keys, std::string_view text) {
  const auto bytes = unseal(keys, kPurpose, text);
  if (!bytes || bytes->size() < 17) return {};
  const std::string_view rest = std::string_view(*bytes).substr(16);
  const std::size_t end = rest.find('\0');
  if (end == std::string_view::npos || end > kMostAddress || rest.size() - end > kMostLanes) {
    return {};
  }
  return Lease{.node = {.high = get(bytes->substr(0, 8)), .low = get(bytes->substr(8, 8))},
               .address = std::string(rest.substr(0, end)),
               .lanes = std::string(rest.substr(end + 1))};
}

NodeLeases::NodeLeases(Servers& servers, const Keys& keys, const Options& options,
                       const Clock& clock, Stats& stats, std::mt19937_64& random)
    : servers_(servers),
      keys_(keys),
      options_(options),
      clock_(clock),
      stats_(stats),
      random_(random),
      written_(servers.count()),
      may_extend_(servers.count(), true),
      next_renewal_(clock.now()),
      next_refresh_(clock.now()) {}

const Lease* NodeLeases::find(NodeNumber number, std::uint16_t life) const {
  const auto found = nodes_.find(number);
  if (found == nodes_.end() || found->second.until < clock_.now()) return nullptr;
  const Lease& lease = found->second.lease;
  return life_of(lease.node) == life ? &lease : nullptr;
}

bool NodeLeases::knows_others() const {
  const TimePoint now = clock_.now();
  return std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& each) {
    return each.second.until >= now && each.second.lease.node != options_.own.node;
  });
}

// ---- the lease of this node

/// The answers of all servers to one renewal.
struct NodeLeases::Round {
  NodeNumber number = 0;
  std::size_t open = 0;
  bool is_taken = false;   ///< Another node has it, and this one has to give way.
  std::vector<bool> held;  ///< By server: it has the lease of this node.
};

NodeNumber NodeLeases::candidate() const {
  Bytes32 zero{};
  const std::string text =
      seal(zero, "number 1", options_.own.address + '\0' + std::to_string(attempt_));
  return static_cast<NodeNumber>(get(std::string_view(text).substr(text.size() - 2)));
}

void NodeLeases::renew() {
  next_renewal_ = clock_.now() + options_.renewal;
  auto round = std::make_shared<Round>();
  round->number = number_.value_or(candidate());
  round->held.resize(servers_.count());
  for (std::size_t server = 0; server < servers_.count(); ++server) {
    round->open += servers_.is_ready(server) ? 1 : 0;
  }
  if (round->open == 0) return;
  is_renewing_ = true;
  const std::string key = lease_key(round->number);
  for (std::size_t server = 0; server < servers_.count(); ++server) {
    if (!servers_.is_ready(server)) continue;
    servers_.commands(server).send(std::array<std::string_view, 2>{"GET", key},
                                   [this, round, server](Result<Reply>&& reply) {
                                     read_own(server, *round, reply);
                                     if (--round->open == 0) end_renewal(*round);
                                   });
  }
}

/// Reads what a server has under the number that is to be this node's.
void NodeLeases::read_own(std::size_t server, Round& round, const Result<Reply>& reply) {
  if (reply && reply->is(Reply::Kind::kNil)) {
    if (written_[server]) lapse(server);
    return;
  }
  if (!servers_.expect(reply, Reply::Kind::kText)) return;
  const auto other = Lease::unsealed(keys_.all, reply->text);
  stats_.bad_leases += other ? 0 : 1;
  if (!other) return;
  if (other->address == options_.own.address) {
    // At the start it is the former process at this address.
    if (other->node != options_.own.node && written_[server]) note_twin(*other);
    round.held[server] = reply->text == options_.own.sealed(keys_.anchors);
    return;
  }
  if (!number_ || options_.own.node > other->node) round.is_taken = true;
  if (written_[server]) lapse(server);
}

/// Without a lease members are void: they follow when there is one.
void NodeLeases::lapse(std::size_t server) {
  written_[server] = false;
  if (lapsed_) lapsed_(server);
}

/// Which of the two is found changes with each renewal, and members of the other one are void.
void NodeLeases::note_twin(const Lease& other) {
  ++stats_.conflicts;
  if (std::exchange(twin_, other.node) == other.node) return;
  kLog.error(
      "another server is in the directory with the --peer-listen of this one: give each node an "
      "address of its own address={} node={}",
      other.address, to_string(other.node));
}

void NodeLeases::end_renewal(const Round& round) {
  is_renewing_ = false;
  if (round.is_taken) {
    ++attempt_;
    ++stats_.conflicts;
    number_.reset();
    written_.assign(written_.size(), false);
    next_renewal_ = clock_.now();
    return;
  }
  for (std::size_t server = 0; server < servers_.count(); ++server) {
    if (!servers_.is_ready(server)) continue;
    if (round.held[server] && may_extend_[server]) {
      // Its answer comes first: a lease that ran out meanwhile has the last word.
      add_number(server, round.number, true);
      extend_lease(server, round.number);
    } else {
      set_lease(server, round.number);
      add_number(server, round.number, false);
    }
  }
  if (number_ == round.number) return;
  number_ = round.number;
  kLog.info("this node is in the directory number={} address={}", *number_, options_.own.address);
  if (changed_) changed_();
}

std::string NodeLeases::length_ms() const {
  return std::to_string(
      std::chrono::duration_cast<std::chrono::milliseconds>(options_.length).count());
}

void NodeLeases::set_lease(std::size_t server, NodeNumber number) {
  written_[server] = true;
  servers_.commands(server).send(
      std::array<std::string_view, 5>{"SET", lease_key(number), options_.own.sealed(keys_.anchors),
                                      "PX", length_ms()},
      [this, server](Result<Reply>&& reply) {
        if (!servers_.expect(reply, Reply::Kind::kStatus) && reply) lapse(server);
      });
}

/// A server above its maxmemory denies SET, and not PEXPIRE: without it all nodes would lapse
/// there.
void NodeLeases::extend_lease(std::size_t server, NodeNumber number) {
  servers_.commands(server).send(
      std::array<std::string_view, 3>{"PEXPIRE", lease_key(number), length_ms()},
      [this, server, number](Result<Reply>&& reply) {
        if (reply && reply->is(Reply::Kind::kError) && reply->text.starts_with("NOPERM")) {
          // An ACL of a former release.
          may_extend_[server] = false;
          if (number_ == number) set_lease(server, number);
          return;
        }
        if (!servers_.expect(reply, Reply::Kind::kInteger)) {
          if (reply) lapse(server);
        } else if (reply->integer == 0) {
          // It ran out after it was read.
          lapse(server);
          renew_soon();
        }
      });
}

/// Also tells whether a server takes writes that only extended the lease.
void NodeLeases::add_number(std::size_t server, NodeNumber number, bool is_extended) {
  const std::string member = lease_key(number).substr(2);
  servers_.commands(server).send(std::array<std::string_view, 4>{"ZADD", "n", "0", member},
                                 [this, server, number, is_extended](Result<Reply>&& reply) {
                                   const bool is_added =
                                       servers_.expect(reply, Reply::Kind::kInteger);
                                   if (is_extended && is_added && number_ == number)
                                     written_[server] = true;
                                 });
}

// ---- those of others

void NodeLeases::refresh() {
  next_refresh_ = clock_.now() + std::max(options_.refresh,
                                          options_.refresh_each * static_cast<int>(nodes_.size()));
  for (std::size_t i = 0; i < servers_.count(); ++i) {
    const std::size_t server = turn_++ % servers_.count();
    if (!servers_.is_prompt(server)) continue;
    reading_ = 1;
    servers_.commands(server).send(
        std::array<std::string_view, 7>{"ZRANGEBYLEX", "n", "-", "+", "LIMIT", "0", "65536"},
        [this, server](Result<Reply>&& reply) { read_numbers(server, reply); });
    return;
  }
}

void NodeLeases::read_numbers(std::size_t server, const Result<Reply>& reply) {
  if (!servers_.expect(reply, Reply::Kind::kArray)) {
    reading_ = 0;
    return;
  }
  std::vector<std::string> keys;
  for (const Reply& item : reply->items) {
    if (!item.is(Reply::Kind::kText) || item.text.size() != 2) {
      ++stats_.bad_members;
      remove_number(server, item.text);
      continue;
    }
    keys.push_back("n:" + item.text);
  }
  for (std::size_t from = 0; from < keys.size(); from += kTogether) {
    const std::size_t count = std::min(kTogether, keys.size() - from);
    std::vector<std::string> part(keys.begin() + static_cast<std::ptrdiff_t>(from),
                                  keys.begin() + static_cast<std::ptrdiff_t>(from + count));
    std::vector<std::string_view> arguments{"MGET"};
    arguments.insert(arguments.end(), part.begin(), part.end());
    ++reading_;
    servers_.commands(server).send(arguments, [this, server, part](Result<Reply>&& values) {
      read_leases(server, part, values);
      if (--reading_ == 0) end_refresh();
    });
  }
  if (--reading_ == 0) end_refresh();
}

void NodeLeases::read_leases(std::size_t server, std::span<const std::string> keys,
                             const Result<Reply>& reply) {
  if (!servers_.expect(reply, Reply::Kind::kArray)) {
    has_gap_ = true;
    return;
  }
  if (reply->items.size() != keys.size()) {
    ++stats_.bad_replies;
    has_gap_ = true;
    return;
  }
  const TimePoint until = next_refresh_ + options_.length;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Reply& item = reply->items[i];
    const std::string number = keys[i].substr(2);
    if (item.is(Reply::Kind::kText)) {
      if (auto lease = Lease::unsealed(keys_.all, item.text)) {
        nodes_[static_cast<NodeNumber>(get(number))] = {.lease = std::move(*lease), .until = until};
      } else {
        ++stats_.bad_leases;
      }
      continue;
    }
    if (item.is(Reply::Kind::kNil)) remove_number(server, number);
  }
}

/// A number without a lease, or none at all; one reader in eight removes it.
void NodeLeases::remove_number(std::size_t server, std::string_view number) {
  if (random_() % kRepairOneIn != 0 || number.size() > kMostRemoved) return;
  if (servers_.commands(server).open() >= kMostOpen) return;
  servers_.commands(server).send(
      std::array<std::string_view, 3>{"ZREM", "n", number},
      [this](Result<Reply>&& removed) { servers_.expect(removed, Reply::Kind::kInteger); });
}

void NodeLeases::check(std::size_t server, std::vector<Member> members, Gone gone) {
  std::vector<NodeNumber> numbers;
  for (const Member& each : members) numbers.push_back(each.node);
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  std::vector<std::string> keys;
  for (const NodeNumber number : numbers) keys.push_back(lease_key(number));
  std::vector<std::string_view> arguments{"MGET"};
  arguments.insert(arguments.end(), keys.begin(), keys.end());
  servers_.commands(server).send(arguments, [this, members = std::move(members),
                                             numbers = std::move(numbers),
                                             gone = std::move(gone)](Result<Reply>&& reply) {
    if (!servers_.expect(reply, Reply::Kind::kArray)) return;
    if (reply->items.size() != numbers.size()) {
      ++stats_.bad_replies;
      return;
    }
    std::unordered_map<NodeNumber, std::optional<std::uint16_t>> lives;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const Reply& item = reply->items[i];
      if (item.is(Reply::Kind::kNil)) lives[numbers[i]] = std::nullopt;
      // One that cannot be read says nothing.
      auto lease =
          item.is(Reply::Kind::kText) ? Lease::unsealed(keys_.all, item.text) : std::nullopt;
      if (!lease) continue;
      lives[numbers[i]] = life_of(lease->node);
      nodes_[numbers[i]] = {.lease = std::move(*lease), .until = clock_.now() + options_.length};
    }
    stats_.nodes = nodes_.size();
    std::vector<Member> found;
    for (const Member& member : members) {
      const auto life = lives.find(member.node);
      if (life != lives.end() && life->second != member.life) found.push_back(member);
    }
    if (!found.empty()) gone(found);
  });
}

void NodeLeases::end_refresh() {
  // Nodes that were not read would be taken for dead, and what they announced be removed.
  if (std::exchange(has_gap_, false)) return;
  const TimePoint now = clock_.now();
  std::erase_if(nodes_, [now](const auto& each) { return each.second.until < now; });
  stats_.nodes = nodes_.size();
  known_until_ = next_refresh_ + options_.length;
}

void NodeLeases::step() {
  const TimePoint now = clock_.now();
  if (!options_.own.address.empty() && !is_renewing_ && now >= next_renewal_) renew();
  if (reading_ == 0 && now >= next_refresh_) refresh();
}

TimePoint NodeLeases::next_step() const {
  TimePoint next = reading_ == 0 ? next_refresh_ : TimePoint::max();
  if (!options_.own.address.empty() && !is_renewing_) next = std::min(next, next_renewal_);
  return next;
}

}  // namespace pegaflow::directory
