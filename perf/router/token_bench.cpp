// token_bench: what a prompt of token ids costs the router.
//
//   token_bench [TOKENS [RUNS]]    default: 100,000 tokens in blocks of 16, 201 runs
//
// For each hash mode of an engine it prints a JSON line with the median and the 99th percentile, in
// microseconds, of: reading the body, hashing the tokens into keys, all of KvRouting::begin(), and
// the choice among 16 engines of which one has the prompt. The bound of hashing is the algorithm
// alone over as many bytes. Times are CPU times of the thread.
#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "index/token_keys/sha256.h"
#include "router/body/prompt_text.h"
#include "router/http/json_text.h"
#include "router/kv/kv_routing.h"

namespace pegaflow::router {
namespace {

constexpr std::uint32_t kBlock = 16;
constexpr int kEngines = 16;
constexpr std::string_view kSeed = "a seed of the bench";

double cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

/// Times of one part, by run.
class Times {
 public:
  template <typename Part>
  auto measure(const Part& part) {
    const double begin = cpu_us();
    auto result = part();
    all_.push_back(cpu_us() - begin);
    return result;
  }
  [[nodiscard]] std::string json(std::string_view name) {
    std::sort(all_.begin(), all_.end());
    return fmt::format(R"("{}": {{"p50": {:.1f}, "p99": {:.1f}}})", name, all_[all_.size() / 2],
                       all_[all_.size() * 99 / 100]);
  }

 private:
  std::vector<double> all_;
};

/// The router's index with engines of the model m, of which the first has announced `tokens`.
class Rig {
 public:
  Rig(index::VllmAlgorithm algorithm, const std::vector<std::uint32_t>& tokens)
      : hasher(index::VllmHasher::create(
                   {.algorithm = algorithm, .seed = std::string(kSeed), .block_size = kBlock})
                   .value()) {
    KvStreams streams{
        .add = [](index::StreamId, const index::EventSocket::Stream&) { return Result<void>(); },
        .remove = [](index::StreamId) {},
        .replay = [](index::StreamId, std::uint64_t, std::uint64_t) { return Result<void>(); }};
    kv = KvRouting::create({.index_blocks = 1 << 20, .hash_seeds = {std::string(kSeed)}},
                           std::move(streams))
             .value();
    for (int i = 0; i < kEngines; ++i) {
      engines.push_back(std::make_shared<Engine>(
          EngineUrl::parse(fmt::format("http://10.0.0.{}:8000", i + 1)).value(), Role::kDecode,
          Breaker::Options()));
      engines.back()->models.set({"m"});
      candidates.push_back({engines.back()->id, 0});
    }
    kv->fleet().set_engines(engines, now);
    for (const auto& engine : engines) {
      index::EventAddress address;
      address.endpoint = "tcp://" + engine->url.host + ":5557";
      kv->fleet().set_addresses(engine->id, {address}, "", now);
    }
    for (index::StreamId stream = 1; stream <= kEngines; ++stream) {
      index::Arrival arrival;
      arrival.stream = stream;
      arrival.kind = index::Arrival::Kind::kConnected;
      kv->fleet().arrive(std::move(arrival), now);
    }
    announce(tokens);
  }

  void announce(const std::vector<std::uint32_t>& tokens) {
    index::Arrival arrival;
    arrival.stream = 1;
    arrival.kind = index::Arrival::Kind::kLive;
    std::vector<BlockKey> keys;
    if (!hasher.hash({.tokens = tokens}, keys)) std::abort();
    for (const BlockKey& key : keys) arrival.batch.hashes.push_back(hasher.low64(key));
    arrival.batch.tokens.assign(tokens.begin(), tokens.begin() + kBlock);
    index::KvEvent event;
    event.kind = index::EventKind::kStored;
    event.block_size = kBlock;
    event.hashes = arrival.batch.hashes;
    event.tokens = arrival.batch.tokens;
    arrival.batch.events.push_back(event);
    kv->fleet().arrive(std::move(arrival), now);
  }

  index::VllmHasher hasher;
  TimePoint now{std::chrono::seconds(1'000)};
  std::unique_ptr<KvRouting> kv;
  std::vector<std::shared_ptr<Engine>> engines;
  std::vector<Candidate> candidates;
};

std::string body_of(const std::vector<std::uint32_t>& tokens) {
  std::string body = R"({"model": "m", "max_tokens": 16, "prompt": [)";
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    body += fmt::format("{}{}", i == 0 ? "" : ", ", tokens[i]);
  }
  return body + "]}";
}

int run(std::size_t count, int runs) {
  std::mt19937 random(7);
  std::vector<std::uint32_t> tokens(count);
  for (std::uint32_t& token : tokens) token = 1'000 + random() % 150'000;
  const std::string body = body_of(tokens);
  using index::VllmAlgorithm;
  for (const std::string_view name : {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}) {
    Rig rig(index::vllm_algorithm(name).value(), tokens);
    Times parse;
    Times hash;
    Times begin;
    Times choose;
    Times bound;
    std::vector<BlockKey> hashes;
    const std::vector<std::uint8_t> block(32 + kBlock * 5 + 4);
    for (int i = 0; i < runs; ++i) {
      PromptText prompt = parse.measure([&] {
        const auto members = read_members(body);
        return prompt_text("completions", *members);
      });
      hash.measure([&] { return rig.hasher.hash({.tokens = tokens}, hashes).has_value(); });
      if (name.starts_with("sha256")) {
        bound.measure([&] {
          std::byte last{};
          for (std::size_t at = 0; at < count / kBlock; ++at) last ^= index::sha256(block)[0];
          return last;
        });
      }
      const auto request = begin.measure([&] { return rig.kv->begin(std::move(prompt), "m", {}); });
      const auto where = choose.measure(
          [&] { return rig.kv->choose(rig.candidates, *request, Role::kDecode, rig.now); });
      if (request->hash_mode == 0 || where != 0) {
        fmt::print(stderr, "token_bench: {}: the prompt was not found\n", name);
        return 1;
      }
    }
    fmt::print(R"({{"mode": "{}", "tokens": {}, "body_bytes": {}, "runs": {}, {}, {}, {}, {}{}}})"
               "\n",
               name, count, body.size(), runs, parse.json("parse_us"), hash.json("hash_us"),
               begin.json("begin_us"), choose.json("choose_us"),
               name.starts_with("sha256") ? ", " + bound.json("sha256_alone_us") : "");
  }
  return 0;
}

}  // namespace
}  // namespace pegaflow::router

int main(int count, char** arguments) {
  const long tokens = count > 1 ? std::atol(arguments[1]) : 100'000;
  const int runs = count > 2 ? std::atoi(arguments[2]) : 201;
  if (tokens < 16 || runs < 1) {
    fmt::print(stderr, "usage: token_bench [TOKENS [RUNS]]\n");
    return 2;
  }
  return pegaflow::router::run(static_cast<std::size_t>(tokens), runs);
}
