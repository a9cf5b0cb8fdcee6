#include "transport/tcp/reader.h"

#include <algorithm>

#include "base/assert.h"
#include "base/log.h"
#include "transport/fabric_checks.h"
#include "transport/tcp/socket.h"

namespace pegaflow::tcp {
namespace {

constexpr Log kLog{"tcp"};

std::size_t queue_of(Fabric::Priority priority) { return static_cast<std::size_t>(priority); }

}  // namespace

Reader::Reader(const Options& options, Poller& poller, const RegionTable& regions,
               const Clock& clock, Fabric::CompletionSink sink)
    : options_(options),
      poller_(poller),
      regions_(regions),
      clock_(clock),
      sink_(std::move(sink)),
      ended_([this](const Piece& piece, std::optional<Errc> error) { on_ended(piece, error); }) {}

// ---- peers

void Reader::connect(Fabric::PeerId id, PeerAddress address) {
  Peer& peer = peers_[static_cast<std::uint32_t>(id)];
  peer.where = std::move(address);
  peer.links.resize(options_.connections);
  for (Link& link : peer.links) {
    if (!peer.lost) dial(id, peer, link);
  }
}

void Reader::dial(Fabric::PeerId id, Peer& peer, Link& link) {
  const TimePoint now = clock_.now();
  link.redial_at.reset();
  Result<UniqueFd> socket = tcp::dial(peer.where.address);
  if (!socket) return link_broke(id, peer, link, {Errc::kPeerLost, socket.error().detail});
  const int fd = socket->get();
  link.key = poller_.new_key();
  link.events = EPOLLIN | EPOLLOUT;
  Result<void> ready = prepare(fd, options_.user_timeout);
  if (ready) ready = poller_.add(fd, link.key, link.events);
  if (!ready) return link_broke(id, peer, link, {Errc::kPeerLost, ready.error().detail});
  link.requester.emplace(std::move(*socket), peer.where.incarnation, options_.window, now);
  links_[link.key] = {id, static_cast<std::size_t>(&link - peer.links.data())};
  check_links_by(now + options_.connect_timeout);
}

void Reader::link_broke(Fabric::PeerId id, Peer& peer, Link& link, Error error) {
  const bool greeted = link.requester && link.requester->greeted();
  if (link.requester && link.requester->has_ended_piece()) link.breaks = 0;
  const bool other_stands = std::any_of(peer.links.begin(), peer.links.end(), [&](const Link& l) {
    return &l != &link && l.requester && l.requester->greeted();
  });
  if (error.code != Errc::kPeerLost || ++link.breaks >= kMostBreaks ||
      (!greeted && !other_stands)) {
    return lose(id, peer, std::move(error));
  }
  kLog.debug("a connection broke and is dialed again address={} reason={}",
             to_string(peer.where.address), error.detail);
  close_link(link);
  if (greeted) return dial(id, peer, link);
  link.redial_at = clock_.now() + options_.connect_timeout / 8;
  check_links_by(*link.redial_at);
}

bool Reader::disconnect(Fabric::PeerId id) {
  const auto found = peers_.find(static_cast<std::uint32_t>(id));
  if (found == peers_.end()) return false;
  lose(id, found->second, {Errc::kCancelled, "the peer was disconnected"});
  peers_.erase(found);
  return true;
}

void Reader::lose(Fabric::PeerId id, Peer& peer, Error error) {
  if (error.code == Errc::kPeerLost) {
    error.detail = fmt::format("{}: {}", to_string(peer.where.address), error.detail);
  }
  if (!peer.lost) {
    kLog.debug("peer lost address={} reason={}", to_string(peer.where.address), to_string(error));
  }
  // All sockets first: no batch may complete while one of them can still write to it.
  for (Link& link : peer.links) close_link(link);
  for (auto& queue : peer.waiting) queue.clear();
  std::vector<std::uint64_t> ended;
  for (const auto& [number, work] : works_) {
    if (work.batch.peer == id) ended.push_back(number);
  }
  std::sort(ended.begin(), ended.end());
  for (const std::uint64_t number : ended) {
    const auto work = works_.find(number);
    fail_rest(work->second, error.code, error.detail);
    complete(work);
  }
  peer.lost = std::move(error);
}

void Reader::finish() {
  while (!peers_.empty()) disconnect(Fabric::PeerId{peers_.begin()->first});
}

// ---- batches

void Reader::read(Fabric::Batch batch) {
  const std::uint64_t number = ++last_number_;
  Work& work = works_[number];
  work.number = number;
  work.batch = std::move(batch);
  work.completion.ticket = work.batch.ticket;
  work.completion.chunks.resize(work.batch.chunks.size());
  work.pieces_left.resize(work.batch.chunks.size());
  deadlines_.emplace(work.batch.deadline, number);

  const auto found = peers_.find(static_cast<std::uint32_t>(work.batch.peer));
  Peer* const peer = found == peers_.end() ? nullptr : &found->second;
  validate(work, peer);
  if (peer == nullptr) {
    fail_rest(work, Errc::kInvalidArgument, "there is no such peer");
  } else if (peer->lost) {
    fail_rest(work, peer->lost->code, peer->lost->detail);
  } else if (work.batch.deadline <= clock_.now()) {
    fail_rest(work, Errc::kTimeout, "its deadline had passed when it was accepted");
  } else {
    enqueue(*peer, work, false);
    fill(work.batch.peer, *peer);
    return;
  }
  complete(works_.find(number));
}

void Reader::validate(Work& work, const Peer* peer) const {
  for (std::size_t i = 0; i < work.batch.chunks.size(); ++i) {
    const Fabric::Chunk& chunk = work.batch.chunks[i];
    bool good = chunk.size_bytes > 0 &&
                regions_.part(chunk.local_region, chunk.local_offset, chunk.size_bytes).has_value();
    if (good && peer != nullptr) good = has(peer->where.regions, chunk);
    if (good) {
      work.pieces_left[i] = static_cast<std::uint32_t>(
          (chunk.size_bytes + options_.piece_bytes - 1) / options_.piece_bytes);
    } else {
      work.completion.chunks[i] = Errc::kInvalidArgument;
      work.completion.detail = fmt::format("chunk {} is out of range", i);
    }
  }
}

void Reader::enqueue(Peer& peer, Work& work, bool first) {
  if (work.is_waiting) return;
  work.is_waiting = true;
  auto& queue = peer.waiting[queue_of(work.batch.priority)];
  if (first) {
    queue.push_front(work.number);
  } else {
    queue.push_back(work.number);
  }
}

bool Reader::next_piece(Work& work, Piece& piece) const {
  const auto failed = [&](std::size_t chunk) { return work.completion.chunks[chunk].has_value(); };
  while (!work.retries.empty() && failed(work.retries.front().chunk)) work.retries.pop_front();
  if (!work.retries.empty()) {
    piece = work.retries.front();
    return true;
  }
  while (work.next_chunk < work.batch.chunks.size() && failed(work.next_chunk)) {
    ++work.next_chunk;
    work.next_offset = 0;
  }
  if (work.next_chunk == work.batch.chunks.size()) return false;
  const Fabric::Chunk& chunk = work.batch.chunks[work.next_chunk];
  const std::uint64_t size =
      std::min<std::uint64_t>(options_.piece_bytes, chunk.size_bytes - work.next_offset);
  const auto place = regions_.part(chunk.local_region, chunk.local_offset + work.next_offset, size);
  // validate() checked it, and removing a region ends its batches first.
  PEGA_ASSERT(place, "the region of an open batch is gone");
  piece = {.batch = work.number,
           .chunk = static_cast<std::uint32_t>(work.next_chunk),
           .background = work.batch.priority == Fabric::Priority::kBackground,
           .remote_region = chunk.remote_region,
           .remote_offset = chunk.remote_offset + work.next_offset,
           .place = *place};
  return true;
}

Reader::Link* Reader::link_for(Peer& peer, std::size_t size_bytes, bool background) const {
  Link* best = nullptr;
  for (Link& link : peer.links) {
    if (!link.requester || !link.requester->has_room(size_bytes, background)) continue;
    if (best == nullptr || link.requester->open_bytes() < best->requester->open_bytes())
      best = &link;
  }
  return best;
}

void Reader::fill(Fabric::PeerId id, Peer& peer) {
  const TimePoint now = clock_.now();
  for (auto& queue : peer.waiting) {
    while (!queue.empty()) {
      const auto found = works_.find(queue.front());
      PEGA_ASSERT(found != works_.end(), "a batch in the queue has ended");
      Work& work = found->second;
      Piece piece;
      if (!next_piece(work, piece)) {
        queue.pop_front();
        work.is_waiting = false;
        if (work.open == 0) complete(found);
        continue;
      }
      Link* const link = link_for(peer, piece.place.size(), piece.background);
      if (link == nullptr) break;
      link->requester->request(piece, now);
      ++work.open;
      if (!work.retries.empty()) {
        work.retries.pop_front();
        continue;
      }
      work.next_offset += piece.place.size();
      if (work.next_offset == work.batch.chunks[work.next_chunk].size_bytes) {
        ++work.next_chunk;
        work.next_offset = 0;
      }
    }
    // The foreground waits for room, so the background gets none.
    if (!queue.empty()) break;
  }
  flush(id, peer);
}

void Reader::flush(Fabric::PeerId id, Peer& peer) {
  bool broken = false;
  for (Link& link : peer.links) {
    if (!link.requester || !link.requester->greeted()) continue;
    if (link.requester->wants_to_send()) {
      if (const Result<void> sent = link.requester->send_requests(); !sent) {
        link_broke(id, peer, link, sent.error());
        if (peer.lost) return;
        broken = true;
        continue;
      }
    }
    watch(id, peer, link);
    if (peer.lost) return;
  }
  // Requests the pieces that were open there. This recursion ends: a redialed link is used only
  // once it is welcomed.
  if (broken) fill(id, peer);
}

void Reader::watch(Fabric::PeerId id, Peer& peer, Link& link) {
  const std::uint32_t events = EPOLLIN | (link.requester->wants_to_send() ? EPOLLOUT : 0U);
  if (events != link.events) {
    link.events = events;
    if (const Result<void> changed = poller_.change(link.requester->fd(), link.key, events);
        !changed) {
      return lose(id, peer, {Errc::kPeerLost, changed.error().detail});
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
  const auto [id, index] = found->second;
  Peer& peer = peers_.at(static_cast<std::uint32_t>(id));
  Link& link = peer.links[index];
  Result<void> handled;
  if ((events & ~static_cast<std::uint32_t>(EPOLLIN)) != 0 && link.requester->wants_to_send()) {
    handled = link.requester->send_requests();
  }
  if (handled) handled = link.requester->receive(clock_.now(), ended_);
  // Completed pieces are valid, even when the connection broke after them.
  for (const std::uint64_t number : std::exchange(finished_, {})) {
    if (const auto work = works_.find(number); work != works_.end()) complete(work);
  }
  if (handled) {
    watch(id, peer, link);
  } else {
    link_broke(id, peer, link, handled.error());
  }
  if (!peer.lost) fill(id, peer);
  return true;
}

void Reader::on_ended(const Piece& piece, std::optional<Errc> error) {
  Work& work = works_.at(piece.batch);
  --work.open;
  --work.pieces_left[piece.chunk];
  std::optional<Errc>& result = work.completion.chunks[piece.chunk];
  if (error && !result) {
    result = error;
    if (work.completion.detail.empty()) {
      work.completion.detail =
          *error == Errc::kCorrupt
              ? fmt::format("the bytes of chunk {} differ from the peer's", piece.chunk)
              : fmt::format("the peer returned for chunk {}: {}", piece.chunk, to_string(*error));
    }
  }
  if (work.open == 0 && !work.is_waiting) finished_.push_back(work.number);
}

void Reader::fail_rest(Work& work, Errc reason, const std::string& detail) {
  for (std::size_t i = 0; i < work.completion.chunks.size(); ++i) {
    if (work.pieces_left[i] == 0 || work.completion.chunks[i]) continue;
    work.completion.chunks[i] = reason;
    if (work.completion.detail.empty()) work.completion.detail = detail;
  }
}

void Reader::complete(Works::iterator work) {
  deadlines_.erase({work->second.batch.deadline, work->second.number});
  Fabric::Completion completion = std::move(work->second.completion);
  works_.erase(work);
  sink_(std::move(completion));
}

void Reader::cancel(std::uint64_t ticket) {
  const auto found = std::find_if(works_.begin(), works_.end(), [ticket](const auto& entry) {
    return entry.second.batch.ticket == ticket;
  });
  if (found != works_.end()) withdraw(found->first, Errc::kCancelled, "cancelled by its caller");
}

void Reader::forget_region(RegionId region) {
  std::vector<std::uint64_t> ended;
  for (const auto& [number, work] : works_) {
    const auto& chunks = work.batch.chunks;
    if (std::any_of(chunks.begin(), chunks.end(),
                    [region](const Fabric::Chunk& chunk) { return chunk.local_region == region; }))
      ended.push_back(number);
  }
  for (const std::uint64_t number : ended) {
    // The peer of an earlier one may have been lost, and its batches with it.
    if (works_.contains(number)) withdraw(number, Errc::kCancelled, "its region was unregistered");
  }
}

void Reader::withdraw(std::uint64_t number, Errc reason, const std::string& detail) {
  const auto found = works_.find(number);
  Work& work = found->second;
  const Fabric::PeerId id = work.batch.peer;
  Peer& peer = peers_.at(static_cast<std::uint32_t>(id));
  std::vector<Link*> closed;
  for (Link& link : peer.links) {
    if (!link.requester || !link.requester->has_open(number)) continue;
    close_link(link);
    closed.push_back(&link);
  }
  std::erase(peer.waiting[queue_of(work.batch.priority)], number);
  fail_rest(work, reason, detail);
  complete(found);
  for (Link* const link : closed) {
    if (!peer.lost) dial(id, peer, *link);
  }
  if (!peer.lost) fill(id, peer);
}

void Reader::close_link(Link& link) {
  if (!link.requester) return;
  const Poller::Key key = link.key;
  const Fabric::PeerId id = links_.at(key).first;
  Peer& peer = peers_.at(static_cast<std::uint32_t>(id));
  poller_.remove(link.requester->fd());
  const std::vector<Piece> pieces = link.requester->close();
  link.requester.reset();
  links_.erase(key);
  // Backwards, so that the first of them is requested first.
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    Work& work = works_.at(piece->batch);
    --work.open;
    work.retries.push_front(*piece);
    enqueue(peer, work, true);
  }
}

// ---- time

TimePoint Reader::next_time() const noexcept {
  return deadlines_.empty() ? next_check_ : std::min(next_check_, deadlines_.begin()->first);
}

void Reader::on_time(TimePoint now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    withdraw(deadlines_.begin()->second, Errc::kTimeout, "its deadline passed");
  }
  if (now < next_check_) return;
  next_check_ = TimePoint::max();
  for (auto& [number, peer] : peers_) {
    const Fabric::PeerId id{number};
    bool changed = false;
    for (Link& link : peer.links) {
      if (!peer.lost && check_link(id, peer, link, now)) changed = true;
    }
    if (changed && !peer.lost) fill(id, peer);
  }
}

bool Reader::check_link(Fabric::PeerId id, Peer& peer, Link& link, TimePoint now) {
  if (!link.requester) {
    if (link.redial_at && *link.redial_at <= now) {
      dial(id, peer, link);
      return true;
    }
    if (link.redial_at) check_links_by(*link.redial_at);
    return false;
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
    return l.requester && l.requester->greeted() &&
           l.requester->last_received() > now - options_.stall_timeout;
  });
  Error error{Errc::kPeerLost, greeted ? "it stopped responding" : "it does not respond"};
  if (greeted && !other_speaks) {
    lose(id, peer, std::move(error));
  } else {
    link_broke(id, peer, link, std::move(error));
  }
  return true;
}

}  // namespace pegaflow::tcp
