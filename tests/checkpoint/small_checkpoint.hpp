#pragma once

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "support.hpp"

namespace lockstep::test {

/// The elements of tensor "weight" [4, 6] of step N: N, N + 1, ...
inline std::vector<float> weight_of(int64_t step) {
  std::vector<float> values(24);
  std::iota(values.begin(), values.end(), static_cast<float>(step));
  return values;
}

inline Slice columns(int64_t first, int64_t count) {
  return {{4, 6}, {4, count}, {{{0, 0}, {0, first}, {4, count}}}};
}

/// What a rank has of the weight.
inline std::vector<float> cut(const std::vector<float>& whole, const Slice& slice) {
  std::vector<float> part(static_cast<size_t>(*element_count(slice.local)));
  const auto all = *runs_of(whole_slice(slice.whole));
  const auto mine = *runs_of(slice);
  copy_common(all, reinterpret_cast<const std::byte*>(whole.data()), mine,
              reinterpret_cast<std::byte*>(part.data()), sizeof(float));
  return part;
}

/// Saves a checkpoint of two ranks that have two and four columns of the weight, and a bias that
/// rank 0 writes.
inline void save_small(CheckpointStore& store, FileSystem& files, int64_t step, int keep) {
  const std::string draft = store.begin(step);
  Manifest manifest;
  manifest.step = step;
  manifest.ranks = 2;
  manifest.created = "2026-11-18T08:00:00Z";
  manifest.lockstep = "test";
  manifest.values["epoch"] = {{"all", step / 2}};
  try {
    for (int rank = 0; rank < 2; ++rank) {
      const Slice slice = rank == 0 ? columns(0, 2) : columns(2, 4);
      const auto part = cut(weight_of(step), slice);
      const std::vector<int64_t> bias = {step, -step};
      SectionFile file{"model", "model.rank" + std::to_string(rank) + ".safetensors", {}, {}};
      file.tensors.push_back({"weight", Dtype::kF32, slice.local, std::as_bytes(std::span(part))});
      file.slices.push_back(slice);
      if (rank == 0) {
        file.tensors.push_back({"bias", Dtype::kI64, {2}, std::as_bytes(std::span(bias))});
        file.slices.push_back(whole_slice({2}));
      }
      auto written = write_section(files, draft, file);
      manifest.files.push_back(written.file);
      for (auto& tensor : written.tensors) manifest.tensors.push_back(std::move(tensor));
    }
    manifest.tensors = merge_pieces(std::move(manifest.tensors));
    store.publish(draft, manifest);
  } catch (const Error&) {
    store.discard(draft);
    throw;
  }
  store.keep_latest(step, keep);
}

/// Reads everything of a checkpoint and returns its step if all values are those of that step.
inline int64_t step_if_right(const std::string& path) {
  const CheckpointReader reader(path);
  reader.verify();
  const auto& manifest = reader.manifest();
  const StoredTensor* weight = manifest.find("model", "weight");
  const StoredTensor* bias = manifest.find("model", "bias");
  if (weight == nullptr || bias == nullptr || manifest.tensors.size() != 2) return -1;
  const auto values = weight_of(manifest.step);
  const std::vector<int64_t> biases = {manifest.step, -manifest.step};
  const auto same = [&](const StoredTensor& tensor, const auto& expected) {
    const auto bytes = reader.read(tensor);
    return bytes.size() == expected.size() * sizeof(expected[0]) &&
           std::memcmp(bytes.data(), expected.data(), bytes.size()) == 0;
  };
  return same(*weight, values) && same(*bias, biases) ? manifest.step : -1;
}

/// The step of the latest good checkpoint of a folder, whose values must all be right; 0: none.
inline int64_t latest_good(const std::string& folder) {
  const auto entries = list_checkpoints(folder);
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    try {
      const int64_t step = step_if_right(entry->path);
      EXPECT_EQ(step, entry->step) << entry->path << " was accepted with wrong values";
      return step;
    } catch (const Error&) {
    }
  }
  return 0;
}

}  // namespace lockstep::test
