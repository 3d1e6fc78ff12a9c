mod asks;
mod block;
mod load;
mod stalls;
