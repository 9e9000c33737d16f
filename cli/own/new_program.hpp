#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// What `lockstep new` was asked for.
struct NewOptions {
  std::string path;  ///< of the folder to make; its last part is the program's name
  std::string program_template = "ddp";
};

CLI::App* add_new_command(CLI::App& app, NewOptions& options);

/// `lockstep new`: makes a folder with a program that trains, ready to be configured and built with
/// the lockstep that this command belongs to, installed or in its build folder. Never changes a
/// folder that exists.
int run_new(const NewOptions& options);

/// Refuses a name that is no name of a CMake target or of a folder.
void check_program_name(const std::string& name);

/// The names of all templates.
std::vector<std::string> template_names();

}  // namespace lockstep::cli
