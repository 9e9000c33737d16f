#include "cli/explain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {
namespace {

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

// "2" and "LS2" are short for "LS0002".
std::string full_name(const std::string& given) {
  const std::string name = upper(given);
  const std::string digits = name.starts_with("LS") ? name.substr(2) : name;
  const bool number = !digits.empty() && digits.size() <= 4 &&
                      digits.find_first_not_of("0123456789") == std::string::npos;
  return number ? fmt::format("LS{:0>4}", digits) : name;
}

std::string list_codes() {
  std::string text;
  for (const auto& info : all_codes()) {
    text += fmt::format("{}  {}\n", code_name(info.code), info.title);
  }
  return text + "\n`lockstep explain LS0002` tells more about one of them.\n";
}

}  // namespace

std::string explain(const std::string& code) {
  if (code.empty()) return list_codes();
  const std::string wanted = full_name(code);
  std::vector<std::string> names;
  for (const auto& info : all_codes()) {
    names.push_back(code_name(info.code));
    if (names.back() != wanted) continue;
    return fmt::format("{}: {}\n\n{}\n", wanted, info.title, wrap_text(info.explanation, 80));
  }
  const std::string meant = did_you_mean(wanted, names);
  throw Error(Code::kUsage, fmt::format("there is no error code \"{}\"", code),
              meant.empty()
                  ? "`lockstep explain` lists them all"
                  : fmt::format("did you mean {}? `lockstep explain` lists them all", meant));
}

}  // namespace lockstep::cli
