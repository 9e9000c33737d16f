#pragma once

#include <vector>

#include "report/canvas.hpp"
#include "report/document.hpp"

namespace lockstep {

/// A4 in points of 1/72 inch.
inline constexpr double kPageWidth = 595.28;
inline constexpr double kPageHeight = 841.89;

/// The printed part of a page, with the foot line at its bottom.
inline constexpr Box kPrinted{50, 46, kPageWidth - 100, kPageHeight - 80};

/// The part for text, tables and figures.
inline constexpr Box kBody{50, 46, kPageWidth - 100, kPageHeight - 104};

/// The pages of a document with their foot lines. A table row is cut only if it is longer than a
/// page, a table's header is repeated on every page, and a heading always has something below it.
/// Sections, tables, questions and listings have bookmarks; records and listings have links.
std::vector<Drawing> lay_out_pages(const Document& document);

}  // namespace lockstep
