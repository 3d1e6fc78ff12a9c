//! Examples only. The first line of each file is the command that runs it.
