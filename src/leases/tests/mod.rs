mod block;
mod load;
mod strict;
mod world;
