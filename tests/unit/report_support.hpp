#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "report/canvas.hpp"

namespace lockstep::test {

/// Every text of a drawing.
inline std::vector<Drawing::Text> texts_of(const Drawing& drawing) {
  std::vector<Drawing::Text> texts;
  for (const auto& mark : drawing.marks()) {
    if (const auto* text = std::get_if<Drawing::Text>(&mark)) texts.push_back(*text);
  }
  return texts;
}

inline size_t count_text(const Drawing& drawing, const std::string& wanted) {
  size_t count = 0;
  for (const auto& text : texts_of(drawing)) count += text.utf8 == wanted ? 1 : 0;
  return count;
}

/// All texts, with spaces between.
inline std::string joined_texts(const Drawing& drawing) {
  std::string all;
  for (const auto& text : texts_of(drawing)) all += text.utf8 + " ";
  return all;
}

/// Every mark must be in the box, and every coordinate a number.
inline void expect_inside(const Drawing& drawing, const Box& box) {
  constexpr double kRounding = 0.51;  // half of a line's width, and letters' overhang
  for (const auto& mark : drawing.marks()) {
    const Box bounds = bounds_of(mark);
    const auto* text = std::get_if<Drawing::Text>(&mark);
    const std::string what = text != nullptr ? text->utf8 : "mark " + std::to_string(mark.index());
    EXPECT_GE(bounds.x, box.x - kRounding) << what;
    EXPECT_GE(bounds.y, box.y - kRounding) << what;
    EXPECT_LE(bounds.right(), box.right() + kRounding) << what;
    EXPECT_LE(bounds.bottom(), box.bottom() + kRounding) << what;
  }
}

/// What is wrong with an XML text: unbalanced tags, attributes without quotes, raw & or <; empty if
/// it is well-formed. The caller lists HTML's void elements.
inline std::string xml_fault(const std::string& xml, const std::vector<std::string>& voids = {}) {
  std::vector<std::string> open;
  const auto is_name = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-';
  };
  for (size_t i = 0; i < xml.size(); ++i) {
    if (xml[i] == '&') {
      const size_t end = xml.find(';', i);
      if (end == std::string::npos || end - i > 7) return "a raw & at " + xml.substr(i, 20);
    }
    if (xml[i] == '>') return "a raw > at " + xml.substr(i, 20);
    if (xml[i] != '<') continue;
    if (xml.compare(i, 2, "<!") == 0) {
      i = xml.find('>', i);
      continue;
    }
    const bool closing = xml[i + 1] == '/';
    size_t at = i + (closing ? 2 : 1);
    std::string name;
    while (at < xml.size() && is_name(xml[at])) name += xml[at++];
    if (name.empty()) return "a raw < at " + xml.substr(i, 20);
    char quote = 0;
    for (; at < xml.size() && (quote != 0 || xml[at] != '>'); ++at) {
      if (xml[at] == '<') return "a < inside of " + xml.substr(i, 40);
      if (quote != 0 && xml[at] == quote) {
        quote = 0;
      } else if (quote == 0 && xml[at] == '=') {
        quote = xml[++at];
        if (quote != '"') return "an attribute without quotes in " + xml.substr(i, 40);
      }
    }
    if (at >= xml.size()) return "a tag without end: " + name;
    const bool empty = xml[at - 1] == '/';
    if (closing) {
      if (open.empty() || open.back() != name) return "</" + name + "> closes nothing";
      open.pop_back();
    } else if (!empty && std::find(voids.begin(), voids.end(), name) == voids.end()) {
      open.push_back(name);
    }
    i = at;
    for (const char* raw : {"style", "script"}) {  // they have > of their own
      if (name == raw && !closing) i = xml.find(std::string("</") + raw, i) - 1;
    }
  }
  return open.empty() ? "" : "<" + open.back() + "> is not closed";
}

}  // namespace lockstep::test
