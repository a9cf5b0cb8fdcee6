#pragma once
/// \file
/// Resets, which reach nodes without a link between them through the directory.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "directory/anchor.h"
#include "directory/servers.h"

namespace pegaflow::directory {

/// Writes the epochs that this node knows to every server, and reads the epochs of other nodes.
///
/// Epochs only grow, so the text of one node may replace that of another: a node that knows more
/// writes again. The text is sealed, and an old one that is written back changes nothing.
/// Thread-bound.
class EpochBoard {
 public:
  struct Options {
    Duration check = std::chrono::seconds(2);
  };
  /// `news` receives epochs that another node wrote. All references outlive it.
  EpochBoard(Servers& servers, const Keys& keys, const Options& options, const Clock& clock,
             Stats& stats, std::function<void(const KnownEpochs&)> news);

  /// Sets the epochs that this node knows now.
  void publish(const KnownEpochs& known);
  /// Whether every server has once answered with a text that can be read, or with none: a node that
  /// has lost its own epochs knows them again. One server alone may have lost its data.
  [[nodiscard]] bool is_known() const noexcept;

  void step();
  [[nodiscard]] TimePoint next_step() const noexcept { return next_; }

 private:
  void read(std::size_t server, const Result<Reply>& reply);

  Servers& servers_;
  const Keys& keys_;
  const Options options_;
  const Clock& clock_;
  Stats& stats_;
  const std::function<void(const KnownEpochs&)> news_;
  std::string own_;  ///< As text, without its seal.
  bool has_own_ = false;
  /// The state of one server.
  struct Seen {
    bool is_read = false;
    std::string text{};  ///< The last one that was passed on.
  };
  std::vector<Seen> seen_;  ///< By server.
  TimePoint next_;
};

/// All epochs as bytes, and back; no value for other bytes.
std::string to_text(const KnownEpochs& known);
std::optional<KnownEpochs> epochs_of(std::string_view text);

}  // namespace pegaflow::directory
