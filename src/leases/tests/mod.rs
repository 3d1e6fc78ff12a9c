mod asks;
mod block;
mod deploy;
mod load;
mod stalls;
