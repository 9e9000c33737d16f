#pragma once

#include <vector>

#include "report/document.hpp"
#include "report/drawing.hpp"

namespace lockstep {

/// A4 in points of 1/72 inch.
inline constexpr double kPageWidth = 595.28;
inline constexpr double kPageHeight = 841.89;

/// Nothing is drawn outside this part of a page; the foot line is at its bottom.
inline constexpr Box kPrinted{50, 46, kPageWidth - 100, kPageHeight - 80};

/// What is left for text, tables and figures.
inline constexpr Box kBody{50, 46, kPageWidth - 100, kPageHeight - 104};

/// The pages of a document, each complete with its foot line. Rows of tables are never cut (but one
/// that is longer than a page), their header stands again on every page, and a heading always has
/// something under it.
std::vector<Drawing> lay_out_pages(const Document& document);

}  // namespace lockstep
