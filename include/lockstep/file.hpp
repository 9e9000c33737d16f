#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lockstep {

/// The whole of a file as text; an Error names the path and the reason.
std::string read_text_file(const std::string& path);

/// Writes beside `path`, flushes to disk, then renames: readers see the old file or the new one,
/// never a part. Pieces are written one after the other.
void write_file_atomically(const std::string& path,
                           std::span<const std::span<const std::byte>> pieces);
void write_file_atomically(const std::string& path, const std::string& text);

}  // namespace lockstep
