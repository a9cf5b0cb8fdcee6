#pragma once
/// \file
/// The prompts of requests in engines' events and servers' journals: from text to blocks, without
/// a tokenizer.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "index/key.h"
#include "index/text.h"
#include "index/text_index.h"

namespace pegaflow::router {

/// Collects the blocks that engines announce for requests, by their session id, or that servers
/// report of their prompts, and teaches them to a TextIndex. Two requests with one session at a
/// time cannot be told apart and teach nothing. Bounded: beyond kMaxLessons or `max_bytes` new
/// requests, and further blocks of others, teach nothing. Thread-bound.
class KvLessons {
 public:
  static constexpr std::size_t kMaxLessons = 16'384;
  static constexpr std::size_t kMaxBytes = std::size_t{256} << 20U;
  static constexpr std::size_t kMaxBlocks = 131'072;  ///< The limit for one prompt.
  /// Events that come later than this after a request's end are not learned.
  static constexpr Duration kLate = std::chrono::seconds(5);

  struct Stats {
    std::uint64_t learned = 0;    ///< Prompts taught.
    std::uint64_t chains = 0;     ///< Prompts whose blocks a server has reported.
    std::uint64_t orphans = 0;    ///< Events that continue a chain whose beginning is not known.
    std::uint64_t ambiguous = 0;  ///< Requests that shared a session at one time.
    std::uint64_t refused = 0;    ///< Requests and events beyond the bounds.
  };

  /// `texts` outlives the object.
  explicit KvLessons(index::TextIndex& texts, std::size_t max_bytes = kMaxBytes)
      : texts_(texts), max_bytes_(max_bytes) {}

  /// The source of the blocks of a prompt. A pool's names of blocks may be others than the
  /// engine's.
  enum class By : std::uint8_t { kEvents, kChain };
  /// A request with this session was sent. `known` are the keys that its text is known to have.
  void begin(std::string_view session, const index::Text& text,
             const std::vector<index::Key>& known, By by = By::kEvents);
  /// A server reports the blocks of a prompt, by session_name() of its session. Those of sessions
  /// that did not begin here with By::kChain are ignored; false.
  bool reported(std::uint64_t session, std::vector<index::Key> keys);
  /// An engine has stored blocks for the session: `keys` follow the block `parent`, or begin the
  /// prompt.
  void stored(std::string_view session, const index::Key* parent, const index::Key* keys,
              std::size_t count);
  /// The prompt was computed; what follows are blocks of the answer.
  void first_token(std::string_view session);
  /// The request ended; late events are awaited for kLate.
  void end(std::string_view session, TimePoint now);
  /// Teaches what changed, and forgets lessons that ended. Call it several times a second.
  void tick(TimePoint now);

  /// Called with each text that is taught, for the time of the call.
  using OnLearned = std::function<void(const index::Text&, std::span<const index::Key>)>;
  void on_learned(OnLearned call) { on_learned_ = std::move(call); }

  [[nodiscard]] std::size_t size() const noexcept { return lessons_.size(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }

 private:
  struct Lesson {
    std::string bytes;
    index::Text text;
    std::vector<index::Key> chain;  // Starts as what was known, and is replaced from its start.
    std::size_t confirmed = 0;      // So many of its keys were announced or lead to announced ones.
    std::size_t requests = 1;       // With this session now.
    By by = By::kEvents;
    bool is_ambiguous = false;
    bool is_whole = false;  // The prompt was computed: its last block was announced, or soon is.
    bool is_changed = false;
    bool has_ended = false;
    TimePoint ended{};
  };

  void teach(Lesson& lesson);
  static std::size_t size_of(const Lesson& lesson);
  Lesson* find(std::string_view session);

  index::TextIndex& texts_;
  const std::size_t max_bytes_;
  std::unordered_map<std::uint64_t, Lesson> lessons_;  // By session_name().
  std::size_t bytes_ = 0;
  OnLearned on_learned_;
  Stats stats_;
};

}  // namespace pegaflow::router
