#include "client/decline_notice.h"

#include <optional>
#include <thread>
#include <utility>

#include <unistd.h>

#include "base/log.h"
#include "base/os/mailbox.h"
#include "base/os/thread.h"
#include "capnp/wire/codec.h"
#include "client/link.h"
#include "client/loop.h"
#include "client/status_board.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"notice"};

/// The only command: close.
struct Close {};

/// Bound to its KJ thread.
class NoticeLoop final : private Link::Role {
 public:
  NoticeLoop(kj::AsyncIoContext& io, const LinkOptions& options, const Decline& decline,
             StatusBoard& board, Mailbox<Close>& commands)
      : options_(options),
        decline_(decline),
        link_(io, options, Link::Identity{.side = "notice", .is_quiet = true}, board, *this),
        pump_(io.unixEventPort, commands.fd(),
              [this, &commands] { commands.drain([this](Close&&) { link_.close(); }); }) {}

  kj::Promise<void> run() { return link_.run().exclusiveJoin(pump_.run()); }

 private:
  kj::Promise<Result<void>> begin() override {
    // An older server cannot show notices; its successor receives this one on the next connection.
    if (!link_.server_has(kFeatureNotices)) return Result<void>();
    auto request = link_.session().declineRequest();
    write_decline(decline_, request);
    return link_.call(kj::mv(request), options_.connect_deadline, "decline",
                      [](auto& answer) { return read_done(answer); });
  }
  kj::Promise<void> end() override { return kj::READY_NOW; }

  const LinkOptions& options_;
  const Decline& decline_;
  Link link_;
  MailboxPump pump_;
};

}  // namespace

class DeclineNotice::Impl {
 public:
  Impl(LinkOptions link, Decline decline)
      : options_(std::move(link)), decline_(std::move(decline)), commands_(2) {}

  Result<void> start() {
    PEGA_TRY_LET(thread_, start_thread("pega-notice", [this] { thread_main(); }));
    return {};
  }

  ~Impl() {
    if (!thread_.joinable()) return;
    static_cast<void>(commands_.try_send(Close{}));
    thread_.join();
  }

  [[nodiscard]] bool forked() const noexcept { return ::getpid() != pid_; }
  [[nodiscard]] const StatusBoard& board() const noexcept { return board_; }

 private:
  void thread_main() {
    const std::optional<Error> broken = run_loop([this](kj::AsyncIoContext& io) {
      NoticeLoop loop(io, options_, decline_, board_, commands_);
      loop.run().wait(io.waitScope);
    });
    if (!broken) return;
    board_.set(LinkState::kRetired, to_string(*broken));
    kLog.debug("internal error, a notice ended error=\"{}\"", to_string(*broken));
  }

  const LinkOptions options_;
  const Decline decline_;
  const pid_t pid_ = ::getpid();
  StatusBoard board_;
  Mailbox<Close> commands_;
  std::thread thread_;
};

Result<std::unique_ptr<DeclineNotice>> DeclineNotice::start(const Options& options) {
  PEGA_TRY(validate(options.link));
  const auto reason = parse_decline_reason(options.reason);
  if (!reason) {
    return fail(Errc::kInvalidArgument, "decline: \"{}\" is not a reason", options.reason);
  }
  auto impl = std::make_unique<Impl>(
      options.link, Decline{.instance = options.link.instance,
                            .side = options.is_worker ? wire::Side::WORKER : wire::Side::SCHEDULER,
                            .rank = options.rank,
                            .reason = *reason,
                            .detail = options.detail.substr(0, kMaxNoticeBytes)});
  PEGA_TRY(impl->start());
  return std::unique_ptr<DeclineNotice>(new DeclineNotice(std::move(impl)));
}

DeclineNotice::DeclineNotice(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

DeclineNotice::~DeclineNotice() {
  // A child process does not have the thread: joining it, or destroying its mutexes, never returns.
  if (impl_->forked()) static_cast<void>(impl_.release());
}

LinkStatus DeclineNotice::status() const { return impl_->board().get(); }

}  // namespace pegaflow
