#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// `lockstep ckpt ls|verify|diff|prune|import`: folders of checkpoints, without libtorch.
class CkptCommand {
 public:
  explicit CkptCommand(CLI::App& app);
  CkptCommand(const CkptCommand&) = delete;
  CkptCommand& operator=(const CkptCommand&) = delete;

  CLI::App* command() const { return command_; }

  /// Returns the exit code: 1 if a checkpoint is damaged, or two differ.
  int run() const;

 private:
  int list() const;
  int verify() const;
  int diff() const;
  int prune() const;
  int import_files() const;

  CLI::App* command_;
  CLI::App* ls_;
  CLI::App* verify_;
  CLI::App* diff_;
  CLI::App* prune_;
  CLI::App* import_;

  bool json_ = false;
  std::string folder_;
  std::string path_;
  std::string first_;
  std::string second_;
  int keep_ = 0;
  int64_t step_ = 0;
  std::vector<std::string> files_;
  std::string values_;
};

}  // namespace lockstep::cli
