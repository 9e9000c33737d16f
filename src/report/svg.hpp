#pragma once

#include <string>
#include <string_view>

#include "report/chart.hpp"

namespace lockstep {

/// Escapes text for elements and quoted attributes of HTML and SVG. Control characters become
/// spaces.
std::string escape_xml(std::string_view text);

/// The styles of the classes in a chart. --ink, --muted, --grid and --paper must be defined.
std::string svg_style();

/// Defines those four colours, light and dark, for the element that `selector` names.
std::string colour_style(std::string_view selector);

/// What an SVG is for: a page that has the styles, or a file of its own.
enum class SvgTarget { kInPage, kFile };

/// A chart as one <svg> element with title and description. `id` must be unique in its page.
std::string render_svg(const Chart& chart, const std::string& id, SvgTarget target);

}  // namespace lockstep
