#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace course {

/// The flags that all programs of the course share. One step is one optimizer update.
struct Options {
  int64_t steps = 20;
  int64_t batch = 64;
  int64_t dim = 1024;
  int64_t hidden = 1024;
  int64_t depth = 2;
  double lr = 0;  // where not given: 0.5 for sgd, 0.001 for adamw
  int64_t seed = 0;
  std::string model = "mlp";
  std::string optimizer = "sgd";
  std::string devices;  // empty: every GPU, or cpu:2
  std::string json;     // where the record goes; "-" is standard output
  std::string trace;
  std::string init;
  std::string save;
  std::string data;
  bool quiet = false;
  bool print_shapes = false;  // practical5_dp only

  std::string program;
  /// Every flag with its value, as the record keeps them.
  std::map<std::string, std::string> as_text() const;
};

/// What a program adds to the shared flags.
struct Program {
  const char* name;
  const char* about;
  bool has_print_shapes = false;
};

/// Reads the command line. A bad flag, value or folder is an Error before anything is started.
Options parse_options(const Program& program, int argc, char** argv);

}  // namespace course
