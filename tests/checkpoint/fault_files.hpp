#pragma once

#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "checkpoint/file_system.hpp"
#include "support.hpp"

namespace lockstep::test {

/// What a process that dies throws; it is no std::exception, so that nothing catches it.
struct Crash {};

/// The system's files, with faults: call `fail_at` (from 1) fails with `error`, or is where the
/// process dies. With `short_writes`, each write takes one byte. Also remembers what a disk would
/// hold after a power loss.
class FaultFiles : public FileSystem {
 public:
  explicit FaultFiles(std::string root) : root_(std::move(root)) {}

  int fail_at = 0;
  int error = 0;  ///< 0: the process dies
  bool fails_for_good = false;
  bool short_writes = false;

  int calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }

  int make_folder(const std::string& path) override {
    return call([&] { return real_.make_folder(path); },
                [&] { names_of(path)[base(path)] = std::make_shared<Node>(true); });
  }
  int create(const std::string& path, int& file) override {
    return call([&] { return real_.create(path, file); },
                [&] { open_[file] = names_of(path)[base(path)] = std::make_shared<Node>(false); });
  }
  int write(int file, std::span<const std::byte> bytes, size_t& written) override {
    if (short_writes) bytes = bytes.first(1);
    return call(
        [&] { return real_.write(file, bytes, written); },
        [&] { open_[file]->data.append(reinterpret_cast<const char*>(bytes.data()), written); });
  }
  int sync(int file) override {
    return call([&] { return real_.sync(file); },
                [&] { open_[file]->durable_data = open_[file]->data; });
  }
  int close(int file) override {
    if (dead_) {
      real_.close(file);
      return EIO;
    }
    return call([&] { return real_.close(file); }, [&] { open_.erase(file); });
  }
  int sync_folder(const std::string& path) override {
    return call([&] { return real_.sync_folder(path); },
                [&] {
                  auto& folder = *find(path);
                  folder.durable_names = folder.names;
                });
  }
  int rename(const std::string& from, const std::string& to) override {
    return call([&] { return real_.rename(from, to); },
                [&] {
                  names_of(to)[base(to)] = names_of(from).at(base(from));
                  names_of(from).erase(base(from));
                });
  }
  int remove(const std::string& path) override {
    return call([&] { return real_.remove(path); }, [&] { names_of(path).erase(base(path)); });
  }
  int remove_folder(const std::string& path) override {
    return call([&] { return real_.remove_folder(path); },
                [&] { names_of(path).erase(base(path)); });
  }

  /// What survives a power loss. kSynced: only what was flushed. kNames: all names, but of files
  /// only the bytes that were flushed.
  enum class Loss { kSynced, kNames };
  void write_survivors(Loss loss, const std::string& folder) const { put(tree_, loss, folder); }

 private:
  struct Node {
    explicit Node(bool is_folder) : folder(is_folder) {}
    bool folder;
    std::string data, durable_data;
    std::map<std::string, std::shared_ptr<Node>> names, durable_names;
  };

  template <class Do, class Note>
  int call(const Do& perform, const Note& note) {
    const std::lock_guard lock(mutex_);
    if (dead_) return EIO;
    ++calls_;
    if (fail_at != 0 && (calls_ == fail_at || (fails_for_good && calls_ > fail_at))) {
      if (error != 0) return error;
      dead_ = true;
      throw Crash{};
    }
    const int result = perform();
    if (result == 0) note();
    return result;
  }

  static std::string base(const std::string& path) {
    return std::filesystem::path(path).filename().string();
  }
  Node* find(const std::string& path) {
    Node* node = &tree_;
    for (const auto& part : std::filesystem::path(path).lexically_relative(root_)) {
      if (part != ".") node = node->names.at(part.string()).get();
    }
    return node;
  }
  std::map<std::string, std::shared_ptr<Node>>& names_of(const std::string& path) {
    return find(std::filesystem::path(path).parent_path().string())->names;
  }
  static void put(const Node& node, Loss loss, const std::string& path) {
    if (!node.folder) return write_bytes(path, node.durable_data);
    std::filesystem::create_directories(path);
    for (const auto& [name, child] : loss == Loss::kSynced ? node.durable_names : node.names) {
      put(*child, loss, path + "/" + name);
    }
  }

  std::string root_;
  FileSystem& real_ = FileSystem::system();  // before anything replaces it
  std::mutex mutex_;                         // ranks that are threads write at the same time
  int calls_ = 0;
  bool dead_ = false;
  Node tree_{true};
  std::map<int, std::shared_ptr<Node>> open_;
};

}  // namespace lockstep::test
