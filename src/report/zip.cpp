#include "report/zip.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr size_t kMostFiles = 0xFFFF;
constexpr size_t kMostBytes = 0xFFFFFFFF;

std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit)
      rest = (rest & 1U) != 0 ? 0xEDB88320U ^ (rest >> 1U) : rest >> 1U;
    table.at(byte) = rest;
  }
  return table;
}

// Numbers of a zip file, the lowest byte first.
void put16(std::string& bytes, uint32_t value) {
  bytes += static_cast<char>(value & 0xFFU);
  bytes += static_cast<char>(value >> 8U & 0xFFU);
}

void put32(std::string& bytes, size_t value) {
  put16(bytes, static_cast<uint32_t>(value & 0xFFFFU));
  put16(bytes, static_cast<uint32_t>(value >> 16U & 0xFFFFU));
}

// MS-DOS time and date, which begin in 1980 and count two seconds.
struct DosTime {
  uint32_t time = 0;
  uint32_t date = 0x21;
};

DosTime dos_time(std::time_t date) {
  std::tm parts{};
  ::gmtime_r(&date, &parts);
  if (parts.tm_year < 80) return {};
  const auto part = [](int value) { return static_cast<uint32_t>(value); };
  return {part(parts.tm_hour) << 11U | part(parts.tm_min) << 5U | part(parts.tm_sec) / 2,
          part(parts.tm_year - 80) << 9U | part(parts.tm_mon + 1) << 5U | part(parts.tm_mday)};
}

// The fields that a file's own header and its entry in the directory share.
std::string common_fields(const ReportFile& file, const std::string& name, const DosTime& time) {
  constexpr uint32_t kVersion = 20;
  constexpr uint32_t kUtf8Names = 0x0800;
  constexpr uint32_t kStored = 0;
  std::string fields;
  put16(fields, kVersion);
  put16(fields, kUtf8Names);
  put16(fields, kStored);
  put16(fields, time.time);
  put16(fields, time.date);
  put32(fields, crc32_of(file.bytes));
  put32(fields, file.bytes.size());
  put32(fields, file.bytes.size());
  put16(fields, static_cast<uint32_t>(name.size()));
  put16(fields, 0);  // no extra field
  return fields;
}

}  // namespace

uint32_t crc32_of(std::string_view bytes) {
  static const auto kTable = crc_table();
  uint32_t crc = 0xFFFFFFFFU;
  for (const char c : bytes) {
    crc = kTable.at((crc ^ static_cast<unsigned char>(c)) & 0xFFU) ^ crc >> 8U;
  }
  return ~crc;
}

std::string render_zip(const std::vector<ReportFile>& files, const std::string& folder,
                       std::time_t date) {
  const DosTime time = dos_time(date);
  std::string archive;
  std::string directory;
  for (const auto& file : files) {
    const std::string name = folder + "/" + file.path;
    if (archive.size() + file.bytes.size() > kMostBytes - (1U << 20U) ||
        files.size() > kMostFiles) {
      throw Error(Code::kFileWrite, fmt::format("the zip would be too large at {}", file.path),
                  "hand in the folder itself, or leave --zip out");
    }
    const std::string fields = common_fields(file, name, time);
    const size_t offset = archive.size();
    put32(archive, 0x04034B50);
    archive += fields + name + file.bytes;

    constexpr uint32_t kMadeByUnix = 3U << 8U | 20;
    constexpr size_t kPlainFile = 0100644;
    put32(directory, 0x02014B50);
    put16(directory, kMadeByUnix);
    directory += fields;
    put16(directory, 0);  // no comment
    put16(directory, 0);  // first disk
    put16(directory, 0);  // internal attributes
    put32(directory, kPlainFile << 16U);
    put32(directory, offset);
    directory += name;
  }
  const size_t begin = archive.size();
  archive += directory;
  put32(archive, 0x06054B50);
  put32(archive, 0);  // disks
  put16(archive, static_cast<uint32_t>(files.size()));
  put16(archive, static_cast<uint32_t>(files.size()));
  put32(archive, directory.size());
  put32(archive, begin);
  put16(archive, 0);  // no comment
  return archive;
}

}  // namespace lockstep
