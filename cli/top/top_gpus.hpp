#pragma once

#include <vector>

#include "cli/nvml.hpp"
#include "cli/top/top_line.hpp"

namespace lockstep::cli {

/// "GPU 0  NVIDIA H200  87 %  12.3 GiB of 140 GiB  412 of 700 W  61 °C  1980 MHz  2 processes", a
/// line for each GPU, or a few where they do not fit into `width`. What is not known is left out.
std::vector<Line> gpu_lines(const std::vector<GpuSample>& gpus, size_t width, bool utf8);

/// A list of objects; what is not known is null.
nlohmann::json gpus_json(const std::vector<GpuSample>& gpus);

}  // namespace lockstep::cli
