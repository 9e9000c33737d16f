#pragma once

#include <string_view>

namespace lockstep {

/// Opens /dev/null on each of the descriptors 0, 1 and 2 that is closed. Otherwise the next socket
/// or file would get its number, and text for the console would be written into that.
void reserve_standard_descriptors();

/// Makes standard output send each line when it ends, where it goes into a pipe or a socket. The C
/// library would keep 4096 bytes back there: a launcher would show them late, and a rank that is
/// killed would lose them. A terminal does this already; a plain file keeps its buffer.
void send_output_by_line();

/// Writes to standard error as much of the text as it takes. A full disk, a closed descriptor or a
/// reader that has gone must not replace an error's exit code, so nothing is thrown or raised.
void print_error(std::string_view text) noexcept;

}  // namespace lockstep
