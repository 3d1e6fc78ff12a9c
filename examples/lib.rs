//! Nothing but examples: the first line of each is the command that runs it.
