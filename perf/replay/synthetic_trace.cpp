#include "perf/replay/synthetic_trace.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "perf/lib/random_draws.h"

namespace pegaflow::perf {
namespace {

/// Allocates numbers of new blocks. The generators of one trace share it.
class NewBlocks {
 public:
  void append(Prompt& prompt, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) prompt.push_back(next_++);
  }
  Prompt make(std::uint64_t count) {
    Prompt prompt;
    append(prompt, count);
    return prompt;
  }

 private:
  std::uint64_t next_ = 0;
};

/// One kind of workload, request by request.
class Generator {
 public:
  Generator(NewBlocks& blocks, std::uint64_t seed) : blocks_(blocks), draws_(seed) {}
  virtual ~Generator() = default;
  virtual Prompt next() = 0;

 protected:
  std::vector<Prompt> make_prompts(std::size_t count, std::uint64_t low, std::uint64_t high) {
    std::vector<Prompt> prompts;
    for (std::size_t i = 0; i < count; ++i) {
      prompts.push_back(blocks_.make(draws_.between(low, high)));
    }
    return prompts;
  }

  NewBlocks& blocks_;  // NOLINT(*-non-private-member-variables-in-classes): for the kinds below.
  Draws draws_;        // NOLINT(*-non-private-member-variables-in-classes)
};

class Conversation final : public Generator {
 public:
  Conversation(NewBlocks& blocks, std::uint64_t seed) : Generator(blocks, seed) {
    systems_ = make_prompts(5, 1, 4);
  }

  Prompt next() override {
    const double arrival = now_ + draws_.exponential(1);
    Talk talk;
    if (pauses_.empty() || pauses_.top().due > arrival) {
      now_ = arrival;
      talk.prompt = systems_[draws_.below(systems_.size())];
      talk.goes_on = draws_.with_chance(0.5);
    } else {
      talk = pauses_.top();
      pauses_.pop();
      now_ = talk.due;
    }
    const double blocks = std::floor(draws_.lognormal(1.2, 1)) + 1;
    blocks_.append(talk.prompt, static_cast<std::uint64_t>(std::min(blocks, 60.0)));
    Prompt asked = talk.prompt;
    if (talk.goes_on && draws_.with_chance(0.75) && asked.size() < kLongest) {
      talk.due = now_ + draws_.lognormal(std::log(50), 1.2);
      talk.number = ++talks_;
      pauses_.push(std::move(talk));
    }
    return asked;
  }

 private:
  static constexpr std::size_t kLongest = 250;
  struct Talk {
    double due = 0;
    std::uint64_t number = 0;  // Orders talks that are due at the same time.
    Prompt prompt;
    bool goes_on = false;
    bool operator<(const Talk& other) const {  // The top of the queue is its largest.
      return std::pair(due, number) > std::pair(other.due, other.number);
    }
  };

  std::vector<Prompt> systems_;
  std::priority_queue<Talk> pauses_;
  double now_ = 0;
  std::uint64_t talks_ = 0;
};

class SharedPrefix final : public Generator {
 public:
  SharedPrefix(NewBlocks& blocks, std::uint64_t seed)
      : Generator(blocks, seed), popularity_(Weighted::zipf(400, 0.8)) {
    systems_ = make_prompts(400, 4, 32);
  }

  Prompt next() override {
    Prompt prompt = systems_[popularity_.draw(draws_)];
    blocks_.append(prompt, draws_.between(1, 6));
    return prompt;
  }

 private:
  std::vector<Prompt> systems_;
  Weighted popularity_;
};

class Scan final : public Generator {
 public:
  Scan(NewBlocks& blocks, std::uint64_t seed)
      : Generator(blocks, seed), popularity_(Weighted::zipf(300, 1)) {
    prompts_ = make_prompts(300, 5, 20);
  }

  Prompt next() override {
    if (draws_.with_chance(0.25)) return blocks_.make(draws_.between(30, 200));
    Prompt prompt = prompts_[popularity_.draw(draws_)];
    blocks_.append(prompt, 1);
    return prompt;
  }

 private:
  std::vector<Prompt> prompts_;
  Weighted popularity_;
};

class ShiftingZipf final : public Generator {
 public:
  ShiftingZipf(NewBlocks& blocks, std::uint64_t seed)
      : Generator(blocks, seed), popularity_(Weighted::zipf(kDocuments, 0.9)) {
    by_rank_ = make_prompts(kDocuments, 2, 40);
  }

  Prompt next() override {
    if (++requests_ % kShift == 0) shift();
    Prompt prompt = by_rank_[popularity_.draw(draws_)];
    blocks_.append(prompt, draws_.between(1, 4));
    return prompt;
  }

 private:
  static constexpr std::size_t kDocuments = 3000;
  static constexpr std::uint64_t kShift = 1500;

  void shift() {
    for (std::size_t i = 0; i < kDocuments / 10; ++i) {  // Two ranks each.
      std::swap(by_rank_[draws_.below(kDocuments)], by_rank_[draws_.below(kDocuments)]);
    }
    for (std::size_t i = 0; i < kDocuments / 20; ++i) {
      by_rank_[draws_.below(kDocuments)] = blocks_.make(draws_.between(2, 40));
    }
  }

  std::vector<Prompt> by_rank_;
  Weighted popularity_;
  std::uint64_t requests_ = 0;
};

class Agents final : public Generator {
 public:
  Agents(NewBlocks& blocks, std::uint64_t seed) : Generator(blocks, seed) {
    for (const Prompt& system : make_prompts(4, 8, 8)) {
      for (int i = 0; i < 5; ++i) {
        Prompt with_tools = system;
        blocks_.append(with_tools, 6);
        starts_.push_back(std::move(with_tools));
      }
    }
  }

  Prompt next() override {
    if (tasks_.size() < 60 || draws_.with_chance(0.06)) {
      tasks_.push_back({starts_[draws_.below(starts_.size())], draws_.between(1, 30)});
    }
    const auto back = static_cast<std::size_t>(draws_.exponential(5));
    const std::size_t at = draws_.with_chance(0.4)
                               ? draws_.below(tasks_.size())
                               : tasks_.size() - 1 - std::min(back, tasks_.size() - 1);
    if (draws_.with_chance(1.0 / 12)) tasks_.push_back({tasks_[at].prompt, draws_.between(1, 10)});
    Task& task = tasks_[at];
    blocks_.append(task.prompt, draws_.between(1, 4));
    Prompt asked = task.prompt;
    if (--task.steps == 0 || asked.size() > kLongest) {
      tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(at));
    }
    return asked;
  }

 private:
  static constexpr std::size_t kLongest = 200;
  struct Task {
    Prompt prompt;
    std::uint64_t steps = 0;  ///< Left.
  };

  std::vector<Prompt> starts_;
  std::vector<Task> tasks_;  ///< Oldest first.
};

class Loop final : public Generator {
 public:
  Loop(NewBlocks& blocks, std::uint64_t seed) : Generator(blocks, seed) {
    prompts_ = make_prompts(400, 10, 10);
  }
  Prompt next() override { return prompts_[requests_++ % prompts_.size()]; }

 private:
  std::vector<Prompt> prompts_;
  std::size_t requests_ = 0;
};

class Mixed final : public Generator {
 public:
  Mixed(NewBlocks& blocks, std::uint64_t seed)
      : Generator(blocks, seed), shares_(std::array{5.0, 2.0, 2.0, 1.0}) {
    parts_.push_back(std::make_unique<Conversation>(blocks, draws_.next()));
    parts_.push_back(std::make_unique<ShiftingZipf>(blocks, draws_.next()));
    parts_.push_back(std::make_unique<Agents>(blocks, draws_.next()));
    parts_.push_back(std::make_unique<Scan>(blocks, draws_.next()));
  }
  Prompt next() override { return parts_[shares_.draw(draws_)]->next(); }

 private:
  Weighted shares_;
  std::vector<std::unique_ptr<Generator>> parts_;
};

constexpr WorkloadKind kKinds[] = {
    {"conversation", "conversations with pauses, five system prompts"},
    {"shared-prefix", "400 system prompts of unequal popularity, tails that never recur"},
    {"scan", "popular prompts, and one-time documents in between"},
    {"zipf", "documents with shifting popularity"},
    {"agents", "tasks that grow and fork"},
    {"loop", "4,000 blocks repeated in the same order"},
    {"mixed", "conversation, zipf, agents and scan at once"},
};

std::unique_ptr<Generator> make_generator(std::string_view kind, NewBlocks& blocks,
                                          std::uint64_t seed) {
  if (kind == "conversation") return std::make_unique<Conversation>(blocks, seed);
  if (kind == "shared-prefix") return std::make_unique<SharedPrefix>(blocks, seed);
  if (kind == "scan") return std::make_unique<Scan>(blocks, seed);
  if (kind == "zipf") return std::make_unique<ShiftingZipf>(blocks, seed);
  if (kind == "agents") return std::make_unique<Agents>(blocks, seed);
  if (kind == "loop") return std::make_unique<Loop>(blocks, seed);
  if (kind == "mixed") return std::make_unique<Mixed>(blocks, seed);
  return nullptr;
}

}  // namespace

std::span<const WorkloadKind> workload_kinds() { return kKinds; }

Result<RequestTrace> synthesize(std::string_view kind, std::uint64_t seed, std::size_t requests) {
  if (requests == 0) return fail(Errc::kInvalidArgument, "a workload needs at least one request");
  NewBlocks blocks;
  const std::unique_ptr<Generator> generator = make_generator(kind, blocks, seed);
  if (!generator) {
    std::string names;
    for (const WorkloadKind& known : kKinds) {
      names += (names.empty() ? "" : ", ") + std::string(known.name);
    }
    return fail(Errc::kInvalidArgument, "unknown workload '{}'; choose from {}", kind, names);
  }
  RequestTrace trace{.name = fmt::format("{}, seed {}", kind, seed), .requests = {}};
  trace.requests.reserve(requests);
  while (trace.requests.size() < requests) trace.requests.push_back(generator->next());
  return trace;
}

}  // namespace pegaflow::perf
