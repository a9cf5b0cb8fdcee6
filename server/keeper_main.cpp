// pegaflow-keeper: holds the memory of a pool while its server is restarted.
#include <cstdio>
#include <iostream>
#include <string>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "base/program/options.h"
#include "base/runtime_directories.h"
#include "server/pool/keeper.h"
#include "server/rpc/listener.h"

namespace {

using pegaflow::Errc;
using pegaflow::UniqueFd;
namespace server = pegaflow::server;

struct KeeperOptions {
  std::string addr = "127.0.0.1:50055";
  std::int64_t listen_fd = -1;
};

pegaflow::Result<UniqueFd> listener_of(const KeeperOptions& options) {
  if (options.listen_fd >= 0) {
    const int fd = static_cast<int>(options.listen_fd);
    if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
      return pegaflow::fail(Errc::kInvalidArgument, "--listen-fd {}: no such descriptor", fd);
    }
    return UniqueFd(fd);
  }
  PEGA_TRY_LET(const auto socket,
               server::socket_path(options.addr, pegaflow::RuntimeDirectories::from_environment()));
  return server::listen_as_keeper(server::keeper_path(socket));
}

pegaflow::Result<void> run(int argc, char** argv) {
  KeeperOptions options;
  pegaflow::OptionTable table("pegaflow-keeper",
                              "Holds the pool of a pegaflow-server that runs with --keep yes, so "
                              "that the next server continues with its blocks.");
  table.text("addr", options.addr, "The --addr of the server.");
  table.integer("listen-fd", options.listen_fd, -1, 1 << 20,
                "A socket that listens already, passed by the server that starts this program; -1: "
                "the socket beside that of --addr.");
  PEGA_TRY_LET(const auto next, table.parse(argc, argv, std::cout));
  if (next == pegaflow::OptionTable::Next::kExit) return {};
  PEGA_TRY_LET(UniqueFd listener, listener_of(options));
  return server::Keeper::run(std::move(listener));
}

}  // namespace

int main(int argc, char** argv) {
  const auto done = run(argc, argv);
  if (done) return 0;
  std::fprintf(stderr, "pegaflow-keeper: %s\n", done.error().detail.c_str());
  return 1;
}
