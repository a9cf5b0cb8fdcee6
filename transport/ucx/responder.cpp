#include "transport/ucx/responder.h"

#include <algorithm>
#include <limits>

#include "base/log.h"
#include "transport/ucx/ucx_error.h"

namespace pegaflow::ucx {
namespace {

constexpr Log kLog{"ucx"};
/// The interval for checking closed endpoints; UCX has no event for their end.
constexpr Duration kClosingCheck = std::chrono::milliseconds(1);

}  // namespace

Responder::Responder(const Options& options, Worker& worker, const Id128& incarnation,
                     const Clock& clock)
    : options_(options),
      worker_(worker),
      incarnation_(incarnation),
      clock_(clock),
      last_path_(Id128::random().low) {}

void Responder::lend(RegionId region, TimePoint until) {
  lent_[static_cast<std::uint32_t>(region)] = until;
}

void Responder::forget(RegionId region) { lent_.erase(static_cast<std::uint32_t>(region)); }

void Responder::revoke(RegionId region, std::function<void()> done) {
  const auto number = static_cast<std::uint32_t>(region);
  const TimePoint now = clock_.now();
  Fence fence{.number = ++last_fence_,
              .region = number,
              .waits_for = {},
              .last = now + options_.fence_timeout,
              .done = std::move(done)};
  for (auto& [id, path] : paths_) {
    // A reader that still reads under an earlier revoked lease delays this fence, too.
    const bool still = std::any_of(fences_.begin(), fences_.end(), [&](const Fence& earlier) {
      return earlier.region == number && earlier.waits_for.contains(id);
    });
    if (path.promised.erase(number) == 0 && !still) continue;
    // The leases of a closing path end with its endpoint.
    fence.waits_for.insert(id);
    if (path.closing) continue;
    path.endpoint->send({.kind = Message::Kind::kRevoke,
                         .to = path.remote_number,
                         .region = number,
                         .value = fence.number});
  }
  check_by(fence.last);
  fences_.push_back(std::move(fence));
  finish_fences();
}

void Responder::finish_fences() {
  std::vector<std::function<void()>> done;
  std::erase_if(fences_, [&](Fence& fence) {
    if (!fence.waits_for.empty()) return false;
    done.push_back(std::move(fence.done));
    return true;
  });
  for (const auto& call : done) call();
}

// ---- messages of readers

void Responder::on_message(const Worker::Arrived& arrived) {
  const Message& message = arrived.message;
  if (message.kind == Message::Kind::kHello) return on_hello(arrived);
  const auto found = paths_.find(message.to);
  if (found == paths_.end() || found->second.closing) return;
  if (message.kind == Message::Kind::kLeaseRequest) return on_lease_request(found->second, message);
  if (message.kind != Message::Kind::kRevoked) return;
  // Messages of one reader keep their order: a confirmation covers all earlier revocations.
  for (Fence& fence : fences_) {
    if (fence.region == message.region && fence.number <= message.value) {
      fence.waits_for.erase(found->first);
    }
  }
  finish_fences();
}

void Responder::on_hello(const Worker::Arrived& arrived) {
  const Message& hello = arrived.message;
  if (paths_.size() >= options_.readers) {
    kLog.debug("a reader's hello is ignored, {} readers are connected", paths_.size());
    return;
  }
  // Checked before UCX unpacks the address, since UCX trusts it. A stranger gets no response: that
  // would need an endpoint to the address that the stranger sent.
  const auto address = open_hello(hello, arrived.rest, incarnation_);
  if (!address) {
    kLog.debug("a reader's hello is ignored reason=\"{}\"", address.error().detail);
    return;
  }
  auto endpoint = Endpoint::connect(worker_, *address);
  if (!endpoint) {
    kLog.debug("cannot connect back to a reader reason={}", endpoint.error().detail);
    return;
  }
  const std::uint64_t number = ++last_path_;
  Path& path = paths_[number];
  path.remote_number = hello.from;
  path.address.assign(address->begin(), address->end());
  path.endpoint = std::move(*endpoint);
  const auto verdict =
      hello.protocol == kProtocol ? Message::Verdict::kWelcome : Message::Verdict::kRefused;
  path.endpoint->send(
      {.kind = Message::Kind::kWelcome, .to = hello.from, .from = number, .verdict = verdict});
  if (verdict == Message::Verdict::kWelcome) return;
  path.close_at = clock_.now() + options_.fence_timeout;
  check_by(*path.close_at);
}

void Responder::on_lease_request(Path& path, const Message& message) {
  if (path.close_at) return;
  const TimePoint now = clock_.now();
  const auto found = lent_.find(message.region);
  std::int64_t left = 0;
  if (found != lent_.end() && found->second > now) {
    // A lease without end has none at the reader either, rather than the rest of this clock's
    // range.
    left = found->second == TimePoint::max() ? std::numeric_limits<std::int64_t>::max()
                                             : (found->second - now).count();
    path.promised.insert(message.region);
  }
  path.endpoint->send({.kind = Message::Kind::kLease,
                       .to = path.remote_number,
                       .region = message.region,
                       .value = left});
}

// ---- time

void Responder::close(Path& path, Endpoint::Close how) {
  if (path.closing) return;
  path.closing = true;
  path.endpoint->close(how);
  check_by(clock_.now());
}

void Responder::check_paths() {
  const TimePoint now = clock_.now();
  if (!worker_.take_break() && now < next_check_) return;
  next_check_ = TimePoint::max();
  for (const Fence& fence : fences_) {
    if (fence.last > now) {
      check_by(fence.last);
      continue;
    }
    for (const std::uint64_t number : fence.waits_for) {
      Path& late = paths_.at(number);
      if (!late.closing)
        kLog.warn("a reader did not confirm a revoked lease in time and is cut off");
      // Its card may read through any of its paths: all paths of that worker are closed.
      for (auto& [id, path] : paths_) {
        if (path.address == late.address) close(path, Endpoint::Close::kNow);
      }
    }
  }
  for (auto& [number, path] : paths_) {
    if (path.endpoint->broken()) close(path, Endpoint::Close::kNow);
    if (path.close_at && *path.close_at <= now) close(path, Endpoint::Close::kFlush);
    if (path.close_at && !path.closing) check_by(*path.close_at);
  }
  bool any_closing = false;
  for (auto at = paths_.begin(); at != paths_.end();) {
    if (at->second.closing && at->second.endpoint->closed()) {
      for (Fence& fence : fences_) fence.waits_for.erase(at->first);
      at = paths_.erase(at);
    } else {
      any_closing = any_closing || at->second.closing;
      ++at;
    }
  }
  if (any_closing) check_by(now + kClosingCheck);
  finish_fences();
}

void Responder::close_all() {
  for (auto& [number, path] : paths_) close(path, Endpoint::Close::kFlush);
}

bool Responder::all_closed() {
  next_check_ = TimePoint::min();
  check_paths();
  return paths_.empty();
}

}  // namespace pegaflow::ucx
