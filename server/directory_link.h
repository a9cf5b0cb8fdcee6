#pragma once
/// \file
/// The server's side of the directory: announces the blocks of the store, and asks for owners.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include "cluster/found/found_peers.h"
#include "directory/directory.h"
#include "server/cache/cache_service.h"
#include "server/http/nodes_report.h"
#include "server/options.h"

namespace pegaflow::server {

class DirectoryAnnouncements;

/// Owns the Directory and its thread.
///
/// What it announces follows from the store's journal, read every 25 ms (see
/// DirectoryAnnouncements). A question that is not answered within
/// kDeadline counts as unanswered, and no other is asked until the directory has answered anything.
/// Thread-bound: the RPC thread.
class DirectoryLink final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr Duration kDeadline = std::chrono::milliseconds(5);

  struct Plan {
    directory::Directory::Options directory;
    cluster::Networks networks;
  };
  /// The options of the directory, checked. Errors: kInvalidArgument for options that make no
  /// sense, also without --peer-secret-file, --peer-listen and --peer-networks; those of the files.
  static Result<Plan> plan(const ServerOptions& options, const cluster::OwnNode& own,
                           const std::vector<std::string>& lanes);

  /// `changed` is called when the directory has become usable, or ceased to be. All references
  /// outlive it. Errors: kInternal when the system refuses the thread; those of keep_journal().
  static Result<std::unique_ptr<DirectoryLink>> start(kj::AsyncIoContext& io, Plan plan,
                                                      CacheService& service,
                                                      std::function<void()> changed);
  ~DirectoryLink() noexcept(false);
  DirectoryLink(const DirectoryLink&) = delete;
  DirectoryLink& operator=(const DirectoryLink&) = delete;

  kj::Promise<cluster::FoundPeers::Finding> find(const Bytes32& space,
                                                 std::span<const BlockKey> keys);
  /// Whether find() would ask.
  [[nodiscard]] bool is_usable() const noexcept { return report_.is_usable && !is_overdue_; }
  /// Whether the first attempt to reach the directory is over.
  [[nodiscard]] bool was_tried() const noexcept;
  /// Whether the resets that it knows are known here.
  [[nodiscard]] bool knows_epochs() const noexcept { return report_.knows_epochs; }
  void set_secrets(const cluster::PeerSecrets& secrets);
  [[nodiscard]] DirectoryReport report() const;

 private:
  using Fulfiller = kj::Own<kj::PromiseFulfiller<cluster::FoundPeers::Finding>>;

  DirectoryLink(kj::AsyncIoContext& io, CacheService& service, std::function<void()> changed);
  kj::Promise<void> read_news();
  void take(directory::News&& news);
  [[nodiscard]] bool has_changed(const directory::Report& report) const;
  void answer(directory::Found&& found);
  void send_keys();
  kj::Promise<void> announce_again(kj::Duration pause);
  void note_epochs();
  void taskFailed(kj::Exception&& exception) override;

  kj::AsyncIoContext& io_;
  CacheService& service_;
  const std::function<void()> changed_;
  const SteadyClock clock_{};
  std::unique_ptr<directory::Directory> directory_;
  kj::Own<kj::UnixEventPort::FdObserver> observer_;
  directory::Report report_;
  bool has_report_ = false;
  std::unordered_map<std::uint64_t, Fulfiller> asked_;
  std::uint64_t last_ticket_ = 0;
  bool is_overdue_ = false;
  std::uint64_t late_ = 0;
  std::uint64_t withheld_ = 0;
  std::uint64_t short_ = 0;
  std::unique_ptr<DirectoryAnnouncements> announcements_;
  std::optional<directory::Keys> new_keys_;   ///< They wait for room in the inbox.
  std::optional<std::uint64_t> epochs_sent_;  ///< Epochs::changes() then.
  kj::TaskSet tasks_;
};

}  // namespace pegaflow::server
