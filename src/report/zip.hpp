#pragma once

#include <ctime>
#include <string>
#include <vector>

#include "report/document.hpp"

namespace lockstep {

/// The CRC-32 of ISO 3309, as in zip and PNG.
uint32_t crc32_of(std::string_view bytes);

/// A zip archive of these files in this order, below `folder` inside of the archive, without
/// compression. The same files and date give the same bytes. More than 65,535 files or 4 GiB are an
/// Error.
std::string render_zip(const std::vector<ReportFile>& files, const std::string& folder,
                       std::time_t date);

}  // namespace lockstep
