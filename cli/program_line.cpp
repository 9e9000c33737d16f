#include "cli/program_line.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>

namespace lockstep::cli {
namespace {

const CLI::App* find_command(const std::string& name,
                             const std::vector<const CLI::App*>& commands) {
  for (const CLI::App* command : commands) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

// A flag's name and what of its word is its value: "--tee=3", "-t3".
struct Flag {
  std::string name;  // "--tee", "-t"
  std::string value;
  bool has_value = false;
};

Flag split_flag(const std::string& word) {
  if (!word.starts_with("--")) return {word.substr(0, 2), word.substr(2), word.size() > 2};
  const size_t equals = word.find('=');
  Flag flag{word.substr(0, equals), "", equals != std::string::npos};
  if (flag.has_value) flag.value = word.substr(equals + 1);
  std::replace(flag.name.begin(), flag.name.end(), '_', '-');
  return flag;
}

}  // namespace

std::vector<const char*> ProgramLine::flag_pointers() const {
  std::vector<const char*> pointers;
  pointers.reserve(flags.size());
  for (const auto& word : flags) pointers.push_back(word.c_str());
  return pointers;
}

ProgramLine cut_at_program(int argc, const char* const* argv,
                           const std::vector<const CLI::App*>& commands) {
  const std::vector<std::string> words(argv, argv + argc);
  const CLI::App* command = words.size() < 2 ? nullptr : find_command(words[1], commands);
  if (command == nullptr) return {words, {}};
  ProgramLine line{{words[0], words[1]}, {}};
  size_t at = 2;
  for (; at < words.size(); ++at) {
    const std::string& word = words[at];
    if (word == "--") {
      ++at;
      break;
    }
    if (word.size() < 2 || word[0] != '-') break;
    const Flag flag = split_flag(word);
    const CLI::Option* option = command->get_option_no_throw(flag.name);
    const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
    if (!takes_value) {
      // A switch, or an unknown flag, which the parser names as it was typed.
      line.flags.push_back(option != nullptr && !flag.has_value ? flag.name : word);
      continue;
    }
    const std::string name = "--" + option->get_lnames().front();
    if (flag.has_value) {
      line.flags.push_back(name + "=" + flag.value);
    } else if (at + 1 < words.size()) {
      line.flags.push_back(name + "=" + words[++at]);
    } else {
      line.flags.push_back(name);
    }
  }
  line.program.assign(words.begin() + static_cast<long>(std::min(at, words.size())), words.end());
  return line;
}

}  // namespace lockstep::cli
