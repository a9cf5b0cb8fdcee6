#include "transport/tcp/reader.h"

#include <algorithm>

#include "base/assert.h"
#include "base/log.h"
#include "transport/tcp/socket.h"

namespace pegaflow::tcp {
namespace {

using rails::BatchBook;
using rails::Operation;

constexpr Log kLog{"tcp"};

}  // namespace

Reader::Reader(const Options& options, Poller& poller, const RegionTable& regions,
               const Clock& clock, Fabric::CompletionSink sink)
    : options_(options),
      poller_(poller),
      regions_(regions),
      clock_(clock),
      ended_([this](const Piece& piece, std::optional<Errc> error) { on_ended(piece, error); }),
      book_(
          clock, [&regions](RegionId region) { return regions.size_bytes(region); },
          std::move(sink)) {}

// ---- peers

void Reader::connect(Fabric::PeerId id, PeerAddress address) {
  Peer& peer = peers_[static_cast<std::uint32_t>(id)];
  peer.address = address.address;
  peer.incarnation = address.incarnation;
  peer.regions = std::move(address.regions);
  peer.links.resize(options_.connections);
  for (Link& link : peer.links) {
    if (!peer.lost) dial(peer, link);
  }
}

void Reader::dial(Peer& peer, Link& link) {
  const TimePoint now = clock_.now();
  Result<UniqueFd> socket = tcp::dial(peer.address);
  if (!socket) return link_broke(peer, link, {Errc::kPeerLost, socket.error().detail});
  const int fd = socket->get();
  link.key = poller_.new_key();
  link.events = EPOLLIN | EPOLLOUT;
  Result<void> ready = prepare(fd, options_.user_timeout);
  if (ready) ready = poller_.add(fd, link.key, link.events);
  if (!ready) return link_broke(peer, link, {Errc::kPeerLost, ready.error().detail});
  link.requester.emplace(std::move(*socket), peer.incarnation, options_.window, now);
  link.state = Link::State::kDialed;
  links_[link.key] = {&peer, &link};
  check_links_by(now + options_.connect_timeout);
}

void Reader::link_broke(Peer& peer, Link& link, Error error) {
  const bool was_up = link.is_up();
  if (link.requester && link.requester->has_ended_piece()) link.breaks = 0;
  const bool other_stands = std::any_of(peer.links.begin(), peer.links.end(),
                                        [&](const Link& l) { return &l != &link && l.is_up(); });
  if (error.code != Errc::kPeerLost || ++link.breaks >= kMostBreaks || (!was_up && !other_stands)) {
    return lose(peer, std::move(error));
  }
  kLog.debug("a connection broke and is dialed again address={} reason={}", to_string(peer.address),
             error.detail);
  close_link(link);
  if (was_up) return dial(peer, link);
  link.state = Link::State::kPaused;
  link.redial_at = clock_.now() + options_.connect_timeout / 8;
  check_links_by(link.redial_at);
}

void Reader::close_link(Link& link) {
  if (link.state == Link::State::kDialed) {
    poller_.remove(link.requester->fd());
    const std::vector<Piece> pieces = link.requester->close();
    link.requester.reset();
    links_.erase(link.key);
    // Backwards, so that the first of them is requested first.
    for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
      book_.give_back(piece->operation, BatchBook::Turn::kFirst);
    }
  }
  link.state = Link::State::kClosed;
}

bool Reader::disconnect(Fabric::PeerId id) {
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end()) return false;
  lose(found->second, {Errc::kCancelled, "the peer was disconnected"});
  peers_.erase(found);
  return true;
}

void Reader::lose(Peer& peer, Error error) {
  if (error.code == Errc::kPeerLost) {
    error.detail = fmt::format("{}: {}", to_string(peer.address), error.detail);
  }
  if (!peer.lost) {
    kLog.debug("peer lost address={} reason={}", to_string(peer.address), to_string(error));
  }
  // All sockets first: no batch may complete while one of them can still write to it.
  for (Link& link : peer.links) close_link(link);
  book_.lose(peer, error);
}

void Reader::finish() {
  while (!peers_.empty()) disconnect(Fabric::PeerId{peers_.begin()->first});
}

// ---- batches

void Reader::read(Fabric::Batch batch) {
  const auto found = peers_.find(static_cast<std::uint32_t>(batch.peer));
  Peer* const peer = found == peers_.end() ? nullptr : &found->second;
  BatchBook::Entry* const entry = book_.add(std::move(batch), peer);
  if (entry == nullptr) return;
  entry->piece_bytes = options_.piece_bytes;
  fill(*peer);
}

void Reader::cancel(std::uint64_t ticket) {
  if (BatchBook::Entry* const entry = book_.find_ticket(ticket)) {
    withdraw(*entry, Errc::kCancelled, "cancelled by its caller");
  }
}

void Reader::forget_region(RegionId region) {
  for (const std::uint64_t number : book_.find_into(region)) {
    // The peer of an earlier one may have been lost, and its batches with it.
    BatchBook::Entry* const entry = book_.find(number);
    if (entry != nullptr) withdraw(*entry, Errc::kCancelled, "its region was unregistered");
  }
}

void Reader::withdraw(BatchBook::Entry& entry, Errc reason, const std::string& detail) {
  Peer& peer = peers_.at(static_cast<std::uint32_t>(entry.batch.peer));
  std::vector<Link*> closed;
  for (Link& link : peer.links) {
    if (!link.requester || !link.requester->has_open(entry.number)) continue;
    close_link(link);
    closed.push_back(&link);
  }
  PEGA_ASSERT(entry.open == 0, "{} pieces are open on no connection", entry.open);
  book_.withdraw(entry, reason, detail);
  for (Link* const link : closed) {
    if (!peer.lost) dial(peer, *link);
  }
  if (!peer.lost) fill(peer);
}

Reader::Link* Reader::link_for(Peer& peer, const Operation& operation) {
  Link* best = nullptr;
  for (Link& link : peer.links) {
    if (!link.requester || !link.requester->has_room(operation.size_bytes, operation.background)) {
      continue;
    }
    if (best == nullptr || link.requester->open_bytes() < best->requester->open_bytes())
      best = &link;
  }
  return best;
}

void Reader::fill(Peer& peer) {
  const TimePoint now = clock_.now();
  for (auto& queue : peer.waiting) {
    while (!queue.empty()) {
      BatchBook::Entry& entry = *queue.front();
      const std::optional<Operation> operation = book_.next(entry);
      if (!operation) continue;  // It has left the queue.
      Link* const link = link_for(peer, *operation);
      if (link == nullptr) break;
      const auto place =
          regions_.part(operation->local_region, operation->local_offset, operation->size_bytes);
      // The book checked it, and removing a region ends its batches first.
      PEGA_ASSERT(place, "the region of an open batch is gone");
      link->requester->request({.operation = *operation, .place = *place}, now);
      book_.begin(entry, *operation);
    }
    // The foreground waits for room, so the background gets none.
    if (!queue.empty()) break;
  }
  flush(peer);
}

void Reader::flush(Peer& peer) {
  bool broken = false;
  for (Link& link : peer.links) {
    if (!link.is_up()) continue;
    if (link.requester->wants_to_send()) {
      if (const Result<void> sent = link.requester->send_requests(); !sent) {
        link_broke(peer, link, sent.error());
        if (peer.lost) return;
        broken = true;
        continue;
      }
    }
    watch(peer, link);
    if (peer.lost) return;
  }
  // Requests the pieces that were open there. This recursion ends: a redialed link is used only
  // once it is welcomed.
  if (broken) fill(peer);
}

void Reader::watch(Peer& peer, Link& link) {
  const std::uint32_t events = EPOLLIN | (link.requester->wants_to_send() ? EPOLLOUT : 0U);
  if (events != link.events) {
    link.events = events;
    if (const Result<void> changed = poller_.change(link.requester->fd(), link.key, events);
        !changed) {
      return lose(peer, {Errc::kPeerLost, changed.error().detail});
    }
  }
  if (const auto since = link.requester->waiting_since()) {
    check_links_by(*since +
                   (link.requester->greeted() ? options_.stall_timeout : options_.connect_timeout));
  }
}

bool Reader::on_event(Poller::Key key, std::uint32_t events) {
  const auto found = links_.find(key);
  if (found == links_.end()) return false;
  Peer& peer = *found->second.first;
  Link& link = *found->second.second;
  Result<void> handled;
  if ((events & ~static_cast<std::uint32_t>(EPOLLIN)) != 0 && link.requester->wants_to_send()) {
    handled = link.requester->send_requests();
  }
  // Pieces that end here are valid, even when the connection breaks after them.
  if (handled) handled = link.requester->receive(clock_.now(), ended_);
  if (handled) {
    watch(peer, link);
  } else {
    link_broke(peer, link, handled.error());
  }
  if (!peer.lost) fill(peer);
  return true;
}

void Reader::on_ended(const Piece& piece, std::optional<Errc> error) {
  if (!error) return book_.done(piece.operation);
  book_.failed(piece.operation, *error, [&piece, code = *error] {
    const std::uint32_t chunk = piece.operation.first_chunk;
    return code == Errc::kCorrupt
               ? fmt::format("the bytes of chunk {} differ from the peer's", chunk)
               : fmt::format("the peer returned for chunk {}: {}", chunk, to_string(code));
  });
}

// ---- time

TimePoint Reader::next_time() const noexcept {
  return std::min(next_check_, book_.next_deadline());
}

void Reader::on_time(TimePoint now) {
  while (BatchBook::Entry* const late = book_.find_late(now)) {
    withdraw(*late, Errc::kTimeout, "its deadline passed");
  }
  if (now < next_check_) return;
  next_check_ = TimePoint::max();
  for (auto& [number, peer] : peers_) {
    bool changed = false;
    for (Link& link : peer.links) {
      if (!peer.lost && check_link(peer, link, now)) changed = true;
    }
    if (changed && !peer.lost) fill(peer);
  }
}

bool Reader::check_link(Peer& peer, Link& link, TimePoint now) {
  if (link.state == Link::State::kClosed) return false;
  if (link.state == Link::State::kPaused) {
    if (link.redial_at > now) {
      check_links_by(link.redial_at);
      return false;
    }
    dial(peer, link);
    return true;
  }
  const auto since = link.requester->waiting_since();
  if (!since) return false;
  const bool greeted = link.requester->greeted();
  const Duration patience = greeted ? options_.stall_timeout : options_.connect_timeout;
  if (*since + patience > now) {
    check_links_by(*since + patience);
    return false;
  }
  if (link.requester->has_unread()) {  // This process was stopped, not the peer.
    link.requester->restart_wait(now);
    check_links_by(now + patience);
    return false;
  }
  const bool other_speaks = std::any_of(peer.links.begin(), peer.links.end(), [&](const Link& l) {
    return l.is_up() && l.requester->last_received() > now - options_.stall_timeout;
  });
  Error error{Errc::kPeerLost, greeted ? "it stopped responding" : "it does not respond"};
  if (greeted && !other_speaks) {
    lose(peer, std::move(error));
  } else {
    link_broke(peer, link, std::move(error));
  }
  return true;
}

}  // namespace pegaflow::tcp
