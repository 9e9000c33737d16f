#include "cli/lab/lab_variant.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::cli {

std::string Variant::program() const {
  if (amp == "off") return "practical7_accumulation";
  return accum_steps == 1 ? "practical7_amp" : "homework2_combined";
}

std::string Variant::name() const {
  std::vector<std::string> parts;
  if (amp != "off") parts.push_back(amp);
  if (accum_steps > 1) parts.push_back(fmt::format("accum{}", accum_steps));
  if (row_factor > 1) parts.push_back(fmt::format("rows-times{}", row_factor));
  if (parts.empty()) parts.emplace_back("fp32");
  if (sync_every_step) parts.emplace_back("sync");
  if (!divide) parts.emplace_back("undivided");
  if (!scaler) parts.emplace_back("no-scaler");
  if (overflow_at > 0) parts.push_back(fmt::format("overflow{}", overflow_at));
  return fmt::format("{}", fmt::join(parts, "-"));
}

std::string Variant::title() const {
  std::vector<std::string> parts = {amp == "off" ? "fp32" : amp};
  if (accum_steps > 1) parts.push_back(fmt::format("{} micro-steps", accum_steps));
  if (row_factor > 1) parts.push_back(fmt::format("{} times the rows", row_factor));
  if (sync_every_step) parts.emplace_back("all-reduce in each");
  if (!divide) parts.emplace_back("loss undivided");
  if (!scaler) parts.emplace_back("no scaler");
  if (overflow_at > 0) parts.push_back(fmt::format("overflow in step {}", overflow_at));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::vector<std::string> Variant::arguments() const {
  std::vector<std::string> words;
  const bool amp_only = program() == "practical7_amp";
  if (!amp_only) words.insert(words.end(), {"--accum-steps", std::to_string(accum_steps)});
  if (amp != "off") words.insert(words.end(), {"--amp", amp});
  if (sync_every_step) words.emplace_back("--sync-every-step");
  if (!divide) words.emplace_back("--no-divide");
  if (!scaler) words.emplace_back("--no-scaler");
  if (overflow_at > 0) words.insert(words.end(), {"--overflow-at", std::to_string(overflow_at)});
  return words;
}

}  // namespace lockstep::cli
