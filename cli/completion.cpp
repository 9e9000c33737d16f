#include "cli/command_info.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

// Calls `body` with every command and its path: "", "run", "lab", "lab 5".
void for_each_command(const CommandInfo& command, const std::string& path,
                      const std::function<void(const CommandInfo&, const std::string&)>& body) {
  body(command, path);
  for (const auto& child : command.commands) {
    for_each_command(child, path.empty() ? child.name : path + " " + child.name, body);
  }
}

// What may stand where a command's first argument is expected.
std::vector<std::string> first_words(const CommandInfo& command) {
  std::vector<std::string> words;
  for (const auto& child : command.commands) words.push_back(child.name);
  if (command.positionals.empty()) return words;
  for (const auto& choice : command.positionals[0].choices) {
    if (std::find(words.begin(), words.end(), choice) == words.end()) words.push_back(choice);
  }
  return words;
}

std::string bash_values(const ArgumentInfo& flag) {
  if (!flag.choices.empty()) return fmt::format("words=\"{}\"", fmt::join(flag.choices, " "));
  if (flag.takes_folder()) return "_lockstep_paths -d";
  if (flag.takes_file()) return "_lockstep_paths -f";
  return ":";
}

std::string bash_script(const CommandInfo& app) {
  std::string takes_value;
  std::string values;
  std::string flags;
  std::string arguments;
  std::string programs;
  std::string paths;
  for_each_command(app, "", [&](const CommandInfo& command, const std::string& path) {
    std::vector<std::string> names;
    for (const auto& flag : command.flags) {
      names.insert(names.end(), flag.names.begin(), flag.names.end());
      if (flag.value.empty()) continue;
      std::vector<std::string> patterns;
      for (const auto& name : flag.names) patterns.push_back(fmt::format("\"{} {}\"", path, name));
      const std::string any = fmt::format("{}", fmt::join(patterns, "|"));
      takes_value += fmt::format("        {}) return 0 ;;\n", any);
      values += fmt::format("            {}) {} ;;\n", any, bash_values(flag));
    }
    flags += fmt::format("            \"{}\") words=\"{}\" ;;\n", path, fmt::join(names, " "));
    if (command.starts_program()) {
      programs += (programs.empty() ? "" : "|") + path;
    } else if (const auto words = first_words(command); !words.empty()) {
      arguments +=
          fmt::format("            \"{}\") words=\"{}\" ;;\n", path, fmt::join(words, " "));
    }
    for (const auto& child : command.commands) {
      const std::string below = path.empty() ? child.name : path + " " + child.name;
      paths += fmt::format("            \"{}/{}\") path=\"{}\" ;;\n", path, child.name, below);
    }
  });
  return fmt::format(R"(# Completion of lockstep for bash, printed by `lockstep completion bash`.

_lockstep_takes_value() {{
    case "$1 $2" in
{takes_value}    esac
    return 1
}}

# Names of files (-f), folders (-d) or commands (-c); they may have spaces.
_lockstep_paths() {{
    local kind
    compopt -o filenames
    mapfile -t COMPREPLY < <(for kind; do compgen "$kind" -- "$cur"; done)
}}

_lockstep() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
    local path="" words="" word i
    COMPREPLY=()
    # bash breaks --flag=value at the equals sign.
    if [[ $cur == "=" ]]; then
        cur=""
    elif [[ $prev == "=" ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        if [[ $word == "=" ]]; then
            continue
        fi
        if [[ $word == -* ]]; then
            if _lockstep_takes_value "$path" "$word"; then
                [[ ${{COMP_WORDS[i+1]}} == "=" ]] && ((i++))
                ((i++))
            fi
            continue
        fi
        case $path in
            {programs})  # the program's own arguments
                if declare -F _command_offset >/dev/null; then
                    _command_offset "$i"
                else
                    _lockstep_paths -f
                fi
                return
                ;;
        esac
        case "$path/$word" in
{paths}        esac
    done
    if [[ $prev == -* ]] && _lockstep_takes_value "$path" "$prev"; then
        case "$path $prev" in
{values}        esac
    elif [[ $cur == -* ]]; then
        case $path in
{flags}        esac
    else
        case $path in
            {programs})
                _lockstep_paths -c -f
                ;;
{arguments}        esac
    fi
    [[ -z $words ]] || mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}}

complete -F _lockstep lockstep
)",
                     fmt::arg("takes_value", takes_value), fmt::arg("values", values),
                     fmt::arg("flags", flags), fmt::arg("arguments", arguments),
                     fmt::arg("programs", programs), fmt::arg("paths", paths));
}

std::string escaped(const std::string& text, const std::string& special) {
  std::string out;
  for (const char c : text) {
    if (special.find(c) != std::string::npos) out += '\\';
    out += c;
  }
  return out;
}

std::string single_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

// The action of zsh's _arguments that completes a value.
std::string zsh_action(const ArgumentInfo& argument) {
  if (!argument.choices.empty()) return fmt::format("({})", fmt::join(argument.choices, " "));
  if (argument.takes_folder()) return "_files -/";
  if (argument.takes_file()) return "_files";
  return " ";
}

std::string zsh_flag(const ArgumentInfo& flag) {
  const bool takes_value = !flag.value.empty();
  std::vector<std::string> names;
  for (const auto& name : flag.names) {
    names.push_back(!takes_value ? name : name + (name.starts_with("--") ? "=" : "+"));
  }
  std::string rest = "[" + escaped(flag.help, "[]\\") + "]";
  if (takes_value) rest += ":" + escaped(flag.value, ":\\") + ":" + zsh_action(flag);
  if (names.size() == 1) return single_quoted(names[0] + rest);
  return fmt::format("{}{{{}}}{}", single_quoted(fmt::format("({})", fmt::join(flag.names, " "))),
                     fmt::join(names, ","), single_quoted(rest));
}

// A call of _arguments for one command. `first` completes its first argument; "" for none.
std::string zsh_arguments(const CommandInfo& command, const std::string& indent,
                          const std::vector<std::string>& more) {
  std::string text = indent + "_arguments -S";
  for (const auto& flag : command.flags) text += " \\\n" + indent + "  " + zsh_flag(flag);
  for (const auto& spec : more) text += " \\\n" + indent + "  " + spec;
  return text + "\n";
}

std::vector<std::string> zsh_positionals(const CommandInfo& command) {
  if (command.starts_program()) {
    return {"'(-)1:program:_lockstep_program'", "'*::argument:_normal'"};
  }
  if (command.positionals.empty() && command.commands.empty()) return {};
  const auto words = first_words(command);
  const std::string name = command.positionals.empty() ? "word" : command.positionals[0].names[0];
  return {single_quoted(fmt::format(
      "1:{}:{}", name, words.empty() ? " " : fmt::format("({})", fmt::join(words, " "))))};
}

std::string zsh_script(const CommandInfo& app) {
  std::string commands;
  std::string cases;
  for (const auto& command : app.commands) {
    commands += fmt::format("      {}\n",
                            single_quoted(command.name + ":" + escaped(command.about, ":\\")));
    cases += fmt::format("        {})\n", command.name);
    const auto positionals = zsh_positionals(command);
    if (!command.commands.empty()) {
      cases +=
          "          local word\n          for word in ${words[2,CURRENT-1]}; do\n"
          "            case $word in\n";
      for (const auto& child : command.commands) {
        cases += fmt::format("              {})\n{}                return\n                ;;\n",
                             child.name, zsh_arguments(child, "                ", positionals));
      }
      cases += "            esac\n          done\n";
    }
    cases += zsh_arguments(command, "          ", positionals) + "          ;;\n";
  }
  return fmt::format(
      R"(#compdef lockstep
# Completion of lockstep for zsh, printed by `lockstep completion zsh`.

_lockstep_program() {{
  _alternative 'commands:command:_command_names -e' 'files:program:_files'
}}

_lockstep() {{
  local curcontext="$curcontext" state line
  local -a commands
{top}  case $state in
    command)
      commands=(
{commands}      )
      _describe -t commands command commands
      ;;
    argument)
      curcontext="${{curcontext%:*:*}}:lockstep-$words[1]:"
      case $words[1] in
{cases}      esac
      ;;
  esac
}}

if [[ $funcstack[1] == _lockstep ]]; then
  _lockstep "$@"
else
  compdef _lockstep lockstep
fi
)",
      fmt::arg("top", zsh_arguments({.name = "",
                                     .about = "",
                                     .examples = "",
                                     .flags = app.flags,
                                     .positionals = {},
                                     .commands = {}},
                                    "  ", {"'1:command:->command'", "'*::argument:->argument'"})),
      fmt::arg("commands", commands), fmt::arg("cases", cases));
}

std::string fish_quoted(const std::string& text) {
  return "'" + escaped(text, "'\\") + "'";
}

std::string fish_flag(const ArgumentInfo& flag, const std::string& condition) {
  std::string line = "complete -c lockstep";
  if (!condition.empty()) line += " -n " + fish_quoted(condition);
  for (const auto& name : flag.names) {
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  if (!flag.value.empty()) {
    const bool path = flag.takes_folder() || flag.takes_file();
    line += path ? " -r -F" : " -x";
    if (!flag.choices.empty()) {
      line += " -a " + fish_quoted(fmt::format("{}", fmt::join(flag.choices, " ")));
    }
  }
  return line + " -d " + fish_quoted(flag.help) + "\n";
}

bool has_flag(const CommandInfo& command, const ArgumentInfo& flag) {
  return std::any_of(command.flags.begin(), command.flags.end(),
                     [&flag](const ArgumentInfo& other) { return other.names == flag.names; });
}

std::string fish_script(const CommandInfo& app) {
  std::string text =
      "# Completion of lockstep for fish, printed by `lockstep completion fish`.\n\n"
      "complete -c lockstep -f\n";
  for (const auto& flag : app.flags) text += fish_flag(flag, "__fish_use_subcommand");
  for (const auto& command : app.commands) {
    const std::string here = "__fish_seen_subcommand_from " + command.name;
    text += fmt::format("\ncomplete -c lockstep -n __fish_use_subcommand -a {} -d {}\n",
                        command.name, fish_quoted(command.about));
    const auto words = first_words(command);
    if (command.starts_program()) {
      text += fmt::format("complete -c lockstep -n {} -F -a '(__fish_complete_command)'\n",
                          fish_quoted(here));
    } else if (!words.empty()) {
      text += fmt::format("complete -c lockstep -n {} -a {}\n", fish_quoted(here),
                          fish_quoted(fmt::format("{}", fmt::join(words, " "))));
    }
    for (const auto& flag : command.flags) text += fish_flag(flag, here);
    for (const auto& child : command.commands) {
      const std::string below = here + "; and __fish_seen_subcommand_from " + child.name;
      for (const auto& flag : child.flags) {
        if (!has_flag(command, flag)) text += fish_flag(flag, below);
      }
    }
  }
  return text;
}

}  // namespace

std::string completion_script(const CommandInfo& app, const std::string& shell) {
  if (shell == "bash") return bash_script(app);
  if (shell == "zsh") return zsh_script(app);
  if (shell == "fish") return fish_script(app);
  const std::string near = did_you_mean(shell, {"bash", "zsh", "fish"});
  throw Error(Code::kUsage, fmt::format("there is no completion for \"{}\"", shell),
              near.empty() ? "use bash, zsh or fish" : fmt::format("did you mean {}?", near));
}

}  // namespace lockstep::cli
