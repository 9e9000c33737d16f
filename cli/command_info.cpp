#include "cli/command_info.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>

#include "base/cli_help.hpp"

namespace lockstep::cli {
namespace {

bool all_of(const std::string& text, int (*kind)(int)) {
  return std::all_of(text.begin(), text.end(),
                     [kind](char c) { return kind(static_cast<unsigned char>(c)) != 0; });
}

// A word to type, as "auto", "5" and "LS0002" are; "N", "HOST[:PORT]" and "0-3" stand for others.
bool is_choice(const std::string& word) {
  const size_t letters = std::min(word.find_first_of("0123456789"), word.size());
  const bool is_code = letters > 0 && letters < word.size() &&
                       all_of(word.substr(0, letters), std::isupper) &&
                       all_of(word.substr(letters), std::isdigit);
  if (is_code || (!word.empty() && all_of(word, std::isdigit))) return true;
  const bool is_word =
      word.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string::npos;
  return is_word && std::any_of(word.begin(), word.end(),
                                [](unsigned char c) { return std::islower(c) != 0; });
}

ArgumentInfo describe_argument(const CLI::Option& option) {
  ArgumentInfo info;
  if (option.nonpositional()) {
    for (const auto& name : option.get_snames()) info.names.push_back("-" + name);
    for (const auto& name : option.get_lnames()) info.names.push_back("--" + name);
  } else {
    info.names = {option.get_name(true, false)};
  }
  info.value = value_name(option);
  for (const auto& word : CLI::detail::split(info.value, '|')) {
    if (is_choice(word)) info.choices.push_back(word);
  }
  info.help = description_with_default(option);
  info.group = option.get_group();
  info.required = option.get_required();
  return info;
}

}  // namespace

bool CommandInfo::starts_program() const {
  return !positionals.empty() && positionals[0].names[0] == "PROGRAM";
}

CommandInfo describe_command(const CLI::App& app) {
  CommandInfo info{.name = app.get_name(),
                   .about = app.get_description(),
                   .examples = app.get_footer(),
                   .flags = {},
                   .positionals = {},
                   .commands = {}};
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    if (option->get_group().empty()) continue;
    auto& list = option->nonpositional() ? info.flags : info.positionals;
    list.push_back(describe_argument(*option));
  }
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!command->get_group().empty()) info.commands.push_back(describe_command(*command));
  }
  return info;
}

}  // namespace lockstep::cli
