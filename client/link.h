#pragma once
/// \file
/// One connection to the server after the other: hello, deadlines, breaker, reconnection.

#include <memory>
#include <string>
#include <utility>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "capnp/cache.capnp.h"
#include "capnp/wire/deadline.h"
#include "client/breaker.h"
#include "client/link_options.h"
#include "client/status_board.h"

namespace pegaflow {

/// Keeps a client connected as long as it lives.
///
/// The Role decides what is done with a connection: attach, or register and map the pool. After any
/// end of a connection, Role::end() resolves before the next hello, so that `quiesced` is true
/// whenever it is sent.
///
/// Bound to its KJ thread. Every failure that a server can cause is handled here or returned as an
/// Error; an exception from run() is a bug.
class Link {
 public:
  /// Called on the same thread.
  class Role {
   public:
    /// Prepares the session that the server has granted. The link is ready once this resolves.
    /// Errors: kBusy, kTimeout and kPeerLost are tried again with a new connection after
    /// reconnect_interval, sooner just after a session was lost, any other after refused_interval.
    /// The promise may be dropped; end() follows in each case.
    virtual kj::Promise<Result<void>> begin() = 0;

    /// The connection is over, or is to be closed: begins nothing new. Resolves once nothing that
    /// began under it can still access the pool.
    virtual kj::Promise<void> end() = 0;

   protected:
    ~Role() = default;
  };

  struct Identity {
    const char* side = "";  ///< "scheduler" or "worker", for logs.
    Id128 process = Id128::random();
    /// The pidfd of this process, by which the server detects its end; -1: a client that only looks
    /// up.
    int pidfd = -1;
    bool is_quiet = false;  ///< Logs nothing above the debug level.
  };

  /// All arguments outlive the link.
  Link(kj::AsyncIoContext& io, const LinkOptions& options, const Identity& identity,
       StatusBoard& board, Role& role);
  ~Link() noexcept(false);

  /// Connects and reconnects until close(). Call it once.
  kj::Promise<void> run();

  /// Ends the connection in order: Role::end(), goodbye, disconnect. run() resolves after it.
  void close();

  /// Checks whether requests can be sent now; calls that clean up are always sent.
  /// Errors: kPeerLost when there is no server or the breaker is open, kBusy when the server does
  /// not read its requests.
  Result<void> may_ask() const;

  /// Whether there is a session to call: from hello's answer to the end of the connection.
  [[nodiscard]] bool is_connected() const;

  /// Whether the server still has its end of the socket open, as the kernel reports it: the loop
  /// may not have read the end of the stream yet.
  [[nodiscard]] bool is_up() const;

  /// Reports in the status what begin() is waiting for.
  void waits_for(std::string what) { say(LinkState::kConnecting, std::move(what)); }

  /// Ends the connection because the server violated the protocol.
  void drop(Error why);

  /// The version of the wire that this connection speaks; 0 without one.
  [[nodiscard]] std::uint16_t version() const;

  /// Whether the server implements a feature of the list in cache.capnp; false without a
  /// connection.
  [[nodiscard]] bool server_has(std::uint64_t feature) const;

  /// The session of the connection. Only while is_connected().
  wire::Session::Client& session();

  /// Sends a call and reads its answer with `decode(Response&) -> Result<T>`, within the deadline.
  /// After a deadline the server may still execute the call: a later call must return what it
  /// granted. An answer that cannot be read ends the connection.
  /// Errors: kTimeout, kPeerLost, kInternal for an invalid answer, and those of `decode`.
  template <typename Params, typename Results, typename Decode>
  auto call(capnp::Request<Params, Results>&& request, Duration deadline, const char* what,
            Decode decode)
      -> kj::Promise<decltype(decode(kj::instance<capnp::Response<Results>&>()))>;

  /// Sends a description of this side to the server, if that implements notices. It is for display,
  /// so a failure is only logged, at the debug level. Resolves once it is answered.
  kj::Promise<void> describe(const DeviceReport& device);

  [[nodiscard]] kj::Timer& timer() { return io_.provider->getTimer(); }

 private:
  struct Connection;

  kj::Promise<void> attempt();
  kj::Promise<Result<void>> say_hello();
  kj::Promise<Result<void>> serve();
  kj::Promise<void> probe();
  kj::Promise<void> finish(const Result<void>& outcome);
  kj::Promise<void> say_goodbye();
  kj::Promise<void> pause();
  /// The pause before another attempt at a server that may come back.
  [[nodiscard]] Duration soon_again() const;
  void say(LinkState state, std::string detail);

  Result<void> may_send();
  Error on_exception(const kj::Exception& exception, const char* what);
  Error on_deadline_missed(const char* what, Duration deadline);

  kj::AsyncIoContext& io_;
  const LinkOptions& options_;
  const Identity identity_;
  const std::uint16_t minimum_;
  const std::uint16_t maximum_;
  StatusBoard& board_;
  Role& role_;
  SteadyClock clock_;
  Breaker breaker_;

  std::unique_ptr<Connection> connection_;
  Id128 previous_connection_;
  Duration pause_ = Duration::zero();  ///< Before the next attempt.
  /// When the last session ended that had been ready: a server that is restarted is back soon.
  TimePoint lost_since_ = TimePoint::min();
  bool closing_ = false;
  kj::PromiseFulfillerPair<void> close_requested_;
  kj::ForkedPromise<void> closed_;
};

// ---- template

template <typename Params, typename Results, typename Decode>
auto Link::call(capnp::Request<Params, Results>&& request, Duration deadline, const char* what,
                Decode decode)
    -> kj::Promise<decltype(decode(kj::instance<capnp::Response<Results>&>()))> {
  using Outcome = decltype(decode(kj::instance<capnp::Response<Results>&>()));
  if (Result<void> may = may_send(); !may) {
    return Outcome(fail(may.error().code, "{}: {}", what, may.error().detail));
  }
  // Exceptions of the call and of reading its answer are both caused by the server.
  kj::Promise<Outcome> answer =
      kj::Promise<capnp::Response<Results>>(request.send())
          .then([decode](capnp::Response<Results>&& response) { return decode(response); })
          .catch_([this, what](kj::Exception&& exception) {
            return Outcome(tl::unexpected<Error>(on_exception(exception, what)));
          });
  kj::Promise<Outcome> late = deadline_in(timer(), deadline).then([this, what, deadline]() {
    return Outcome(tl::unexpected<Error>(on_deadline_missed(what, deadline)));
  });
  return answer.exclusiveJoin(kj::mv(late));
}

}  // namespace pegaflow
