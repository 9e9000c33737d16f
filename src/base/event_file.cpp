#include "base/event_file.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little, "records are written as they are");

std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78U : 0);
    table[byte] = value;
  }
  return table;
}

// TensorFlow stores checksums so that the checksum of data with checksums in it is no fixed point.
uint32_t masked(uint32_t crc) {
  return std::rotr(crc, 15) + 0xa282ead8U;
}

template <class Number>
void append_bytes(std::string& out, Number number) {
  std::array<char, sizeof(Number)> bytes{};
  std::memcpy(bytes.data(), &number, sizeof(number));
  out.append(bytes.data(), bytes.size());
}

template <class Number>
Number read_bytes(std::string_view from) {
  Number number{};
  std::memcpy(&number, from.data(), sizeof(number));
  return number;
}

// Protocol buffers: a key (field number and wire type), then the value.
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kText = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void append_key(std::string& out, uint32_t field, WireType type) {
  append_varint(out, field << 3 | type);
}

void append_text(std::string& out, uint32_t field, std::string_view text) {
  append_key(out, field, kText);
  append_varint(out, text.size());
  out += text;
}

// Fields of tensorflow.Event.
enum EventField : uint32_t { kWallTime = 1, kStep = 2, kVersion = 3, kSummary = 5, kSession = 7 };

std::string begin_event(double wall_time, std::optional<int64_t> step) {
  std::string event;
  append_key(event, kWallTime, kFixed64);
  append_bytes(event, wall_time);
  if (step) {
    append_key(event, kStep, kVarint);
    append_varint(event, static_cast<uint64_t>(*step));
  }
  return event;
}

std::optional<uint64_t> take_varint(std::string_view& from) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && !from.empty(); shift += 7) {
    const auto byte = static_cast<uint8_t>(from.front());
    from.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  return std::nullopt;
}

// The step of an event with scalars; none for other events and for what is no event.
std::optional<int64_t> step_of(std::string_view event) {
  int64_t step = 0;
  bool has_scalars = false;
  while (!event.empty()) {
    const auto key = take_varint(event);
    if (!key) return std::nullopt;
    size_t bytes = 0;
    switch (*key & 7) {
      case kVarint: {
        const auto value = take_varint(event);
        if (!value) return std::nullopt;
        if (*key >> 3 == kStep) step = static_cast<int64_t>(*value);
        break;
      }
      case kText: {
        const auto length = take_varint(event);
        if (!length || *length > event.size()) return std::nullopt;
        has_scalars = has_scalars || *key >> 3 == kSummary;
        bytes = static_cast<size_t>(*length);
        break;
      }
      case kFixed64:
        bytes = 8;
        break;
      case kFixed32:
        bytes = 4;
        break;
      default:
        return std::nullopt;
    }
    if (bytes > event.size()) return std::nullopt;
    event.remove_prefix(bytes);
  }
  return has_scalars ? std::optional(step) : std::nullopt;
}

constexpr size_t kLengthBytes = sizeof(uint64_t);
constexpr size_t kCrcBytes = sizeof(uint32_t);

// The bytes of the record that a text begins with; none if it is torn or damaged.
std::optional<std::string_view> first_record(std::string_view from) {
  constexpr size_t kHead = kLengthBytes + kCrcBytes;
  if (from.size() < kHead + kCrcBytes) return std::nullopt;
  const auto length = read_bytes<uint64_t>(from);
  if (read_bytes<uint32_t>(from.substr(kLengthBytes)) !=
      masked(crc32c(from.substr(0, kLengthBytes)))) {
    return std::nullopt;
  }
  if (length > from.size() - kHead - kCrcBytes) return std::nullopt;
  const auto bytes = from.substr(kHead, static_cast<size_t>(length));
  const auto crc = read_bytes<uint32_t>(from.substr(kHead + bytes.size()));
  return crc == masked(crc32c(bytes)) ? std::optional(bytes) : std::nullopt;
}

size_t record_bytes(std::string_view bytes) {
  return kLengthBytes + kCrcBytes + bytes.size() + kCrcBytes;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static const auto table = make_crc_table();
  uint32_t crc = 0xffffffffU;
  for (const char byte : bytes) crc = table[(crc ^ static_cast<uint8_t>(byte)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

std::string tf_record(std::string_view bytes) {
  std::string record;
  append_bytes(record, static_cast<uint64_t>(bytes.size()));
  append_bytes(record, masked(crc32c(record)));
  record += bytes;
  append_bytes(record, masked(crc32c(bytes)));
  return record;
}

std::string version_event(double wall_time) {
  std::string event = begin_event(wall_time, std::nullopt);
  append_text(event, kVersion, "brain.Event:2");
  return event;
}

std::string scalar_event(double wall_time, int64_t step,
                         std::span<const std::pair<std::string_view, double>> scalars) {
  std::string summary;
  for (const auto& [name, value] : scalars) {
    std::string entry;  // Summary.Value: tag = 1, simple_value = 2
    append_text(entry, 1, name);
    append_key(entry, 2, kFixed32);
    append_bytes(entry, static_cast<float>(value));
    append_text(summary, 1, entry);
  }
  std::string event = begin_event(wall_time, step);
  append_text(event, kSummary, summary);
  return event;
}

std::string restart_event(double wall_time, int64_t step) {
  std::string session;  // SessionLog: status = 1, START = 1
  append_key(session, 1, kVarint);
  append_varint(session, 1);
  std::string event = begin_event(wall_time, step);
  append_text(event, kSession, session);
  return event;
}

size_t keep_events(std::string_view file, int64_t last_step) {
  size_t kept = 0;
  while (const auto record = first_record(file.substr(kept))) {
    const auto step = step_of(*record);
    if (step && *step > last_step) break;
    kept += record_bytes(*record);
  }
  return kept;
}

std::optional<int64_t> last_event_step(std::string_view file) {
  std::optional<int64_t> last;
  size_t at = 0;
  while (const auto record = first_record(file.substr(at))) {
    if (const auto step = step_of(*record)) last = step;
    at += record_bytes(*record);
  }
  return last;
}

}  // namespace lockstep
