#include "directory/redis/server_info.h"

#include <doctest/doctest.h>

namespace pegaflow::directory {
namespace {

TEST_SUITE("server_info") {
  TEST_CASE("version, mode, policy and limit are read, in whatever sections they come") {
    ServerInfo info;
    info.read("# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\n");
    info.read("# Memory\r\nmaxmemory:1073741824\r\nmaxmemory_policy:allkeys-lru");
    CHECK(info.version == "Redis 7.0.15");
    CHECK(info.mode == "standalone");
    CHECK(info.policy == "allkeys-lru");
    CHECK(info.max_bytes == 1U << 30);
  }

  TEST_CASE("Valkey is named by its own version") {
    ServerInfo info;
    info.read("redis_version:7.2.4\nserver_name:valkey\nvalkey_version:8.0.1\nserver_mode:cluster");
    CHECK(info.version == "Valkey 8.0.1");
    CHECK(info.mode == "cluster");
  }

  TEST_CASE("values that no server has are left out") {
    ServerInfo info;
    info.read("redis_version:\x1b[31m\r\nmaxmemory_policy:" + std::string(100, 'x') +
              "\nmaxmemory:many\n:\n\r\nredis_mode");
    CHECK(info == ServerInfo());
  }
}

}  // namespace
}  // namespace pegaflow::directory
