-- Leaky bucket. The Rust half, src/limit/strategy/leaky_bucket.rs, explains the algorithm. The level of the meter is
-- the level of the bucket. Uses meter of meter.lua.

return meter()
