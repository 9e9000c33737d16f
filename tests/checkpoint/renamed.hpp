#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"

namespace lockstep::test {

/// Writes the latest checkpoint of one run to the folder of another, with other names of tensors.
inline void copy_renamed(const std::string& from, const std::string& to,
                         const std::function<std::string(const std::string&)>& rename) {
  const CheckpointReader reader(list_checkpoints(from).back().path);
  Manifest manifest = reader.manifest();
  std::map<std::string, SectionFile> sections;
  std::list<std::vector<std::byte>> bytes;
  for (const auto& tensor : manifest.tensors) {
    SectionFile& file = sections[tensor.section];
    file.section = tensor.section;
    file.name = tensor.section + ".safetensors";
    bytes.push_back(reader.read(tensor));
    file.tensors.push_back({rename(tensor.name), tensor.dtype, tensor.shape(), bytes.back()});
    file.slices.push_back(whole_slice(tensor.shape()));
  }
  CheckpointStore store(to);
  const std::string draft = store.begin(manifest.step);
  manifest.files.clear();
  manifest.tensors.clear();
  for (const auto& [section, file] : sections) {
    auto written = write_section(FileSystem::system(), draft, file);
    manifest.files.push_back(written.file);
    for (auto& tensor : written.tensors) manifest.tensors.push_back(std::move(tensor));
  }
  manifest.tensors = merge_pieces(std::move(manifest.tensors));
  store.publish(draft, manifest);
}

}  // namespace lockstep::test
