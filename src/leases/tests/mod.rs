mod strict;
mod world;
