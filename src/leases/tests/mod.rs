mod asks;
mod block;
mod load;
