#include "server/rpc/client_gate.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include <fcntl.h>

#include <kj/function.h>
#include <kj/memory.h>

#include "base/os/unique_fd.h"
#include "capnp/wire/codec.h"
#include "server/cache/background.h"
#include "server/cache/cache_service.h"
#include "server/direct/direct_reads.h"
#include "server/fetches/fetches.h"
#include "server/pool/pool_keeping.h"
#include "server/rpc/measured.h"
#include "server/rpc/process_watch.h"

namespace pegaflow::server {
namespace {

constexpr std::size_t kMaxBuildBytes = 256;

class GateImpl final : public wire::Gate::Server {
 public:
  GateImpl(SessionContext& context, const Id128& connection, const Peer& peer,
           kj::Function<void()> greeted)
      : context_(context), connection_(connection), peer_(peer), greeted_(kj::mv(greeted)) {}

 protected:
  kj::Promise<void> hello(HelloContext call) override {
    const Measured measured(context_, Method::kHello);
    const auto params = call.getParams();
    auto results = call.getResults();
    results.setMinimum(kWireMinimum);
    results.setMaximum(kWireMaximum);
    results.setFeatures(kFeatures);
    write_id(context_.server, results.initServer());
    results.setBuild(context_.build.c_str());

    const std::uint16_t version = common_version(params.getMinimum(), params.getMaximum());
    if (version == 0) return refuse(call, measured, no_version(params));
    if (std::exchange(said_hello_, true)) {
      return refuse(call, measured,
                    {.code = Errc::kInvalidArgument, .detail = "a second hello on one connection"});
    }
    if (!params.hasHandle()) return accept(call, measured, version, nullptr);
    return params.getHandle().getFd().then(
        [this, call, measured, version](kj::Maybe<int> fd) mutable -> kj::Promise<void> {
          return accept(call, measured, version, watch(fd, read_id(call.getParams().getProcess())));
        });
  }

 private:
  static Error no_version(wire::Hello::Reader params) {
    const bool client_is_older = params.getMaximum() < kWireMinimum;
    return {.code = Errc::kRefused,
            .detail = fmt::format(
                "the client speaks versions {} to {} of the protocol, this server {} to {}: "
                "upgrade the {}",
                params.getMinimum(), params.getMaximum(), kWireMinimum, kWireMaximum,
                client_is_older ? "client" : "server")};
  }

  kj::Promise<void> refuse(HelloContext call, const Measured& measured, const Error& why) {
    kRpcLog.warn("hello refused build=\"{}\" pid={} reason=\"{}\"", build_of(call.getParams()),
                 peer_.pid, why.detail);
    write_error(why, call.getResults().initRefused());
    measured.failed(why);
    return kj::READY_NOW;
  }

  static std::string build_of(wire::Hello::Reader params) {
    const auto text = params.getBuild();
    return {text.begin(), std::min(text.size(), kMaxBuildBytes)};
  }

  /// Returns null when the process cannot be watched: it may look up, but gets no pool.
  std::shared_ptr<ProcessWatch> watch(kj::Maybe<int> fd, const Id128& process) {
    KJ_IF_MAYBE (sent, fd) {
      // A duplicate, since the sent one is closed with its capability.
      UniqueFd own(::fcntl(*sent, F_DUPFD_CLOEXEC, 0));
      if (!own) {
        kRpcLog.warn("a process cannot be watched error=\"{}\"",
                     fail_errno(errno, "duplicate its pidfd").value().detail);
        return nullptr;
      }
      if (context_.keeping != nullptr &&
          !context_.keeping->admit(connection_, process, own.get())) {
        kRpcLog.warn("a process cannot be watched pid={} reason=\"no descriptor is left\"",
                     peer_.pid);
        return nullptr;
      }
      auto started = ProcessWatch::start(
          context_.port, std::move(own), peer_,
          [&context = context_, connection = connection_]() { context.process_gone(connection); });
      if (started) return std::move(*started);
      kRpcLog.warn("a process cannot be watched pid={} reason=\"{}\"", peer_.pid,
                   started.error().detail);
    } else {
      kRpcLog.warn("a process cannot be watched pid={} reason=\"its handle has no descriptor\"",
                   peer_.pid);
    }
    return nullptr;
  }

  kj::Promise<void> accept(HelloContext call, const Measured& measured, std::uint16_t version,
                           std::shared_ptr<ProcessWatch> watched) {
    const auto params = call.getParams();
    const auto done = context_.service.connected(
        connection_, {.process = read_id(params.getProcess()),
                      .previous_connection = read_id(params.getPreviousConnection()),
                      .quiesced = params.getQuiesced(),
                      .build = build_of(params),
                      .watch = watched});
    context_.background.poke();
    if (!done) {
      if (context_.keeping != nullptr) context_.keeping->forget(connection_);
      return refuse(call, measured, done.error());
    }
    auto results = call.getResults();
    results.setVersion(version);
    write_id(connection_, results.initConnection());
    results.setSession(make_session(context_, connection_, version, std::move(watched)));
    greeted_();
    measured.ok();
    kRpcLog.debug("connected build=\"{}\" pid={} version={} connection={}", build_of(params),
                  peer_.pid, version, to_string(connection_));
    return kj::READY_NOW;
  }

  SessionContext& context_;
  Id128 connection_;
  Peer peer_;
  kj::Function<void()> greeted_;
  bool said_hello_ = false;
};

}  // namespace

RpcServer::Service client_service(SessionContext& context) {
  return {.bootstrap =
              [&context](const Id128& connection, const Peer& peer, kj::Function<void()> greeted) {
                return wire::Gate::Client(
                    kj::heap<GateImpl>(context, connection, peer, kj::mv(greeted)));
              },
          .ended =
              [&context](const Id128& connection) {
                context.direct.left(connection);
                context.fetches.left(connection);
                context.service.disconnected(connection);
                context.background.poke();
              }};
}

}  // namespace pegaflow::server
