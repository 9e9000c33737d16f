#include "failure_note.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/board.hpp"

namespace lockstep {
namespace {

void note_on_board(Code code, const std::string& message, int blamed_rank) {
  const char* board = std::getenv("LOCKSTEP_BOARD");
  const char* local_rank = std::getenv("LOCAL_RANK");
  if (board == nullptr || local_rank == nullptr) return;
  int page = 0;
  const char* end = local_rank + std::strlen(local_rank);
  const auto parsed = std::from_chars(local_rank, end, page);
  if (parsed.ec != std::errc() || parsed.ptr != end) return;
  BoardPage::attach(board, page).record_first_error(code, message, blamed_rank);
}

// The shape that torch.distributed.elastic writes and reads. The file was named for this process
// alone, and nobody reads it before this process has ended.
void note_in_error_file(const std::string& message, const std::string& block) {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == '\0') return;
  const nlohmann::json note = {
      {"message",
       {{"message", message},
        {"extraInfo",
         {{"py_callstack", block}, {"timestamp", std::to_string(std::time(nullptr))}}}}}};
  std::ofstream(path) << note.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void note_failure(const Error& error) noexcept {
  try {
    const auto* by_rank = dynamic_cast<const RankError*>(&error);
    note_in_error_file(error.message(), error.block());
    note_on_board(error.code(), error.message(), by_rank != nullptr ? by_rank->blamed_rank() : -1);
  } catch (const std::exception&) {
    // The board is gone or the disk is full: the error is printed all the same.
  }
}

}  // namespace lockstep
