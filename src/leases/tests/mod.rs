mod block;
mod load;
