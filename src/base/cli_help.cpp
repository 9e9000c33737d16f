#include "base/cli_help.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "lockstep/cli_parse.hpp"
#include "lockstep/table.hpp"

namespace lockstep {
namespace {

constexpr size_t kHelpWidth = 80;
constexpr size_t kHelpColumn = 28;  // where explanations begin

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// "  term    text", wrapped, if possible not after "default:". A term that is too long has the line
// for itself.
std::string entry(const std::string& term, const std::string& text, size_t column, size_t width) {
  const std::string indent(column, ' ');
  const size_t value = text.find("default: ");
  const size_t end = std::min(text.find(' ', value + 9), text.size());
  const bool glued = value != std::string::npos && column + (end - value) < width;
  const std::string joined = glued ? replaced(text, "default: ", "default:\u00A0") : text;
  const std::string wrapped = replaced(wrap_text(joined, width, indent), "\u00A0", " ");
  const std::string line = "  " + term;
  if (text.empty()) return line + "\n";
  if (display_width(line) + 2 > column) return line + "\n" + wrapped + "\n";
  return line + std::string(column - display_width(line), ' ') + wrapped.substr(column) + "\n";
}

class LockstepHelp : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    while (text.find("\n\n\n") != std::string::npos) text.erase(text.find("\n\n\n"), 1);
    while (text.ends_with("\n\n")) text.pop_back();
    return text;
  }
  // CLI11 would print the examples last, as the footer.
  std::string make_description(const CLI::App* app) const override {
    const std::string examples = app->get_footer();
    return (examples.empty() ? "" : examples + "\n") +
           wrap_text(app->get_description(), help_width()) + "\n\n";
  }
  std::string make_footer(const CLI::App*) const override { return ""; }
  std::string make_subcommand(const CLI::App* command) const override {
    return entry(command->get_name(), command->get_description(), kHelpColumn, help_width());
  }
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    const std::string value = value_name(*option);
    const std::string name = make_option_name(option, is_positional);
    return entry(value.empty() || is_positional ? name : name + " " + value,
                 description_with_default(*option), kHelpColumn, help_width());
  }

 private:
  static size_t help_width() { return std::min(kHelpWidth, terminal_width(STDOUT_FILENO)); }
};

}  // namespace

void use_lockstep_help(CLI::App& app) {
  const auto formatter = std::make_shared<LockstepHelp>();
  formatter->label("SUBCOMMAND", "COMMAND");
  app.formatter(formatter);
  if (CLI::Option* help = app.get_help_ptr()) help->description("print this help");
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    use_lockstep_help(*command);
  }
}

std::string value_name(const CLI::Option& option) {
  if (option.get_type_size() == 0) return "";
  const std::string type = option.get_type_name();
  if (type == "INT" || type == "UINT") return "N";
  return type == "FLOAT" ? "X" : type;
}

std::string description_with_default(const CLI::Option& option) {
  const std::string standard = option.get_default_str();
  const std::string text = option.get_description();
  return standard.empty() ? text : fmt::format("{} (default: {})", text, standard);
}

std::string format_examples(const std::vector<Example>& examples) {
  size_t longest = 0;  // meaning
  for (const auto& [command, meaning] : examples)
    longest = std::max(longest, display_width(meaning));
  // As far to the right as no meaning has to be broken; longer commands have a line of their own.
  size_t column = 0;
  for (const auto& [command, meaning] : examples) {
    const size_t needed = 2 + display_width(command) + 2;
    if (needed + longest <= kHelpWidth) column = std::max(column, needed);
  }
  if (column == 0) column = kHelpColumn;
  std::string text = "Examples:\n";
  for (const auto& [command, meaning] : examples) {
    text += entry(command, meaning, column, kHelpWidth);
  }
  return text;
}

}  // namespace lockstep
