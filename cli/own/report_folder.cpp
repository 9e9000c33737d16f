#include "cli/own/report_folder.hpp"

#include <fmt/format.h>

#include <system_error>

#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {

namespace fs = std::filesystem;

void make_report_folder(const fs::path& folder) {
  const auto refuse = [&folder](const std::string& why) {
    throw Error(Code::kFileWrite,
                fmt::format("cannot write to the folder {}: {}", folder.string(), why),
                "name a folder you may write to with --out");
  };
  std::error_code error;
  fs::create_directories(folder / "records", error);
  if (error) refuse(error.message());
  if (!fs::is_directory(folder / "records")) refuse("a file of that name exists");
  const fs::path trial = folder / ".lockstep-trial";
  try {
    write_file_atomically(trial.string(), "");
  } catch (const Error& failed) {
    refuse(failed.message());
  }
  fs::remove(trial, error);
}

void publish_report(const LabReport& report, const ReportOrigin& origin, const HandIn& hand_in,
                    const fs::path& folder) {
  print_lab(report);
  write_lab_report(report, origin, hand_in, folder.string());
  print_place(hand_in, folder.string());
}

}  // namespace lockstep::cli
