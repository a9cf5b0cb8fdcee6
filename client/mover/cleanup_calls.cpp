#include "client/mover/cleanup_calls.h"

#include "base/log.h"
#include "capnp/wire/codec.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

}  // namespace

template <typename Params, typename Results>
void CleanupCalls::send_and_log(capnp::Request<Params, Results>&& request, const char* what) {
  tasks_.add(
      link_.call(kj::mv(request), deadline_, what, [](auto& answer) { return read_done(answer); })
          .then([what](Result<void>&& done) {
            if (!done) kLog.debug("{} failed error=\"{}\"", what, to_string(done.error()));
          }));
}

void CleanupCalls::abandon(const JobId& job) {
  if (!link_.is_connected()) return;  // The next hello reports it.
  auto request = link_.session().abandonRequest();
  write_job(job, request.initJob());
  send_and_log(kj::mv(request), "abandon");
}

void CleanupCalls::publish_nothing(const JobId& job) {
  auto request = link_.session().publishRequest();
  write_job(job, request.initJob());
  send_and_log(kj::mv(request), "publish");
}

void CleanupCalls::release(std::uint64_t pin) {
  if (!link_.is_connected()) return;  // The next hello reports it.
  auto request = link_.session().releaseRequest();
  request.setPin(pin);
  send_and_log(kj::mv(request), "release");
}

void CleanupCalls::report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places) {
  auto request = link_.session().corruptRequest();
  request.setPin(pin);
  write_numbers(places, request.initPages(static_cast<unsigned>(places.size())));
  send_and_log(kj::mv(request), "corrupt");
}

}  // namespace pegaflow
