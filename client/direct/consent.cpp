#include "client/direct/consent.h"

#include <chrono>
#include <utility>

#include "base/log.h"
#include "base/os/pidfd.h"
#include "base/os/unique_fd.h"
#include "capnp/wire/carried_descriptor.h"
#include "capnp/wire/codec.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// After this time the server answers in any case.
constexpr std::chrono::seconds kPatience{10};

/// Before another attempt while another engine of this process permits a reader, or no descriptor
/// is free.
constexpr kj::Duration kBusyPause = 1 * kj::SECONDS;

}  // namespace

/// A process that is to read next.
struct Consent::Next {
  std::uint64_t reader = 0;  ///< The server's name for it; 0: none.
  wire::ProcessHandle::Client process;
};

void Consent::begin() {
  has_begun_ = true;
  task_ = permit_next(0).eagerlyEvaluate([](kj::Exception&& exception) {
    kLog.warn("other engines can no longer read this one's memory error=\"{}\"",
              exception.getDescription().cStr());
  });
}

void Consent::end() {
  task_ = nullptr;
  if (std::exchange(has_begun_, false)) (void)kernel_.give(-1);  // Ending it cannot fail.
}

kj::Promise<void> Consent::permit_next(std::uint64_t permitted, std::uint64_t refused) {
  if (!link_.is_connected()) return kj::READY_NOW;
  auto request = link_.session().awaitReaderRequest();
  request.setPermitted(permitted);
  request.setRefused(refused);
  return link_
      .call(kj::mv(request), kPatience + deadline_, "await_reader",
            [](auto& answer) -> Result<Next> {
              if (answer.hasError()) return tl::unexpected<Error>(read_error(answer.getError()));
              return Next{answer.getReader(), answer.getProcess()};
            })
      .then([this, permitted](Result<Next>&& next) -> kj::Promise<void> {
        if (next) return permit(kj::mv(*next));
        if (next.error().code == Errc::kTimeout) return permit_next(permitted);
        if (next.error().code == Errc::kPeerLost) return kj::READY_NOW;
        kLog.warn("other engines can no longer read this one's memory error=\"{}\"",
                  to_string(next.error()));
        return kj::READY_NOW;
      });
}

kj::Promise<void> Consent::permit(Next&& next) {
  if (next.reader == 0) {
    (void)kernel_.give(-1);
    return permit_next(0);
  }
  const std::uint64_t reader = next.reader;
  wire::ProcessHandle::Client process = kj::mv(next.process);
  auto descriptor = descriptor_of(process);
  return descriptor.then([this, reader, process = kj::mv(process)](UniqueFd&& pidfd) mutable {
    if (!pidfd) (void)kernel_.give(-1);
    // The server sends one with each name. It does not arrive if none is free here.
    Result<void> given = pidfd ? kernel_.give(pidfd.get())
                               : Result<void>(fail(Errc::kBusy, "no descriptor of it arrived"));
    if (given) {
      is_busy_told_ = false;
      kLog.debug("consented to reads of this engine's memory pid={}",
                 process_of_pidfd(pidfd.get()).value_or(0));
      return permit_next(reader);
    }
    if (given.error().code == Errc::kBusy) {
      if (!std::exchange(is_busy_told_, true)) {
        kLog.warn("this engine permits no other one to read its memory at present error=\"{}\"",
                  to_string(given.error()));
      }
      return link_.timer().afterDelay(kBusyPause).then([this] { return permit_next(0); });
    }
    if (given.error().code != Errc::kGone) {
      kLog.warn("this engine cannot permit another one to read its memory error=\"{}\"",
                to_string(given.error()));
    }
    return permit_next(0, reader);
  });
}

}  // namespace pegaflow
