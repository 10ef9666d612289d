// Chooses the instruction set that the operators run on.
#pragma once
#include <string>
#include <vector>

#include "convert/table.h"
#include "table.h"

namespace tilewright {

// The chosen instruction set; the best one that this machine has unless `select` lowered it. A call asks once, so that
// it runs on one instruction set from beginning to end.
const Isa& isa();

// The conversion loops of the chosen instruction set.
const Convert& convert();

// Chooses by name ("" is the best). Returns why that is impossible, or "" when done. An instruction set that this
// machine lacks is refused: a name can only lower the choice.
std::string select(const std::string& name);

// How problems are cut: as the instruction set does, but for what `select_blocking` was given.
Blocking blocking(const Isa& isa);

// For measurements: replaces the fields of Blocking, in their order; fields that are missing or negative keep the
// instruction set's own value. Returns why a value is impossible, or "" when done. Not to be called while operators
// run.
std::string select_blocking(std::vector<int64_t> fields);

// One line for each instruction set, best first: name, tab, why it cannot be used here (empty if it can), tab, note.
std::string report();

}  // namespace tilewright
