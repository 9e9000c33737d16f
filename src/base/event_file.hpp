#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

// TensorBoard's event files: records of TensorFlow, each an Event of its protocol buffers.

namespace lockstep {

/// CRC-32C (Castagnoli), as iSCSI and TFRecord have it.
uint32_t crc32c(std::string_view bytes);

/// A TFRecord: length, masked checksum of the length, the bytes, masked checksum of the bytes.
std::string tf_record(std::string_view bytes);

/// The Event that a file begins with.
std::string version_event(double wall_time);

/// Scalars of one step.
std::string scalar_event(double wall_time, int64_t step,
                         std::span<const std::pair<std::string_view, double>> scalars);

/// Tells TensorBoard that a run begins again at this step: it forgets what it has read of later
/// ones.
std::string restart_event(double wall_time, int64_t step);

/// How many bytes of an event file are whole records of steps up to `last_step`. What follows is
/// damaged, or of later steps.
size_t keep_events(std::string_view file, int64_t last_step);

/// The last step in a file; none if it has no scalar.
std::optional<int64_t> last_event_step(std::string_view file);

}  // namespace lockstep
