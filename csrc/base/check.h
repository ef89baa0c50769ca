// Host-side checks: a failed check throws with the condition, the place and a sentence; it never ends the process.
#pragma once

#include <stdexcept>
#include <string>

#define FFPA_CHECK(condition, message)                                                       \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      throw std::invalid_argument(std::string(message) + " (" #condition ", " __FILE__ ":" + \
                                  std::to_string(__LINE__) + ")");                           \
    }                                                                                        \
  } while (false)
