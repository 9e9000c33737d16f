#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cli/top/top_draw.hpp"

namespace lockstep::cli {

/// What a user can do on the screen of `lockstep top`.
enum class Key {
  kCharacter,  ///< any other key; its character comes with it
  kUp,
  kDown,
  kPageUp,
  kPageDown,
  kHome,
  kEnd,
  kEnter,
  kErase,
  kEscape
};

struct KeyPress {
  Key key = Key::kCharacter;
  char character = 0;  ///< of kCharacter

  bool operator==(const KeyPress&) const = default;
};

/// The keys in what a terminal sent. Sequences that mean nothing here are left out.
std::vector<KeyPress> decode_keys(std::string_view typed);

/// The screen of `lockstep top`: a title, the GPUs and runs, and a last line that names the keys.
/// If not all of it fits, runs are folded to a line each, and the user selects one, unfolds it,
/// scrolls, or narrows the list to names that contain a text. It knows nothing of a terminal.
class TopScreen {
 public:
  explicit TopScreen(double interval_s) : interval_s_(interval_s) {}

  /// Takes the keys that were pressed. Returns false if the user wants to quit.
  bool press(const std::vector<KeyPress>& keys);

  /// At most `height` lines, none wider than the style says. Keys act on what was drawn last.
  std::vector<std::string> draw(const TopView& view, size_t height, const DrawStyle& style);

 private:
  // A run as it was drawn last, and its lines among all lines below the title.
  struct Entry {
    std::string id;  // a name may be used again
    bool open = false;
    size_t begin = 0;
    size_t end = 0;
  };

  std::string id_of(const RunView& run) const;
  void press_one(const KeyPress& pressed);
  void press_while_typing(const KeyPress& pressed);
  void select(size_t index);
  size_t selected_index() const;
  std::vector<const RunView*> chosen_runs(const TopView& view) const;
  std::string title(const TopView& view, size_t shown, const DrawStyle& style) const;
  std::string last_line(size_t lines, size_t room, const DrawStyle& style) const;

  double interval_s_;
  bool quit_ = false;
  bool typing_ = false;                       // keys go to filter_
  std::string filter_;                        // part of the names to show; empty: all
  std::string selected_;                      // id; empty: none yet
  bool follow_ = false;                       // the selection moved: scroll to it
  size_t first_ = 0;                          // first line shown
  size_t room_ = 1;                           // lines between the title and the last line
  std::map<std::string, bool> open_by_user_;  // [id]; a run that is not here is open if all fit
  std::vector<Entry> entries_;
};

}  // namespace lockstep::cli
