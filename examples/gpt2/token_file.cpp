#include "token_file.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "lockstep/error.hpp"

namespace gpt2 {
namespace {

using lockstep::Code;
using lockstep::Error;

constexpr int32_t kMagic = 20240520;  // of llm.c
constexpr int64_t kHeaderBytes = 1024;

bool has_header(const std::string& path) {
  std::array<int32_t, 2> begin{};
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(begin.data()), sizeof(begin));
  return file && begin[0] == kMagic && begin[1] == 1;
}

}  // namespace

TokenFile::TokenFile(const std::string& path, int64_t vocabulary)
    : path_(path), vocabulary_(vocabulary) {
  std::error_code error;
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error) {
    throw Error(Code::kFileRead, fmt::format("{}: {}", path, error.message()),
                "make token files by `gpt2 tokens`, and give their folder as --data");
  }
  const int64_t skipped = has_header(path) ? kHeaderBytes : 0;
  if (bytes % 2 != 0 || bytes - skipped < 4) {
    throw Error(Code::kFileFormat, fmt::format("{} has {} bytes", path, bytes),
                "give a file of at least two tokens, each an unsigned number of 16 bits");
  }
  tokens_ = torch::from_file(path, /*shared=*/false, bytes / 2, torch::kInt16)
                .narrow(0, skipped / 2, (bytes - skipped) / 2);
}

torch::Tensor TokenFile::read(int64_t first, int64_t count) const {
  const auto tokens = tokens_.narrow(0, first, count).to(torch::kInt64).bitwise_and(0xffff);
  if (tokens.max().item<int64_t>() < vocabulary_) return tokens;
  throw Error(Code::kFileFormat,
              fmt::format("{} has token {}, but the vocabulary has {}", path_,
                          tokens.max().item<int64_t>(), vocabulary_),
              "give the vocabulary that the file was made with");
}

Batch draw_batch(const TokenFile& file, int64_t rows, int64_t context, uint64_t seed,
                 int64_t step) {
  if (file.size() <= context) {
    throw Error(Code::kUsage,
                fmt::format("{} tokens are not enough for a context of {}", file.size(), context),
                "give more text or a smaller --context");
  }
  auto generator =
      at::detail::createCPUGenerator(seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(step));
  const auto places = torch::randint(file.size() - context, {rows}, generator, torch::kInt64);
  std::vector<torch::Tensor> windows;
  for (int64_t row = 0; row < rows; ++row) {
    windows.push_back(file.read(places[row].item<int64_t>(), context + 1));
  }
  const auto all = torch::stack(windows);
  return {all.narrow(1, 0, context).contiguous(), all.narrow(1, 1, context).contiguous()};
}

int64_t count_windows(const TokenFile& file, int64_t context) {
  return (file.size() - 2) / context + 1;
}

Batch read_windows(const TokenFile& file, int64_t first, int64_t count, int64_t context) {
  std::vector<torch::Tensor> windows;
  for (int64_t window = first; window < first + count; ++window) {
    const int64_t begin = window * context;
    windows.push_back(file.read(begin, 1 + std::min(context, file.size() - 1 - begin)));
  }
  const auto all = torch::stack(windows);
  const int64_t positions = all.size(1) - 1;
  return {all.narrow(1, 0, positions).contiguous(), all.narrow(1, 1, positions).contiguous()};
}

Batch pad_batch(Batch batch, int64_t rows, int64_t multiple) {
  const int64_t more_rows = std::max<int64_t>(0, rows - batch.x.size(0));
  const int64_t positions = batch.x.size(1);
  const int64_t more = (multiple - positions % multiple) % multiple;
  if (more_rows == 0 && more == 0) return batch;
  const torch::nn::functional::PadFuncOptions sizes({0, more, 0, more_rows});
  auto ignored = sizes;
  ignored.value(kIgnored);
  return {torch::nn::functional::pad(batch.x, sizes), torch::nn::functional::pad(batch.y, ignored)};
}

void write_tokens(const std::string& path, const std::vector<int>& tokens) {
  std::vector<uint16_t> small(tokens.begin(), tokens.end());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(small.data()),
             static_cast<std::streamsize>(small.size() * sizeof(uint16_t)));
  file.close();
  if (!file) {
    throw Error(Code::kFileWrite, fmt::format("{} cannot be written", path),
                "give a folder that can be written to");
  }
}

}  // namespace gpt2
