// The numbers of a call that appends rows to the keys and values of sequences whose keys lie in pages.
#pragma once

#include <cstdint>

#include "attention/params/attention_params.h"
#include "base/compiler.h"

namespace ffpa {

struct AppendParams {
  TensorView k;        // the new rows [batch, heads, rows, columns]; those of packed sequences have no batch dimension
  TensorView v;        // likewise, of value_columns
  TensorView k_pages;  // [pages, heads, rows of a page, columns]
  TensorView v_pages;  // likewise, of value_columns
  PagedKeys paged;     // `used` counts the keys before the new rows, `added` has the offsets of packed ones

  int batch;
  int heads;
  int rows;  // new rows of a sequence, or those of all packed sequences
  int columns;
  int value_columns;  // 0 where V is the first columns of K, in one storage

  FFPA_HOST_DEVICE bool is_packed() const { return paged.added != nullptr; }
  FFPA_HOST_DEVICE int64_t all_rows() const { return is_packed() ? rows : int64_t{batch} * rows; }
};

}  // namespace ffpa
