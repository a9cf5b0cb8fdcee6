#include "base/program/options.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <ostream>
#include <system_error>
#include <utility>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "base/assert.h"
#include "base/units.h"
#include "version.h"

namespace pegaflow {

struct OptionTable::Option {
  std::string name;
  std::string sentence;
  std::string kind;    // The form of a value: "TEXT", "SIZE", ...
  std::string bounds;  // Empty when there are none.
  std::function<Result<void>(const std::string&)> set;
  std::function<std::string()> show;
  bool is_flag = false;
  bool is_list = false;
  bool has_no_effect = false;
  std::string default_text;
  std::string source = "default";
  bool is_given = false;
};

namespace {

std::string environment_name(std::string_view option) {
  std::string name = "PEGA_";
  for (const char letter : option) {
    name +=
        letter == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  }
  return name;
}

Result<bool> parse_bool(const std::string& text) {
  if (text == "true" || text == "1" || text == "yes" || text == "on") return true;
  if (text == "false" || text == "0" || text == "no" || text == "off") return false;
  return fail(Errc::kInvalidArgument, "\"{}\" is neither true nor false", text);
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items;
  std::string item;
  for (const char letter : text + ",") {
    if (letter != ',') {
      item += letter;
    } else if (!item.empty()) {
      items.push_back(std::exchange(item, {}));
    }
  }
  return items;
}

std::string join(const std::vector<std::string>& items, std::string_view between = ",") {
  std::string text;
  for (const std::string& item : items) {
    if (!text.empty()) text += between;
    text += item;
  }
  return text;
}

/// The error for words of the command line that belong to no option.
tl::unexpected<Error> refuse_words(const std::vector<std::string>& words) {
  const auto named = std::find_if(words.begin(), words.end(),
                                  [](const std::string& word) { return word.starts_with('-'); });
  if (named != words.end()) {
    return fail(Errc::kInvalidArgument, "unknown option {}; --help lists all options",
                named->substr(0, named->find('=')));
  }
  return fail(Errc::kInvalidArgument, "\"{}\" belongs to no option; --help lists all options",
              words.front());
}

}  // namespace

OptionTable::OptionTable(std::string program, std::string about)
    : program_(std::move(program)), about_(std::move(about)) {}
OptionTable::~OptionTable() = default;

OptionTable::Option& OptionTable::add(std::string name, std::string sentence) {
  options_.push_back(std::make_unique<Option>());
  options_.back()->name = std::move(name);
  options_.back()->sentence = std::move(sentence);
  return *options_.back();
}

void OptionTable::text(std::string name, std::string& target, std::string sentence) {
  Option& option = add(std::move(name), std::move(sentence));
  option.kind = "TEXT";
  option.set = [&target](const std::string& value) -> Result<void> {
    target = value;
    return {};
  };
  option.show = [&target] { return target; };
}

void OptionTable::list(std::string name, std::vector<std::string>& target, std::string sentence) {
  Option& option = add(std::move(name), std::move(sentence));
  option.kind = "LIST";
  option.is_list = true;
  option.set = [&target](const std::string& value) -> Result<void> {
    target = split_list(value);
    return {};
  };
  option.show = [&target] { return join(target); };
}

void OptionTable::flag(std::string name, bool& target, std::string sentence) {
  Option& option = add(std::move(name), std::move(sentence));
  option.kind = "true|false";
  option.is_flag = true;
  option.set = [&target](const std::string& value) -> Result<void> {
    PEGA_TRY_LET(target, parse_bool(value));
    return {};
  };
  option.show = [&target] { return std::string(target ? "true" : "false"); };
}

void OptionTable::integer(std::string name, std::int64_t& target, std::int64_t minimum,
                          std::int64_t maximum, std::string sentence) {
  Option& option = add(std::move(name), std::move(sentence));
  option.kind = "NUMBER";
  option.bounds = fmt::format("{} to {}", minimum, maximum);
  option.set = [&target, minimum, maximum](const std::string& value) -> Result<void> {
    std::int64_t number = 0;
    const char* const end = value.data() + value.size();
    const auto [rest, status] = std::from_chars(value.data(), end, number);
    if (status != std::errc() || rest != end) {
      return fail(Errc::kInvalidArgument, "\"{}\" is not a whole number", value);
    }
    if (number < minimum || number > maximum) {
      return fail(Errc::kInvalidArgument, "{} is not between {} and {}", number, minimum, maximum);
    }
    target = number;
    return {};
  };
  option.show = [&target] { return std::to_string(target); };
}

void OptionTable::bytes(std::string name, std::uint64_t& target, std::uint64_t minimum,
                        std::uint64_t maximum, std::string sentence) {
  Option& option = add(std::move(name), std::move(sentence));
  option.kind = "SIZE";
  option.bounds = fmt::format("{} to {}", format_bytes(minimum), format_bytes(maximum));
  option.set = [&target, minimum, maximum](const std::string& value) -> Result<void> {
    PEGA_TRY_LET(const std::uint64_t size, parse_bytes(value));
    if (size < minimum || size > maximum) {
      return fail(Errc::kInvalidArgument, "{} is not between {} and {}", value,
                  format_bytes(minimum), format_bytes(maximum));
    }
    target = size;
    return {};
  };
  option.show = [&target] { return format_bytes(target); };
}

void OptionTable::duration(std::string name, Duration& target, Duration minimum, Duration maximum,
                           std::string sentence) {
  Option& option = add(std::move(name), std::move(sentence));
  option.kind = "TIME";
  option.bounds = fmt::format("{} to {}", format_duration(minimum), format_duration(maximum));
  option.set = [&target, minimum, maximum](const std::string& value) -> Result<void> {
    PEGA_TRY_LET(const Duration time, parse_duration(value));
    if (time < minimum || time > maximum) {
      return fail(Errc::kInvalidArgument, "{} is not between {} and {}", value,
                  format_duration(minimum), format_duration(maximum));
    }
    target = time;
    return {};
  };
  option.show = [&target] { return format_duration(target); };
}

void OptionTable::ignored(std::string name, bool takes_value, std::string sentence) {
  Option& option = add(std::move(name), std::move(sentence));
  option.kind = takes_value ? "VALUE" : "true|false";
  option.is_flag = !takes_value;
  option.has_no_effect = true;
  option.set = [](const std::string&) -> Result<void> { return {}; };
  option.show = [] { return std::string(); };
}

bool OptionTable::is_given(std::string_view name) const {
  const auto found = std::find_if(options_.begin(), options_.end(),
                                  [&](const auto& each) { return each->name == name; });
  PEGA_ASSERT(found != options_.end(), "there is no option --{}", name);
  return (*found)->is_given;
}

Result<void> OptionTable::assign(Option& option, const std::string& value,
                                 std::string_view source) {
  if (Result<void> set = option.set(value); !set) {
    return fail(set.error().code, "--{} (from the {}): {}", option.name, source,
                set.error().detail);
  }
  option.source = std::string(source);
  option.is_given = true;
  if (option.has_no_effect) {
    ignored_.push_back(fmt::format("--{} has no effect: {}", option.name, option.sentence));
  }
  return {};
}

/// The command line, split into words by CLI11.
///
/// CLI11 does not see the file, since it would let the file override the environment; nor does it
/// validate values, so that all three sources have the same error texts.
class OptionTable::CommandLine {
 public:
  CommandLine(const std::string& about, const std::string& program,
              const std::vector<std::unique_ptr<Option>>& options);

  /// kExit after --help and --version, whose text goes to `out`.
  Result<Next> parse(int argc, const char* const* argv, std::ostream& out);
  /// Calls `use(option, value)` for each option that was given.
  template <typename Use>
  Result<void> for_each(Use use) const;

  [[nodiscard]] const std::string& file() const noexcept { return file_; }
  [[nodiscard]] bool wants_options() const noexcept { return wants_options_; }

 private:
  struct Given {
    Option* option = nullptr;
    CLI::Option* cli = nullptr;
    std::vector<std::string> values;
  };
  void declare(Option& option);

  CLI::App app_;
  bool wants_version_ = false;
  bool wants_options_ = false;
  std::string file_;
  std::vector<std::unique_ptr<Given>> given_;
};

OptionTable::CommandLine::CommandLine(const std::string& about, const std::string& program,
                                      const std::vector<std::unique_ptr<Option>>& options)
    : app_(about, program) {
  app_.set_help_flag("-h,--help", "Print this and exit.");
  app_.add_flag("--version", wants_version_, "Print the version and exit.");
  app_.add_flag("--print-options", wants_options_,
                "Print every option with the value it has, and exit.");
  app_.add_option("--config", file_, "A file of `name = value` lines (environment: PEGA_CONFIG).");
  for (const auto& option : options) declare(*option);
  app_.allow_extras();
}

void OptionTable::CommandLine::declare(Option& option) {
  given_.push_back(std::make_unique<Given>());
  Given& entry = *given_.back();
  entry.option = &option;
  std::string sentence = (option.has_no_effect ? "No effect: " : "") + option.sentence;
  if (!option.default_text.empty()) sentence += " [" + option.default_text + "]";
  entry.cli = app_.add_option("--" + option.name, entry.values, sentence);
  entry.cli->type_name(option.kind)->group("Options");
  if (option.is_flag) {
    entry.cli->expected(0, 1)->default_str("");
  } else if (option.is_list) {
    entry.cli->expected(1, -1)->delimiter(',');
  } else {
    // The last of several counts. Each takes one word and leaves the next one alone.
    entry.cli->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    entry.cli->allow_extra_args(false);
  }
}

Result<OptionTable::Next> OptionTable::CommandLine::parse(int argc, const char* const* argv,
                                                          std::ostream& out) {
  try {
    app_.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    out << app_.help();
    return Next::kExit;
  } catch (const CLI::ParseError& problem) {
    return fail(Errc::kInvalidArgument, "{}; --help lists all options", problem.what());
  }
  if (const auto words = app_.remaining(); !words.empty()) return refuse_words(words);
  if (!wants_version_) return Next::kRun;
  out << app_.get_name() << ' ' << kVersion << '\n';
  return Next::kExit;
}

template <typename Use>
Result<void> OptionTable::CommandLine::for_each(Use use) const {
  for (const auto& entry : given_) {
    if (entry->cli->count() == 0) continue;
    const bool bare_flag =
        entry->option->is_flag && (entry->values.empty() || entry->values.back().empty());
    const std::string value = bare_flag                ? "true"
                              : entry->option->is_list ? join(entry->values)
                                                       : entry->values.back();
    PEGA_TRY(use(*entry->option, value));
  }
  return {};
}

Result<void> OptionTable::read_file(const std::string& file) {
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) {  // It would be read as an empty file.
    return fail(Errc::kInvalidArgument, "--config {}: it is a directory", file);
  }
  if (::access(file.c_str(), R_OK) != 0) {
    return fail(Errc::kInvalidArgument, "--config {}: cannot be read: {}", file,
                std::generic_category().message(errno));
  }
  std::vector<CLI::ConfigItem> items;
  try {
    items = CLI::ConfigBase().from_file(file);
  } catch (const CLI::Error& problem) {
    return fail(Errc::kInvalidArgument, "--config {}: {}", file, problem.what());
  }
  for (const CLI::ConfigItem& item : items) {
    const auto found = std::find_if(options_.begin(), options_.end(),
                                    [&](const auto& option) { return option->name == item.name; });
    if (found == options_.end()) {
      return fail(Errc::kInvalidArgument,
                  "--config {}: unknown option \"{}\"; --help lists all options", file,
                  item.fullname());
    }
    // CLI11 splits a value such as `512 MiB` into words, and a list into its items.
    const std::string_view between = (**found).is_list ? "," : " ";
    PEGA_TRY(assign(**found, join(item.inputs, between), "file " + file));
  }
  return {};
}

Result<void> OptionTable::read_environment() {
  for (const auto& option : options_) {
    const std::string name = environment_name(option->name);
    if (const char* const value = std::getenv(name.c_str())) {
      PEGA_TRY(assign(*option, value, "environment variable " + name));
    }
  }
  return {};
}

Result<OptionTable::Next> OptionTable::parse(int argc, const char* const* argv, std::ostream& out) {
  for (const auto& option : options_) option->default_text = option->show();
  CommandLine line(about_, program_, options_);
  PEGA_TRY_LET(const Next next, line.parse(argc, argv, out));
  if (next == Next::kExit) return next;
  std::string file = line.file();
  if (file.empty()) {
    if (const char* const named = std::getenv("PEGA_CONFIG")) file = named;
  }
  if (!file.empty()) PEGA_TRY(read_file(file));
  PEGA_TRY(read_environment());
  PEGA_TRY(line.for_each([this](Option& option, const std::string& value) {
    return assign(option, value, "command line");
  }));
  if (!line.wants_options()) return Next::kRun;
  out << print_options();
  return Next::kExit;
}

std::string OptionTable::print_options() const {
  std::string text;
  for (const auto& option : options_) {
    if (option->has_no_effect) continue;
    text += fmt::format("{} = {}  # {}\n", option->name, option->show(), option->source);
  }
  return text;
}

std::string OptionTable::markdown() const {
  std::string text =
      "| option | default | bounds | environment | what for |\n|---|---|---|---|---|\n";
  for (const auto& option : options_) {
    const std::string shown = option->default_text.empty() ? option->show() : option->default_text;
    text += fmt::format("| `--{}` | {} | {} | `{}` | {} |\n", option->name,
                        shown.empty() ? "-" : "`" + shown + "`",
                        option->has_no_effect    ? "no effect"
                        : option->bounds.empty() ? option->kind
                                                 : option->bounds,
                        environment_name(option->name), option->sentence);
  }
  return text;
}

}  // namespace pegaflow
