#include "lockstep/cli_parse.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "base/cli_help.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// The subcommand that parsing reached. Its flags are the ones the user could have meant.
const CLI::App& innermost(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : innermost(*chosen.back());
}

std::string full_name(const CLI::App& app) {
  if (app.get_parent() == nullptr) return app.get_name();
  return full_name(*app.get_parent()) + " " + app.get_name();
}

std::string see_help(const CLI::App& app) {
  return fmt::format("`{} --help` lists what it takes", full_name(innermost(app)));
}

std::string without_dashes(std::string_view word) {
  const size_t begin = word.find_first_not_of('-');
  return begin == std::string_view::npos ? "" : std::string(word.substr(begin));
}

std::vector<std::string> long_flags(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* level = &app; level != nullptr; level = level->get_parent()) {
    for (const CLI::Option* option : level->get_options()) {
      if (option->get_group().empty()) continue;  // hidden
      for (const auto& name : option->get_lnames()) names.push_back("--" + name);
    }
  }
  return names;
}

[[noreturn]] void fail_unknown(const CLI::App& app, const std::string& word) {
  const CLI::App& here = innermost(app);
  if (word.starts_with("-")) {
    const std::string flag = word.substr(0, word.find('='));
    const std::string meant = did_you_mean("--" + without_dashes(flag), long_flags(here));
    throw Error(Code::kUsage, fmt::format("{} has no flag {}", full_name(here), flag),
                meant.empty() ? see_help(app) : fmt::format("did you mean {}?", meant));
  }
  std::vector<std::string> commands;
  for (const CLI::App* command : here.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) commands.push_back(command->get_name());
  }
  if (commands.empty()) {
    throw Error(Code::kUsage, fmt::format("{} does not take \"{}\"", full_name(here), word),
                see_help(app));
  }
  const std::string meant = did_you_mean(word, commands);
  throw Error(Code::kUsage, fmt::format("{} has no command \"{}\"", full_name(here), word),
              meant.empty() ? fmt::format("commands are: {}", CLI::detail::join(commands, ", "))
                            : fmt::format("did you mean `{} {}`?", full_name(here), meant));
}

const char* kind_of_value(const std::string& type_name) {
  if (type_name.starts_with("INT")) return "a whole number";
  if (type_name.starts_with("UINT")) return "a whole number, 0 or more";
  if (type_name.starts_with("FLOAT")) return "a number";
  return "a value it takes";
}

// CLI11 gives the option and the value only in its text: "Could not convert: --steps = ten".
[[noreturn]] void fail_conversion(const CLI::App& app, const std::string& text) {
  constexpr std::string_view kPrefix = "Could not convert: ";
  const size_t equals = text.find(" = ");
  if (!text.starts_with(kPrefix) || equals == std::string::npos) {
    throw Error(Code::kUsage, text, see_help(app));
  }
  const std::string flag = text.substr(kPrefix.size(), equals - kPrefix.size());
  const CLI::Option* option = innermost(app).get_option_no_throw(flag);
  const std::string type = option == nullptr ? "" : option->get_type_name();
  throw Error(
      Code::kUsage,
      fmt::format("{} \"{}\" is not {}", flag, text.substr(equals + 3), kind_of_value(type)),
      see_help(app));
}

// Makes CLI11 2.1's "--steps: 1 required INT missing" readable.
[[noreturn]] void fail_argument_count(const CLI::App& app, const std::string& text) {
  const size_t colon = text.find(": ");
  const bool missing = colon != std::string::npos && text.ends_with(" missing");
  throw Error(Code::kUsage, missing ? text.substr(0, colon) + " needs a value" : text,
              see_help(app));
}

// "--steps: Value 0 not in range 1 to 100". CLI11 says the same of a word in place of a number.
[[noreturn]] void fail_validation(const CLI::App& app, const std::string& text) {
  constexpr std::string_view kValue = ": Value ";
  constexpr std::string_view kRange = " not in range ";
  const size_t value = text.find(kValue);
  const size_t range = text.find(kRange);
  if (value == std::string::npos || range == std::string::npos) {
    throw Error(Code::kUsage, text, see_help(app));
  }
  const size_t begin = value + kValue.size();
  throw Error(Code::kUsage,
              fmt::format("{} \"{}\" is not a number from {}", text.substr(0, value),
                          text.substr(begin, range - begin), text.substr(range + kRange.size())),
              see_help(app));
}

// "NUMBER is required".
[[noreturn]] void fail_required(const CLI::App& app, const std::string& text) {
  throw Error(Code::kUsage,
              fmt::format("{} needs {}", full_name(innermost(app)),
                          text.substr(0, text.find(" is required"))),
              see_help(app));
}

std::string lower_first(std::string text) {
  if (!text.empty() && text[0] >= 'A' && text[0] <= 'Z') text[0] = static_cast<char>(text[0] + 32);
  return text;
}

[[noreturn]] void translate(const CLI::App& app, const CLI::ParseError& error) {
  // The words left over are in the order they were typed, so the first one is the culprit. It also
  // explains a "required" error, since an unknown command leaves the required one missing.
  const std::vector<std::string> left_over = app.remaining(true);
  const bool about_left_over = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
                               dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if (about_left_over && !left_over.empty()) fail_unknown(app, left_over.front());
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr)
    fail_conversion(app, error.what());
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    fail_argument_count(app, error.what());
  }
  if (dynamic_cast<const CLI::ValidationError*>(&error) != nullptr) {
    fail_validation(app, error.what());
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) fail_required(app, error.what());
  throw Error(Code::kUsage, lower_first(error.what()), see_help(app));
}

std::string shell_word(std::string_view word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,+@%";
  const bool plain = !word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos;
  if (plain) return std::string(word);
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

}  // namespace

void parse_or_throw(CLI::App& app, int argc, const char* const* argv,
                    const std::function<void()>& prepare) {
  use_lockstep_help(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    prepare();
    fmt::print("{}", app.help());
    std::exit(0);
  } catch (const CLI::CallForVersion& version) {
    fmt::print("{}\n", version.what());
    std::exit(0);
  } catch (const CLI::ParseError& error) {
    prepare();
    translate(app, error);
  }
}

std::string shell_line(int argc, const char* const* argv) {
  std::string line;
  for (int i = 0; i < argc; ++i) line += (i > 0 ? " " : "") + shell_word(argv[i]);
  return line;
}

}  // namespace lockstep
