#pragma once

#include <string>

#include "report/chart.hpp"

namespace lockstep {

/// The times of a timeline as JSON, for the viewer's script. It can stand inside a <script>
/// element: every "<" is escaped. Spans that cannot be drawn are left out.
std::string timeline_json(const Timeline& timeline);

/// The styles and the script of the viewer: it replaces the picture of each figure with the class
/// "timeline" by one that zooms and pans. It needs no network, and print shows the picture.
const char* viewer_style();
const char* viewer_script();

}  // namespace lockstep
