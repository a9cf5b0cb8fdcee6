#pragma once
/// \file
/// One table of a program's options: the source of flags, file, environment, --print-options,
/// --help and docs/configuration.md. No other part of the program reads the environment.

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"

namespace pegaflow {

/// The options of one program.
///
/// Each option is declared once with its target, which holds the default before parse() and the
/// chosen value after it. Precedence: default < file (`--config`, key = value lines) < environment
/// (PEGA_ and the name in capitals: `--pool-size` is PEGA_POOL_SIZE) < flag.
///
/// Thread-bound. Targets outlive the table.
class OptionTable {
 public:
  /// `about` is the sentence that --help begins with.
  OptionTable(std::string program, std::string about);
  ~OptionTable();
  OptionTable(const OptionTable&) = delete;
  OptionTable& operator=(const OptionTable&) = delete;

  /// Names have no leading dashes. A sentence describes the option's purpose and, for a number, the
  /// reason for its default.
  void text(std::string name, std::string& target, std::string sentence);
  /// The option may be given several times or as a list with commas.
  void list(std::string name, std::vector<std::string>& target, std::string sentence);
  void flag(std::string name, bool& target, std::string sentence);
  void integer(std::string name, std::int64_t& target, std::int64_t minimum, std::int64_t maximum,
               std::string sentence);
  /// "30gb", "512mb", "4096".
  void bytes(std::string name, std::uint64_t& target, std::uint64_t minimum, std::uint64_t maximum,
             std::string sentence);
  /// "250ms", "2s".
  void duration(std::string name, Duration& target, Duration minimum, Duration maximum,
                std::string sentence);
  /// A flag of an older or a later version: accepted, and reported by ignored(). With `takes_value`
  /// it takes a value.
  void ignored(std::string name, bool takes_value, std::string sentence);

  /// The caller's next step after parse().
  enum class Next {
    kRun,   ///< The targets are set.
    kExit,  ///< --help, --version or --print-options: the text is printed, exit code 0.
  };

  /// Reads the three sources and writes the text of --help and the like to `out`.
  /// Errors: kInvalidArgument for an unknown option, a value out of its bounds or of the wrong
  /// kind, an unreadable file; the detail names the option, the value, its source and the fix.
  Result<Next> parse(int argc, const char* const* argv, std::ostream& out);

  /// Whether one of the three sources has the option, even with the value of its default.
  [[nodiscard]] bool is_given(std::string_view name) const;
  /// One sentence for each option that was given and has no effect.
  [[nodiscard]] const std::vector<std::string>& ignored() const noexcept { return ignored_; }

  /// Markdown: one row per option with name, default, bounds, environment variable, sentence.
  [[nodiscard]] std::string markdown() const;

 private:
  struct Option;
  class CommandLine;
  Option& add(std::string name, std::string sentence);
  Result<void> assign(Option& option, const std::string& value, std::string_view source);
  Result<void> read_file(const std::string& file);
  Result<void> read_environment();
  [[nodiscard]] std::string print_options() const;

  std::string program_;
  std::string about_;
  std::vector<std::unique_ptr<Option>> options_;
  std::vector<std::string> ignored_;
};

}  // namespace pegaflow
